"""The growth manifest: which fields it pins, what it says of each phase, and how it travels through a file."""

import copy
import dataclasses
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from blockgrow_titan.growth.manifest import (
    TRAJECTORY_FIELDS,
    build_manifest,
    check_config,
    check_data,
    code_commit,
    read_manifest,
    trajectory_config,
    write_manifest,
)
from blockgrow_titan.growth.schedule import schedule_of
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import FLAVORS
from blockgrow_titan.model.model import BlockStackModel
from blockgrow_titan.parse import parse_config
from tests.unit_tests.jobs import arguments, without_teacher

# Fields of the same sections that change how fast a run goes or what it says, never what it trains.
FREE = {
    "growth.keep_boundary_checkpoints",
    "growth.start_phase",
    "distill.chunk_tokens",
    "teacher.ranks",
    "teacher.shard_degree",
    "teacher.prefetch",
    "teacher.timeout_seconds",
    "documents.micro_batching",
    "documents.pad_to_multiple_of",
    "optimizer.implementation",
    "optimizer.early_step_in_backward",
    "diagnostics.enable",
    "diagnostics.tokens",
}
WHOLE_SECTIONS = (
    "block_stack",
    "growth",
    "distill",
    "teacher",
    "documents",
    "optimizer",
    "lr_scheduler",
    "diagnostics",
)


DATA: dict[str, dict[str, int | str]] = {
    "training": {"documents": 40, "digest": "a" * 64},
    "validation": {"documents": 7, "digest": "b" * 64},
}


def parsed(workspace: Path, **overrides: Any) -> JobConfig:
    return parse_config(arguments(workspace, workspace / "never_made", **overrides))


def manifest_of(job_config: JobConfig) -> dict[str, Any]:
    args = FLAVORS[job_config.model.flavor]
    args.update_from_config(job_config)
    return build_manifest(job_config, schedule_of(job_config), args, BlockStackModel, DATA)


def test_every_field_is_pinned_or_free(workspace: Path) -> None:
    """A field that is added to a section must be put on one of the two lists."""
    job_config = parsed(workspace)
    pinned = set(trajectory_config(job_config))  # raises if a field does not exist
    assert len(pinned) == sum(len(names) for names in TRAJECTORY_FIELDS.values()) and not pinned & FREE
    fields = {
        f"{section}.{field.name}"
        for section in WHOLE_SECTIONS
        for field in dataclasses.fields(getattr(job_config, section))
    }
    assert fields == {name for name in pinned | FREE if name.split(".")[0] in WHOLE_SECTIONS}


@pytest.mark.parametrize(
    ("overrides", "trainable"),
    [
        ({}, ["0 boundary", "0 1 boundary", "0 1 2 boundary"]),
        ({"growth__freeze": "completed_blocks"}, ["0 boundary", "1 boundary", "2 boundary"]),
        ({"growth__freeze": "completed_blocks", "growth__train_boundary": False}, ["0 boundary", "1", "2"]),
        (without_teacher(), ["0 boundary embedding", "0 1 boundary embedding", "0 1 2 boundary embedding"]),
    ],
)
def test_trainable_fqns_of_each_phase(workspace: Path, overrides: dict[str, Any], trainable: list[str]) -> None:
    growth = {"growth__phase_steps": [2, 2, 2], "growth__active_blocks": [1, 2, 3], "block_stack__layers_per_block": 2}
    manifest = manifest_of(parsed(workspace, **growth, **overrides))
    assert manifest["layers_of_block"] == {"0": [0, 1], "1": [2, 3], "2": [4, 5]}
    assert [(p["index"], p["first_step"], p["last_step"]) for p in manifest["phases"]] == [
        (0, 1, 2),
        (1, 3, 4),
        (2, 5, 6),
    ]
    weights = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "attention.q_norm", "attention.k_norm")
    weights += ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "attention_norm", "ffn_norm")
    for phase, parts in zip(manifest["phases"], trainable, strict=True):
        blocks = [int(part) for part in parts.split() if part.isdigit()]
        expected = {f"layers.{2 * b + i}.{w}.weight" for b in blocks for i in (0, 1) for w in weights}
        expected |= {"output.weight", "norm.weight"} if "boundary" in parts else set()
        expected |= {"tok_embeddings.weight"} if "embedding" in parts else set()
        assert set(phase["trainable"]) == expected and len(phase["trainable"]) == len(expected)


