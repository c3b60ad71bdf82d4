"""`tools/prepare_data.py`: documents ahead of time are those on the fly; interruption, continuation, mistakes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.documents import pretokenized_writer
from blockgrow_titan.documents.pretokenized import id_type
from blockgrow_titan.documents.records import RecordReader, TextReader
from blockgrow_titan.documents.source import DocumentSource, source_of
from blockgrow_titan.parse import parse_config
from tests.unit_tests.document_kinds import write_fineweb
from tests.unit_tests.jobs import arguments
from tests.unit_tests.models import read_json
from tests.unit_tests.preparing import (
    HELD_OUT,
    SHARD,
    ahead,
    command,
    on_the_fly,
    prepare,
    process_as_before,
    sources,
    write_documents,
)
from tools.prepare_data import main, parse_arguments

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    with process_as_before():
        yield


@pytest.fixture(scope="module")
def fineweb(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(workspace, tmp_path_factory.mktemp("fineweb"))


@pytest.fixture(scope="module")
def prepared(workspace: Path, fineweb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(workspace, tmp_path_factory.mktemp("prepared") / "out", on_the_fly(fineweb))


def one_error(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int = 2) -> str:
    """The one line with which a command ends."""
    capsys.readouterr()
    assert main(arguments) == status
    (line,) = capsys.readouterr().err.splitlines()
    return line


# The same documents


def test_the_folder(prepared: Path, workspace: Path, fineweb: Path) -> None:
    """Shards of 8 documents; ids as transformers gives them, cut to seq_len, without the end of the document."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(workspace / "tokenizer")
    texts = [json.loads(line)["text"] for line in (workspace / "train.jsonl").read_text().splitlines()]
    assert sorted(path.name for path in prepared.iterdir()) == ["train", "validation"]
    for split, first, counts in (("train", HELD_OUT, [8, 8, 5]), ("validation", 0, [5])):
        index = read_json(prepared / split / "dataset.json")
        files = {f"{i:05d}.{what}" for i in range(len(counts)) for what in ("ids", "offsets", "digests")}
        assert {path.name for path in (prepared / split).iterdir()} == {"dataset.json", *files}
        assert [documents for documents, _ in index["shards"]] == counts
        assert (index["documents"], index["max_length"], index["id_type"]) == (sum(counts), 24, "uint16")
        assert index["source"]["kind"] == "fineweb_edu" and index["source"]["path"] == str(fineweb)
        ids = np.concatenate([np.fromfile(prepared / split / f"{i:05d}.ids", np.uint16) for i in range(len(counts))])
        rows = [reference(text)["input_ids"][:24] for text in texts[first : first + sum(counts)]]
        assert ids.tolist() == sum(rows, []) and index["tokens"] == len(ids)
        assert max(len(row) for row in rows) == 24 > min(len(row) for row in rows)


@pytest.mark.parametrize("changes", [{}, {"training__seq_len": 7, "validation__seq_len": 3}])
@pytest.mark.parametrize("shard", [SHARD, 9])
def test_the_same_documents(workspace: Path, fineweb: Path, prepared: Path, changes: dict, shard: int) -> None:
    """At any length up to the kept one and for any shorter shard, in any order; with the same identity."""
    changes = changes | {"documents__shard_documents": shard}
    fly = sources(workspace, on_the_fly(fineweb, **changes))
    made = sources(workspace, ahead(prepared, **changes))
    for split, source in fly.items():
        assert [*made[split]] == [*source]
        assert made[split][0] == source[0]
        assert made[split].identity() == source.identity()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_other_kinds(kind: str, workspace: Path, tmp_path: Path) -> None:
    """Validation is a set of its own there; without shard_documents all documents are kept."""
    import datasets

    paths = {}
    for section in ("training", "validation"):
        lines = workspace / {"training": "train.jsonl", "validation": "validation.jsonl"}[section]
        texts = [json.loads(line)["text"] for line in lines.read_text().splitlines()]
        path = tmp_path / section
        if kind == "jsonl":
            shutil.copy(lines, path)
        elif kind == "parquet":
            write_fineweb(path, texts)
        else:
            names = {"training": "train", "validation": "validation"}
            datasets.DatasetDict({names[section]: datasets.Dataset.from_dict({"text": texts})}).save_to_disk(path)
        paths |= {f"{section}__dataset": kind, f"{section}__dataset_path": str(path)}
    out = tmp_path / "out"
    assert main(command(workspace, out, paths)) == 0
    fly, made = sources(workspace, paths), sources(workspace, ahead(out, documents__shard_documents=-1))
    for split, count in (("train", 40), ("validation", 7)):
        assert [*made[split]] == [*fly[split]] and len(made[split]) == count
        assert made[split].identity() == fly[split].identity()


