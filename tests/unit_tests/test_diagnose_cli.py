"""tools/diagnose.py: columns side by side, what it reads and refuses, exit status, and help that needs no torch."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from blockgrow_titan.growth.manifest import FILE_NAME
from tests.unit_tests.models import read_json
from tests.unit_tests.students import (
    USER,
    made,
    own_module_cache,  # noqa: F401  (a fixture)
    training_model,
    user_placement,  # noqa: F401  (a fixture)
)
from tools.diagnose import main

ROOT = Path(__file__).resolve().parents[2]


def edit_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    manifest = read_json(checkpoint / FILE_NAME)
    change(manifest)
    (checkpoint / FILE_NAME).write_text(json.dumps(manifest))
    return checkpoint


@pytest.fixture
def pre(workspace: Path, tmp_path: Path) -> Path:
    return made(workspace, tmp_path / "pre", "pre", blocks=3)


@pytest.fixture
def post(workspace: Path, tmp_path: Path) -> Path:
    return made(workspace, tmp_path / "post", "post", blocks=1)


def test_side_by_side(pre: Path, post: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two depths and placements: the shallow one has dashes; the file has the same numbers, and all of them."""
    file = tmp_path / "out.json"
    assert main([str(pre), "--against", str(post), "--json", str(file), "--tokens", "45"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [f"{pre}: 3 layers, 45 tokens", f"{post}: 1 layer, 45 tokens"]
    lines = printed.out.splitlines()
    assert lines[0] == f"A  {pre}: pre, 3 blocks, step 4, phase 2"
    assert lines[1] == f"B  {post}: post, 1 block, step 1, phase 0"
    assert lines[2] == "on 2 documents, 45 tokens, 44 predictions" and lines[4].split() == ["A", "B"]
    first, second = json.loads(file.read_text())
    assert first["checkpoint"] == str(pre) and (second["step"], second["phase"]) == (1, 0)
    assert lines[5].split() == ["cross-entropy", f"{first['ce']:.4f}", f"{second['ce']:.4f}"]
    table = "\n".join(lines[4:])
    mean = [boundary["mean"] for boundary in first["boundaries"]]
    start = lines.index("residual RMS, mean")
    assert lines[start + 1].split() == [
        *"after the entry".split(),
        f"{mean[0]:.4g}",
        f"{second['boundaries'][0]['mean']:.4g}",
    ]
    assert lines[start + 4].split() == [*"after block 2".split(), f"{mean[3]:.4g}", "-"]
    start = lines.index("whole-block removal, change of cross-entropy")
    assert [line.split()[-2:] for line in lines[start + 1 : start + 4]] == [
        [f"{first['removal'][0]['delta_ce']:+.4f}", f"{second['removal'][0]['delta_ce']:+.4f}"],
        [f"{first['removal'][1]['delta_ce']:+.4f}", "-"],
        [f"{first['removal'][2]['delta_ce']:+.4f}", "-"],
    ]  # fmt: skip
    for words in (
        "mean RMS of 2 document boundary tokens",
        "mean RMS of 0 newline tokens",
        "logit lens",
        "angular distance",
    ):
        assert words in table
    ends = {len(line) for line in lines[5:] if line.endswith(tuple("0123456789-")) and line.startswith("  ")}
    assert len(ends) == 1  # columns are aligned


def test_it_reads_the_runs_validation_documents(
    pre: Path, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them, cut to validation.seq_len: cross-entropy as a plain loop over the file has it."""
    assert main([str(pre), "--json", str(tmp_path / "out.json"), "--tokens", "100000"]) == 0
    (record,) = json.loads((tmp_path / "out.json").read_text())
    tokenizer = Tokenizer.from_file(str(workspace / "tokenizer" / "tokenizer.json"))
    model, total, count, tokens = training_model(pre, "pre"), 0.0, 0, 0
    for line in (workspace / "validation.jsonl").read_text().splitlines():
        ids = [
            *tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids,
            tokenizer.token_to_id("<|endoftext|>"),
        ]
        ids = ids[:24]
        if len(ids) < 2:
            continue
        with torch.no_grad():
            log_p = model(torch.tensor([ids]))[0].double().log_softmax(-1)
        total -= sum(log_p[i, label].item() for i, label in enumerate(ids[1:]))
        count, tokens = count + len(ids) - 1, tokens + len(ids)
    assert (record["tokens"], record["predictions"]) == (tokens, count)
    assert record["ce"] == pytest.approx(total / count, rel=1e-6)
    assert f"{tokens} tokens, {count} predictions" in capsys.readouterr().out


def test_other_documents(pre: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of one's own, with its own column, for a run that had no validation set, too."""
    edit_manifest(
        pre, lambda m: m["config"].update({"validation.enable": False, "validation.dataset": "c4_validation"})
    )
    assert main([str(pre)]) == 2
    assert "trained without validation documents: give some with --documents" in capsys.readouterr().err
    (tmp_path / "mine.jsonl").write_text('{"body": "she had it."}\n{"body": "not"}\n')
    arguments = [str(pre), "--documents", str(tmp_path / "mine.jsonl"), "--text-column", "body"]
    assert main(arguments) == 0
    assert "on 2 documents, " in capsys.readouterr().out
    assert main([*arguments, "--dataset", "csv"]) == 2
    assert "must be one of: jsonl" in capsys.readouterr().err


def test_a_placement_of_the_users(
    workspace: Path,
    tmp_path: Path,
    user_placement: None,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = made(workspace, tmp_path / "run", "sandwich", experimental__custom_import=USER)
    assert main([str(checkpoint)]) == 0
    assert "sandwich, 2 blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["absent"], "absent is not there: give the .../checkpoint/step-N folder"),
        (["."], "is not a checkpoint"),
        (["{run}", "--against", "absent"], "absent is not there"),
        (["{run}", "--tokens", "1"], "--tokens is 1: it must be at least 2"),
        (["{run}", "--tokens", "0"], "--tokens is 0: it must be at least 2"),
        (["{run}", "--documents", "absent.jsonl"], '--documents = "absent.jsonl": there is no file'),
        (["{run}", "--documents", "empty.jsonl"], "holds no documents"),
        (["{run}", "--documents", "other.jsonl"], 'there is no "text"'),
        (["{run}", "--documents", "blank.jsonl"], "the validation documents are all empty"),
        (["{run}", "--tokenizer", "absent"], '--tokenizer = "absent": there is no file or folder'),
        (["{run}", "--tokenizer", "."], "which has no tokenizer.json: name its folder with --tokenizer"),
        (["{run}", "--device", "warp"], "the device warp cannot be used"),
        (["{run}", "--json", "absent/out.json"], "No such file or directory: 'absent/out.json'"),
        (["{converted}"], "is a converted teacher: give the"),
    ],
)
def test_a_refusal_is_one_line(
    pre: Path,
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "other.jsonl").write_text('{"body": "she"}\n')
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n')
    if "{converted}" in arguments:
        from blockgrow_titan.hf.from_hf import convert

        convert(str(workspace / "teacher"), str(tmp_path / "converted"), progress=False)
    arguments = [argument.format(run=pre, converted=tmp_path / "converted") for argument in arguments]
    assert main(arguments) == 2
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if "layers, " not in line]
    assert len(errors) == 1 and errors[0].startswith("error: ") and text in errors[0], printed.err
    assert not printed.out


def test_students_that_cannot_be_compared(
    workspace: Path, pre: Path, post: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another vocabulary; another tokenizer; documents that have changed since."""
    other = tmp_path / "tokenizer"
    shutil.copytree(workspace / "tokenizer", other)
    tokenizer = read_json(other / "tokenizer.json")
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = read_json(post / FILE_NAME)["config"]["model.hf_assets_path"]
    edit_manifest(post, lambda m: m["config"].update({"model.hf_assets_path": str(other)}))
    assert main([str(pre), "--against", str(post)]) == 2
    assert "with another one: their tokens are not the same" in capsys.readouterr().err
    assert main([str(pre), "--against", str(post), "--tokenizer", path]) == 0
    shutil.rmtree(other)
    assert main([str(pre), "--against", str(post)]) == 2
    assert "or name the tokenizer's folder with --tokenizer" in capsys.readouterr().err

    edit_manifest(post, lambda m: m["model"].update({"vocab_size": 400}))
    assert main([str(pre), "--against", str(post)]) == 2
    assert "has a vocabulary of 320, " in capsys.readouterr().err

    edit_manifest(pre, lambda m: m["data"].update({"validation": {"documents": 9, "digest": "0" * 64}}))
    assert main([str(pre)]) == 2
    text = capsys.readouterr().err
    assert (
        "was validated on other documents: validation: it had 9 documents (digest 0000000000000000), there are now 7"
        in text
    )
    assert main([str(pre), "--documents", str(workspace / "validation.jsonl")]) == 0


def test_ctrl_c(pre: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("blockgrow_titan.diagnostics.checkpoints.probe", interrupt)
    assert main([str(pre)]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "stopped"


def test_help_and_as_a_script(pre: Path, tmp_path: Path) -> None:
    """From another folder, without the package on the path; help explains and imports nothing large."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    script = [sys.executable, str(ROOT / "tools" / "diagnose.py")]
    profiled = environment | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run([*script, "--help"], cwd=tmp_path, env=profiled, capture_output=True, text=True)
    assert done.returncode == 0 and "python -m tools.diagnose" in done.stdout
    assert "memory:" in done.stdout and "examples:" in done.stdout and "arccos" in done.stdout
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in imported and not imported & {"torch", "torchtitan", "transformers"}
    done = subprocess.run([*script, str(pre)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"A  {pre}: pre, 3 blocks") and done.stderr == f"{pre}: 3 layers, 48 tokens\n"