def test_round_trip(workspace: Path, tmp_path: Path) -> None:
    job_config = parsed(workspace)
    manifest = manifest_of(job_config)
    write_manifest(str(tmp_path / "step-2"), manifest)
    write_manifest(str(tmp_path / "step-2"), manifest)  # again, as a run that is resumed does
    assert [path.name for path in (tmp_path / "step-2").iterdir()] == ["manifest.json"]
    saved = read_manifest(str(tmp_path / "step-2"))
    assert saved == manifest and saved["data"] == DATA
    check_config(saved, job_config, "step-2")


def test_every_pinned_field_is_compared(workspace: Path) -> None:
    job_config = parsed(workspace)
    saved = manifest_of(job_config)
    for name in saved["config"]:
        other = copy.deepcopy(saved)
        other["config"][name] = "another"
        with pytest.raises(ValueError, match=f"step-2 was written .*: {name} was 'another' and is now "):
            check_config(other, job_config, "step-2")
    del other["config"][name]  # written by a version that did not know the field
    with pytest.raises(ValueError, match=f"{name} was None and is now"):
        check_config(other, job_config, "step-2")


def test_the_order_of_hooks_and_lists_counts(workspace: Path) -> None:
    job_config = parsed(workspace, growth__phase_steps=[2, 4])
    with pytest.raises(ValueError, match=r"growth.phase_steps was \[2, 4\] and is now \[4, 2\]"):
        check_config(manifest_of(job_config), parsed(workspace, growth__phase_steps=[4, 2]), "step-2")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"training": {"documents": 41, "digest": "c" * 64}},
            ": training: it had 40 documents (digest aaaaaaaaaaaaaaaa), there are now 41 documents (digest cccccccccccccccc).",
        ),
        (
            {"validation": {"documents": 7, "digest": "c" * 64}},
            ": validation: it had 7 documents (digest bbbbbbbbbbbbbbbb), there are now 7 documents (digest cccccccccccccccc).",
        ),
        ({"training": {"documents": 40, "digest": "d"}, "validation": {"documents": 8, "digest": "e"}}, "; validation: it"),
    ],
)  # fmt: skip
def test_changed_data_is_refused(workspace: Path, changed: dict[str, Any], words: str) -> None:
    saved = manifest_of(parsed(workspace))
    check_data(saved, DATA, "step-2")
    with pytest.raises(ValueError) as error:
        check_data(saved, DATA | changed, "step-2")
    text = str(error.value)
    assert text.startswith("step-2 was written by a run on other documents") and words in text
    assert "Put the old files back to resume, or start anew with another --job.dump_folder" in text and "\n" not in text


def test_a_manifest_without_data(workspace: Path) -> None:
    saved = manifest_of(parsed(workspace))
    del saved["data"]
    with pytest.raises(ValueError, match=r"training: it had nothing, there are now 40 documents"):
        check_data(saved, DATA, "step-2")


@pytest.mark.skipif(not shutil.which("git"), reason="git is not there")
def test_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    assert code_commit(tmp_path) is None  # no checkout

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", *identity, "-C", str(checkout), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    checkout.mkdir()
    git("init", "--quiet")
    assert code_commit(checkout) is None  # without a commit
    (checkout / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "-m", "first")
    git("tag", "v1")
    head = git("rev-parse", "HEAD")
    assert len(head) == 40 and code_commit(checkout) == head
    (checkout / "new").touch()  # outputs, notes: not the code's
    assert code_commit(checkout) == head
    (checkout / "file").write_text("two")
    assert code_commit(checkout) == f"{head}-dirty"
    inside = checkout / "site-packages"
    inside.mkdir()
    assert code_commit(inside) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_commit(checkout) is None  # no git


def test_the_commit_is_never_compared(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockgrow_titan.growth.manifest.code_commit", lambda: "a" * 40)
    job_config = parsed(workspace)
    saved = manifest_of(job_config)
    assert saved["commit"] == "a" * 40
    for commit in ("b" * 40, None):
        monkeypatch.setattr("blockgrow_titan.growth.manifest.code_commit", lambda commit=commit: commit)
        now = manifest_of(job_config)
        assert ("commit" in now) == (commit is not None)
        assert {k: v for k, v in now.items() if k != "commit"} == {k: v for k, v in saved.items() if k != "commit"}
        check_config(saved, job_config, "step-2")
        check_data(saved, DATA, "step-2")