def test_one_split_and_no_validation(workspace: Path, fineweb: Path, tmp_path: Path, capsys: Any) -> None:
    overrides = on_the_fly(fineweb)
    assert main(command(workspace, tmp_path / "a", overrides, "--split", "validation", "--workers", "1")) == 0
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["validation"]
    assert main(command(workspace, tmp_path / "b", overrides | {"validation__enable": False})) == 0
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["train"]
    line = one_error(
        capsys, command(workspace, tmp_path / "c", overrides | {"validation__enable": False}, "--split=validation")
    )
    assert "validation.enable is false" in line and not (tmp_path / "c").exists()


def test_large_vocabularies_take_four_bytes(workspace: Path, tmp_path: Path) -> None:
    """65,536 entries fit in two bytes, one more does not."""
    base = json.loads((workspace / "tokenizer" / "tokenizer.json").read_text())
    size = len(base["model"]["vocab"])
    for entries, expected in ((65_536, "uint16"), (65_537, "uint32")):
        folder = tmp_path / str(entries)
        shutil.copytree(workspace / "tokenizer", folder)
        vocab = base["model"]["vocab"] | {f"extra {i}": i for i in range(size, entries)}
        (folder / "tokenizer.json").write_text(json.dumps(base | {"model": base["model"] | {"vocab": vocab}}))
        tokenizer = HuggingFaceTokenizer(str(folder))
        assert id_type(tokenizer) == expected
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "the cat"}\n{"text": "extra"}\n')
    last = {"content": "zebra", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}  # fmt: skip
    vocabulary = base["added_tokens"] + [last | {"id": 65_537}]
    (folder / "tokenizer.json").write_text(
        json.dumps(base | {"model": base["model"] | {"vocab": vocab}, "added_tokens": vocabulary})
    )
    path.write_text('{"text": "the zebra"}\n')
    overrides = {
        "training__dataset_path": str(path),
        "validation__enable": False,
        "model__hf_assets_path": str(folder),
    }
    assert main(command(workspace, tmp_path / "out", overrides)) == 0
    job_config = parse_config(
        arguments(workspace, tmp_path, **(overrides | {"training__dataset": "pretokenized", "training__dataset_path": str(tmp_path / "out" / "train")}))
    )  # fmt: skip
    document = source_of(job_config, HuggingFaceTokenizer(str(folder)), "train")[0]
    assert document[:-1] == Tokenizer.from_file(str(folder / "tokenizer.json")).encode("the zebra").ids
    assert document[-2] == 65_537


# Interruption


