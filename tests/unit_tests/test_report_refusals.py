"""What a report is not made of: unfinished, broken and incomparable runs; and folders that it does not replace."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockgrow_titan.report import losses
from blockgrow_titan.report.experiment import Key, make_experiment
from blockgrow_titan.report.page import runs_table
from blockgrow_titan.report.reading import find_runs, read_run
from tests.unit_tests.report_runs import ROOT, ces_of, write_run, write_standard
from tools.report import main


def grown(folder: Path, placement: str = "post", **options: Any) -> Path:
    return write_run(folder, placement, [1, 2, 3], ces_of("grow", placement, 42, 3), **options)


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line with which the command refuses; it has written nothing."""
    assert main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


def cut(path: Path, characters: int = 40) -> None:
    path.write_text(path.read_text()[:-characters])


def edit_line(path: Path, number: int, text: str) -> None:
    lines = path.read_text().splitlines()
    lines[number - 1] = text
    path.write_text("\n".join(lines) + "\n")


def drop_line(path: Path, number: int) -> None:
    lines = path.read_text().splitlines(True)
    del lines[number - 1]
    path.write_text("".join(lines))


def set_ce(summary: dict[str, Any]) -> None:
    summary["phases"][-1]["ce"] = 1.0


def diverge(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if line["event"] == "train" and line["step"] == 7)["loss"] = float("nan")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def skip_a_step(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    place = next(i for i, line in enumerate(lines) if line["event"] == "train" and line["step"] == 7)
    lines[place] = {"event": "skipped", "step": 7, "phase": lines[place]["phase"], "documents": [0, 8]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda f: cut(f / "metrics.jsonl"), "unfinished: metrics.jsonl is cut in the middle of line 69"),
    "no JSON": (
        lambda f: edit_line(f / "metrics.jsonl", 5, '{"event": "tr'),
        "corrupt: line 5 of metrics.jsonl is no JSON",
    ),
    "no object": (lambda f: edit_line(f / "metrics.jsonl", 5, "[]"), "corrupt: line 5 of metrics.jsonl is no object"),
    "a field missing": (
        lambda f: edit_line(f / "metrics.jsonl", 5, '{"event": "train"}'),
        "corrupt: its files are not as",
    ),
    "a line missing": (
        lambda f: drop_line(f / "metrics.jsonl", 5),
        "corrupt: train line 4 of metrics.jsonl is of step 5",
    ),
    "the last line missing": (
        lambda f: drop_line(f / "metrics.jsonl", 69),
        "corrupt: summary.json has ce 4.1 in phase 2",
    ),
    "empty": (lambda f: (f / "metrics.jsonl").write_text(""), "corrupt: metrics.jsonl is empty"),
    "absent": (lambda f: (f / "metrics.jsonl").unlink(), "corrupt: it has no metrics.jsonl"),
    "no text": (lambda f: (f / "metrics.jsonl").write_bytes(b"\xff\xfe"), "corrupt: metrics.jsonl cannot be read"),
    "diverged": (diverge, "diverged: the loss of step 7 is nan"),
    "a skipped step": (
        skip_a_step,
        "it skipped 1 step, the first of them 7, whose loss or gradient norm was not finite",
    ),
    "empty summary": (lambda f: (f / "summary.json").write_text(""), "corrupt: summary.json is empty"),
    "cut summary": (lambda f: cut(f / "summary.json"), "corrupt: summary.json is not whole"),
    "another summary": (lambda f: edit(f / "summary.json", set_ce), "corrupt: summary.json has ce 1.0 in phase 2"),
    "summary of less": (
        lambda f: edit(f / "summary.json", lambda s: s["phases"].pop()),
        "unfinished: it has trained 40 of 60",
    ),
    "no manifest": (lambda f: edit(f / "summary.json", lambda s: s.pop("manifest")), "corrupt: its files are not as"),
    "a field of the config missing": (
        lambda f: edit(f / "summary.json", lambda s: s["manifest"]["config"].pop("teacher.path")),
        "corrupt: its manifest lacks teacher.path",
    ),
    "another format": (lambda f: edit(f / "summary.json", lambda s: s["manifest"].update(format=1)), "not of format 2"),
    "no summary": (lambda f: (f / "summary.json").unlink(), "unfinished: it has trained 60 of 60 steps"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_runs_are_left_out(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a whole run they are listed with the reason and in no table; alone, there is nothing to report."""
    change, words = BROKEN[case]
    grown(tmp_path / "runs" / "whole", "pre")
    change(grown(tmp_path / "runs" / "broken"))
    experiment = make_experiment([read_run(folder) for folder in find_runs([tmp_path / "runs"])])
    assert [*experiment.groups] == [Key("grow", "pre")]
    (problem,) = [run.problem for run in experiment.unusable]
    assert words in problem and "\n" not in problem
    assert runs_table(experiment).rows[-1]["state"] == f"left out: {problem}"
    post = losses.table1(experiment).rows[1]
    assert post["grow"] is None
    text = refusal(capsys, tmp_path / "runs" / "broken", "-o", tmp_path / "out")
    assert "none of 1 run can be reported: broken: " in text and words in text and not (tmp_path / "out").exists()


def test_a_finished_run_that_broke_says_what_helps(tmp_path: Path) -> None:
    """Its command would find it complete; one without a summary goes on by itself."""
    cut(grown(tmp_path / "a") / "metrics.jsonl")
    assert read_run(tmp_path / "a").problem.endswith("of line 69; to train it again, remove its folder")
    (tmp_path / "a" / "summary.json").unlink()
    assert read_run(tmp_path / "a").problem.endswith("of line 69")


def test_unfinished_runs(tmp_path: Path) -> None:
    """What they are is read from their newest checkpoint; the command that goes on is said."""
    grown(tmp_path / "a", "pre")
    grown(tmp_path / "b", until=30)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "run.json").write_text("{}")
    experiment = make_experiment([read_run(folder) for folder in find_runs([tmp_path])])
    rows = runs_table(experiment).rows
    assert [row["state"].partition(";")[0] for row in rows[1:]] == [
        "left out: unfinished: it has trained 30 of 60 steps",
        "left out: unfinished: it has no checkpoint and no summary yet, so what it is is not known",
    ]
    assert [row["what"] for row in rows] == ["pre-norm grow", "post-norm grow", "unknown"]
    assert any("--only grow_post --seeds 42" in line for line in losses.table1(experiment).missing)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: cut(path), "diagnostics.jsonl is cut in the middle of line 3"),
        (lambda path: drop_line(path, 3), "diagnostics.jsonl has no record at step 60"),
        (lambda path: edit_line(path, 1, "{}"), "diagnostics.jsonl is not as a run writes it"),
        (lambda path: edit_line(path, 1, "{"), "line 1 of diagnostics.jsonl is no JSON"),
    ],
    ids=["cut", "a line missing", "a field missing", "no JSON"],
)
def test_broken_diagnostics(change: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    """The losses of the run still count, its insides do not."""
    change(grown(tmp_path / "a") / "diagnostics.jsonl")
    run = read_run(tmp_path / "a")
    assert not run.problem and run.records == [] and words in run.no_records


MIXED = {
    "teacher.path": "elsewhere",
    "training.seq_len": 128,
    "optimizer.lr": 1e-3,
    "block_stack.layers_per_block": 4,
    "validation.dataset_path": "other.jsonl",
    "model.flavor": "0.6B",
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_configs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grown(tmp_path / "runs" / "a", "pre")
    grown(tmp_path / "runs" / "b", changed={name: MIXED[name]})
    text = refusal(capsys, tmp_path / "runs", "-o", tmp_path / "out")
    assert f"mixed runs: {name} is " in text and f"{MIXED[name]} in {tmp_path / 'runs' / 'b'}" in text


def test_mixed_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other files under the same name; a shard of the same size with other documents."""
    for name in ("validation", "training"):
        folder = tmp_path / name
        grown(folder / "a", "pre")
        edit(
            grown(folder / "b") / "summary.json",
            lambda s, name=name: s["manifest"]["data"][name].update(digest="f" * 64),
        )
        assert f"mixed runs: the {name} set is " in refusal(capsys, folder, "-o", tmp_path / "out")


def test_mixed_phases_and_curricula(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grown(tmp_path / "steps" / "a", "pre")
    grown(tmp_path / "steps" / "b", steps=10)
    assert "the length of a phase (growth.phase_steps) is 20 in" in refusal(
        capsys, tmp_path / "steps", "-o", tmp_path / "out"
    )
    grown(tmp_path / "blocks" / "a", "pre")
    write_run(tmp_path / "blocks" / "b", "post", [1, 3], [4.0, 3.0])
    assert "growth.active_blocks is [1, 2, 3] in" in refusal(capsys, tmp_path / "blocks", "-o", tmp_path / "out")


def test_the_same_run_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two folders of one run are refused; one folder that is given twice is one run."""
    shutil.copytree(grown(tmp_path / "runs" / "a"), tmp_path / "runs" / "b")
    assert "are both post-norm grow with seed 42" in refusal(capsys, tmp_path / "runs", "-o", tmp_path / "out")
    assert find_runs([tmp_path / "runs" / "a", tmp_path / "runs" / ".." / "runs" / "a"]) == [tmp_path / "runs" / "a"]


def test_other_runs(tmp_path: Path) -> None:
    """Whole runs that no table has are listed with the reason."""
    grown(tmp_path / "a")
    write_run(tmp_path / "b", "post", [1], [4.0])
    write_run(tmp_path / "c", "sandwich", [3], [4.0])
    write_run(tmp_path / "d", "post", [3], [4.0], steps=60)
    write_run(tmp_path / "e", "post", [1, 1, 3], [4.0, 3.0, 2.0])
    experiment = make_experiment([read_run(folder) for folder in find_runs([tmp_path])])
    why = {run.folder.name: text for run, text in experiment.others}
    assert [*experiment.groups] == [Key("grow", "post")] and sorted(why) == ["b", "c", "d", "e"]
    assert "its active blocks are [1] of 3" in why["b"] and '"sandwich"' in why["c"]
    assert why["d"] == "its phases have 60 steps, those of the growing runs 20" and "[1, 1, 3] of 3" in why["e"]


def test_no_run_in_any_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "b", "post", [1], [4.0])
    assert "no run is of a kind that a table has: b: " in refusal(capsys, tmp_path, "-o", tmp_path / "out")


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'} has no run in it" in refusal(capsys, tmp_path / "empty", "-o", tmp_path / "out")
    assert "absent does not exist" in refusal(capsys, tmp_path / "absent", "-o", tmp_path / "out")
    (tmp_path / "file").touch()
    assert "file is not a folder" in refusal(capsys, tmp_path / "file", "-o", tmp_path / "out")


def test_runs_are_found_three_folders_deep(tmp_path: Path) -> None:
    deep = grown(tmp_path / "outputs" / "recipes" / "tiny" / "a")
    grown(tmp_path / "outputs" / ".hidden" / "b")
    assert find_runs([tmp_path / "outputs"]) == [deep]


def test_out_is_not_replaced_unless_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = write_standard(tmp_path / "runs", kinds=("joint1",))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert "exists and is not a report" in refusal(capsys, runs, "-o", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").touch()
    assert "is a file: give a folder" in refusal(capsys, runs, "-o", tmp_path / "file")
    (runs / ".blockgrow_report").touch()
    assert f"holds the run {runs / 'run01'}" in refusal(capsys, runs, "-o", runs)
    monkeypatch.chdir(tmp_path / "mine")
    (tmp_path / "mine" / ".blockgrow_report").touch()
    assert "is the current folder" in refusal(capsys, runs, "-o", ".")


def test_a_failed_write_keeps_the_older_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = write_standard(tmp_path / "runs", kinds=("joint1",))
    out = tmp_path / "out"
    out.mkdir()
    (out / ".blockgrow_report").touch()
    rename = os.rename

    def fail(source: str | Path, target: str | Path) -> None:
        if Path(source).name == "new":
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr("blockgrow_titan.report.write.FIGURES", ())
    monkeypatch.setattr(os, "rename", fail)
    assert "No space left on device" in refusal(capsys, runs, "-o", out)
    assert [path.name for path in out.iterdir()] == [".blockgrow_report"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


def test_left_out_runs_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is made, with a line on stderr for each run that is not in it; two runs of one name are told apart."""
    monkeypatch.setattr("blockgrow_titan.report.write.FIGURES", ())
    grown(tmp_path / "runs" / "x" / "a", "pre")
    grown(tmp_path / "runs" / "y" / "a", until=30)
    assert main([str(tmp_path / "runs"), "-o", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == "note: y/a is not in the tables: unfinished: it has trained 30 of 60 steps\n"


def test_help_needs_no_torch() -> None:
    blocked = "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None; from tools.report import main; main(['-h'])"
    result = subprocess.run([sys.executable, "-c", blocked], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and "tools/report.py outputs/recipes/tiny -o outputs/report" in result.stdout