def stop_at(monkeypatch: pytest.MonkeyPatch, batch: int, stop: Callable[[], None]) -> None:
    """Batches of two documents; call ``stop`` in place of this one, counted from 1 over both sets."""
    monkeypatch.setattr(pretokenized_writer, "DOCUMENTS_AT_A_TIME", 2)
    calls = []

    def ids_of(self: TextReader, records: range, tokenizer: HuggingFaceTokenizer) -> Any:
        calls.append(records)
        if len(calls) == batch:
            stop()
        return RecordReader.ids_of(
            self, records, tokenizer
        )  # one by one: the tokenizer's threads do not survive a fork

    monkeypatch.setattr(TextReader, "ids_of", ids_of)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def killed_in_fork(arguments: list[str], batch: int) -> None:
    """Run the tool in a forked process that gets SIGKILL in the middle of its work."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            patch = pytest.MonkeyPatch()
            stop_at(patch, batch, lambda: os.kill(os.getpid(), signal.SIGKILL))
            main(arguments)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("batch", "kept"), [(1, "nothing"), (6, "train: continues after document 8 of 21"), (10, "after document 16"), (12, "train: all 21")]
)  # fmt: skip
def test_killed_and_continued(
    workspace: Path, fineweb: Path, prepared: Path, tmp_path: Path, capsys: Any, batch: int, kept: str
) -> None:  # fmt: skip
    """In the first shard, inside the second and third, and in the other set: whole shards stay, the end is the same."""
    out = tmp_path / "out"
    arguments = command(workspace, out, on_the_fly(fineweb))
    killed_in_fork(arguments, batch)
    assert not out.exists() and (tmp_path / "out.partial").is_dir()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.ids")}
    whole = {path for path in before if path.with_suffix(".json").exists() or (path.parent / "dataset.json").exists()}
    capsys.readouterr()
    assert main(arguments) == 0
    text = capsys.readouterr().out  # torchtitan's logger writes there
    assert ("continues" not in text) if kept == "nothing" else (kept in text)
    assert files(out) == files(prepared)
    assert not (tmp_path / "out.partial").exists()
    for path in whole:
        moved = out / path.relative_to(tmp_path / "out.partial")
        assert moved.stat().st_mtime_ns == before[path]  # not written again
    assert len(whole) == {1: 0, 6: 1, 10: 2, 12: 3}[batch]


def test_ctrl_c_is_one_line(
    workspace: Path, fineweb: Path, prepared: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = command(workspace, out, on_the_fly(fineweb))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        stop_at(patch, 6, interrupt)
        line = one_error(capsys, arguments, status=130)
    assert line == "Stopped. The same command continues after the last whole shard"
    assert main(arguments) == 0 and files(out) == files(prepared)


@pytest.fixture
def partial(workspace: Path, fineweb: Path, tmp_path: Path) -> Path:
    """A partial folder with one whole shard; the documents are a copy of their own."""
    shutil.copytree(fineweb, tmp_path / "fineweb")
    killed_in_fork(command(workspace, tmp_path / "out", on_the_fly(tmp_path / "fineweb")), 6)
    return tmp_path / "out.partial"


def test_another_config_does_not_continue(workspace: Path, partial: Path, capsys: Any) -> None:
    out, fineweb = partial.with_name("out"), partial.with_name("fineweb")
    before = files(partial)
    for changes, options, words in (
        ({"training__seq_len": 23, "validation__seq_len": 23}, (), "train.max_length was 24 and is now 23"),
        ({"documents__held_out_documents": 6}, (), "train.source.held_out_documents was 5 and is now 6"),
        ({"documents__on_bad_document": "skip"}, (), "on_bad_document was 'stop' and is now 'skip'"),
        ({}, ("--split", "train"), "validation.documents was 5 and is now None"),
        ({}, ("--documents-per-shard", "9"), "documents_per_shard was 8 and is now 9"),
    ):
        line = one_error(capsys, command(workspace, out, on_the_fly(fineweb, **changes), *options))
        assert words in line and f"delete {partial} to start over" in line
    assert files(partial) == before


def test_other_documents_do_not_continue(workspace: Path, partial: Path, capsys: Any) -> None:
    out, fineweb = partial.with_name("out"), partial.with_name("fineweb")
    write_fineweb(fineweb, ["other"] * 40, ids=[f"other {i}" for i in range(40)], file_ends=(8, 30))
    line = one_error(capsys, command(workspace, out, on_the_fly(fineweb)))
    assert "was begun with other documents: they have changed since" in line and str(partial) in line


def test_half_written_shards_are_written_again(workspace: Path, partial: Path, prepared: Path, capsys: Any) -> None:
    """A machine that goes down may lose what it had not yet put on its disk."""
    out, fineweb = partial.with_name("out"), partial.with_name("fineweb")
    with open(partial / "train" / "00000.offsets", "r+b") as file:
        file.truncate(8)
    assert main(command(workspace, out, on_the_fly(fineweb))) == 0
    assert "Written again: " in capsys.readouterr().out
    assert {name: data for name, data in files(out).items() if "json" not in name} == {
        name: data for name, data in files(prepared).items() if "json" not in name
    }


def test_a_folder_of_somebody_else(workspace: Path, fineweb: Path, tmp_path: Path, capsys: Any) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "thesis.tex").touch()
    line = one_error(capsys, command(workspace, tmp_path / "out", on_the_fly(fineweb)))
    assert f"{partial} exists, but has no plan.json" in line and (partial / "thesis.tex").exists()


def test_two_at_once(workspace: Path, fineweb: Path, partial: Path, capsys: Any) -> None:
    import fcntl

    with open(partial / "plan.json") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        arguments = command(workspace, partial.with_name("out"), on_the_fly(partial.with_name("fineweb")))
        assert "another process is writing" in one_error(capsys, arguments)


# Bad documents


def write_bad(folder: Path) -> Path:
    lines = [f'{{"text": "document {i}"}}' for i in range(12)]
    lines[3], lines[10] = '{"text": 3}', "{"
    (folder / "bad.jsonl").write_text("\n".join(lines))
    return folder / "bad.jsonl"


def test_bad_documents(workspace: Path, tmp_path: Path, capsys: Any) -> None:
    """Stop: the first ends the command. Skip: recorded, and met again as on the fly, whatever the reading run says."""
    path = write_bad(tmp_path)
    jsonl = {"training__dataset_path": str(path), "validation__enable": False}
    line = one_error(capsys, command(workspace, tmp_path / "out", jsonl))
    assert line.startswith(
        f"Error: {path}:4: the text is of type int, not a string. Mend the record, or set documents.on"
    )
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / "out.partial")

    skip = {"documents__on_bad_document": "skip"}
    assert main(command(workspace, tmp_path / "out", jsonl | skip)) == 0
    text = capsys.readouterr().out
    assert f"{path}:4: the text is of type int, not a string. Recorded as a bad document" in text
    made = {"training__dataset": "pretokenized", "training__dataset_path": str(tmp_path / "out" / "train")}

    def train(**overrides: Any) -> DocumentSource:
        job_config = parse_config(arguments(workspace, tmp_path, **(jsonl | overrides)))
        return source_of(job_config, HuggingFaceTokenizer(job_config.model.hf_assets_path), "train")

    fly, ahead = train(**skip), train(**skip, **made)
    assert [*ahead] == [*fly] and ahead.bad_documents == fly.bad_documents == 2
    assert ahead.identity() == fly.identity()
    errors = []
    for overrides in ({}, made):
        with pytest.raises(ValueError, match='set documents.on_bad_document = "skip"') as error:
            train(**overrides)[10]
        errors.append(str(error.value))
    assert errors[0] == errors[1] and f"{path}:11: not JSON" in errors[0]


# The command line


def test_command_line_mistakes(workspace: Path, fineweb: Path, prepared: Path, tmp_path: Path, capsys: Any) -> None:
    config, out = str(workspace / "base.toml"), str(tmp_path / "out")
    for given, words in (
        ([], "the following arguments are required: CONFIG, OUT; see --help"),
        ([config, str(prepared)], f"OUT = {prepared} exists already: give another folder, or delete this one"),
        ([config, out, "--split", "test"], "--split: invalid choice: 'test'"),
        ([config, out, "--workers", "0"], "--workers: 0 must be a whole number of at least 1"),
        ([config, out, "--workers", "two"], "--workers: two must be a whole number of at least 1"),
        ([config, out, "--documents-per-shard", "x"], "--documents-per-shard: x must be a whole number"),
        ([config, out, "--shards", "3"], "unrecognized argument --shards"),
        ([config, out, "--training.seq_lenn", "3"], "Unrecognized options: --training.seq_lenn"),
        ([config, out, "--training.seq_len", "x"], "--training.seq-len: invalid literal for int() with base 10: 'x'"),
        ([str(tmp_path / "no.toml"), out], 'no.toml", which cannot be read'),
        ([config, out, "--training.dataset", "csv"], 'training.dataset = "csv" must be one of: jsonl, parquet'),
        ([config, out, "--model.hf_assets_path", "gone"], "model.hf_assets_path"),
        ([config, out, "--experimental.custom_import", "gone"], 'experimental.custom_import is "gone"'),
        ([config, out, "--training.dataset", "pretokenized"], "which is tokenised already"),
        ([config, out, "--training.dataset_path", "gone.jsonl"], "there is no file or folder"),
    ):
        assert words in one_error(capsys, given), given
    assert not list(tmp_path.iterdir())


def test_overrides_reach_the_config_as_they_are() -> None:
    overrides = ["--growth.active_blocks", "1", "2", "--documents.shard_documents", "-1", "--validation.no-enable"]
    for given in (["--split", "train", "c.toml", "out", *overrides], ["c.toml", "out", "--split=train", *overrides]):
        options, rest = parse_arguments(given)
        assert (options.config, options.out, options.split, options.workers) == ("c.toml", "out", "train", None)
        assert rest == overrides


@pytest.mark.parametrize("how", [["-m", "tools.prepare_data"], [str(ROOT / "tools" / "prepare_data.py")]])
def test_help_reads_like_documentation(how: list[str]) -> None:
    """Both ways to start the tool; the folder of the script need not be the current one for the second."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([sys.executable, *how, "--help"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0 and not result.stderr
    for words in ('dataset_path = "OUT/train"', "OUT.partial", "exit status: 0", "--documents-per-shard", "tokenise"):
        assert words in result.stdout
