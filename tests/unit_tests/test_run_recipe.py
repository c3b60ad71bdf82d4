"""`tools/run_recipe.py` with a stand-in for `run_train.sh` that writes a job's files at once: complete, resumed, failed,
mixed and stopped runs, and what each says on the console."""

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit_tests.recipe_bench import Bench
from tools import launching
from tools.launching import Console, failure_line, last_train_event, measured_pace, read_summary, state_of
from tools.run_recipe import main

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "run_recipe.py"


@pytest.fixture
def bench(
    tmp_path: Path, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    monkeypatch.setattr(launching, "POLL_SECONDS", 0.01)
    monkeypatch.delenv("NGPU", raising=False)
    return Bench(tmp_path, workspace, capsys)


def rows_of(stdout: str) -> list[list[str]]:
    """The closing table."""
    lines = stdout.splitlines()
    start = lines.index("Validation cross-entropy at the last step")
    return [
        line.split() for line in lines[start + 2 : lines.index(next(a for a in lines if a.startswith("The folders")))]
    ]


def test_all_runs_and_again(bench: Bench) -> None:
    runs = bench.runs(42, 7)
    status, out, err = bench("--seeds", "42,7")
    assert (status, err) == (0, "") and bench.launches == [
        "grow_pre-s42",
        "grow_post-s42",
        "grow_pre-s7",
        "grow_post-s7",
    ]
    assert "4 runs, 0 complete; seeds: 42, 7; for table1\n" in out
    ces = {42: "4.2600", 7: "0.7600"}
    assert rows_of(out) == [[run.name, str(run.seed), ces[run.seed], run.folder.name] for run in runs]
    folder = bench.out / "toy"
    report = f"{folder / 'reports' / 'two' / 'report.html'}"
    assert out.splitlines()[2] == f"report: {report}"
    assert out.splitlines()[-2:] == [f"The folders are in {folder}.", f"Tables and figures: {report}"]
    assert re.search(r"\[2/4\] grow_post \(seed 42\): complete in \d+s, ce 4\.2600", out)
    for run in runs:
        assert (run.folder / "console.log").read_text() == "+ the command\n"
        note = json.loads((run.folder / "run.json").read_text())
        assert (note["run"], note["scale"], note["seed"], note["digest"]) == (run.name, "toy", run.seed, run.digest)
        assert note["arguments"] == list(run.arguments) and note["seconds"] > 0
    status, again, err = bench("--seeds", "42,7")
    assert (status, err) == (0, "") and len(bench.launches) == 4 and rows_of(again) == rows_of(out)
    assert "[1/4] grow_pre (seed 42): complete already, ce 4.2600" in again and "4 runs, 4 complete" in again


def test_only_some_and_further_options(bench: Bench) -> None:
    bench.runs(42)
    status, out, _ = bench("--only", "grow_post")
    assert status == 0 and bench.launches == ["grow_post-s42"] and len(rows_of(out)) == 1
    bench.runs(42, further=("--optimizer.lr", "1e-4"))
    status, out, _ = bench("--only grow_post -- --optimizer.lr 1e-4")
    assert status == 0 and bench.launches == ["grow_post-s42"] * 2  # another run, in a folder of its own
    assert len(list((bench.out / "toy").glob("grow_*"))) == 2
    assert "--optimizer.lr 1e-4 --debug.seed 42 --job.dump_folder" in (bench.folder / "launches").read_text()


def test_a_failed_run_does_not_stop_the_others(bench: Bench) -> None:
    runs = bench.runs()
    bench.plan("grow_pre", "fail 5")
    status, out, err = bench()
    log = runs[0].folder / "console.log"
    failure = f"its job ended with status 1: [rank0]:ValueError: what went wrong: 3 (console: {log})"
    assert status == 1 and bench.launches == ["grow_pre-s42", "grow_post-s42"]
    assert f"[1/2] grow_pre (seed 42): FAILED: {failure}\n" in out
    first, second, third = err.splitlines()
    assert first == f"1 run of 2 failed: grow_pre (seed 42): {failure}"
    assert second.startswith(f"To try again: tools/run_recipe.py {bench.recipe} --scale toy ")
    assert third == f"note: {runs[0].folder.name} is not in the tables: unfinished: it has trained 4 of 6 steps"
    assert rows_of(out)[0][:2] == ["grow_pre", "42"] and "resumes at step 4" in out and rows_of(out)[1][2] == "4.2600"
    bench.plan("grow_pre")
    status, out, err = bench()  # resumes
    assert (status, err) == (0, "") and bench.launches[2:] == ["grow_pre-s42"]
    assert "[1/2] grow_pre (seed 42): resumes at step 4; console in " in out and rows_of(out)[0][2] == "4.2600"
    lines = map(json.loads, (runs[0].folder / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["event"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert log.read_text().count("+ the command") == 2


def test_a_job_that_ends_early_is_a_failure(bench: Bench) -> None:
    bench.runs()
    bench.plan("grow_post", "nothing")
    status, out, err = bench()
    assert status == 1 and "grow_post (seed 42): its job ended without completing it" in err
    assert "complete in" in out and rows_of(out)[1][2] == "new"


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_the_running_job(bench: Bench, name: str, status: int) -> None:
    handler = signal.getsignal(signal.SIGINT)
    runs = bench.runs()
    bench.plan("grow_pre", f"stop 5 {name}")
    ended, out, err = bench()
    assert ended == status and bench.launches == ["grow_pre-s42"]
    assert err.startswith(f"Stopped by {name}. To go on: tools/run_recipe.py {bench.recipe} ") and err.count("\n") == 1
    assert f"{name}, its job saves and ends" in out and "FAILED" not in out and "Validation" not in out
    assert (bench.folder / "signals").read_text() == f"{name}\n"  # once
    assert signal.getsignal(signal.SIGINT) is handler
    assert json.loads((runs[0].folder / "run.json").read_text())["seconds"] > 0
    bench.plan("grow_pre")
    ended, out, _ = bench()
    assert ended == 0 and bench.launches == ["grow_pre-s42", "grow_pre-s42", "grow_post-s42"]
    assert "resumes at step 4" in out and [row[2] for row in rows_of(out)] == ["4.2600", "4.2600"]


def change_manifest(path: Path, pick: Callable[[Any], Any]) -> None:
    values = json.loads(path.read_text())
    pick(values)["config"]["optimizer.lr"] = 0.5
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("where", ["summary", "checkpoint"])
def test_another_config_s_folder_is_refused(bench: Bench, where: str) -> None:
    runs = bench.runs()
    if where == "summary":
        bench("--only", "grow_post")
        change_manifest(runs[1].folder / "summary.json", lambda summary: summary["manifest"])
    else:
        bench.plan("grow_post", "fail 5")
        bench("--only", "grow_post")
        change_manifest(runs[1].folder / "checkpoint" / "step-4" / "manifest.json", lambda manifest: manifest)
    for arguments in ([], ["--dry-run"]):
        status, out, err = bench(*arguments)
        assert status == 2 and bench.launches == ["grow_post-s42"]  # nothing was started
        assert err.count("\n") == 1 and err.startswith("Config error: mixed results: grow_post (seed 42): ")
        assert "optimizer.lr was 0.5 and is now 0.003" in err and "--out" in err
    assert "grow_post (seed 42): refused" in out


def test_a_folder_that_another_command_uses(bench: Bench) -> None:
    runs = bench.runs()
    runs[0].folder.mkdir(parents=True)
    with open(runs[0].folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, _, err = bench()
    assert status == 1 and f"another command is training in {runs[0].folder}" in err
    assert bench.launches == ["grow_post-s42"]


def test_dry_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = bench.runs()
    status, out, err = bench("--dry-run")
    assert (status, err, bench.launches) == (0, "", []) and not bench.out.exists()
    assert "grow_pre (seed 42): new\n  6 steps, 48 documents, 9 active-layer steps\n" in out
    assert f"  {bench.launcher} {shlex.join(runs[0].arguments)}\n" in out
    assert out.endswith("To do: 2 runs, no time to go by: no run of this scale is complete\n")
    bench("--only", "grow_pre")
    bench.plan("grow_post", "fail 5")
    bench()
    note = runs[0].folder / "run.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"seconds": 900.0}))
    monkeypatch.setenv("NGPU", "3")
    status, out, _ = bench("--dry-run")
    assert status == 0 and "grow_pre (seed 42): complete\n" in out and f"  NGPU=3 {bench.launcher} --job" in out
    # 900 s for 9 active-layer steps; after step 4 there are two steps of two layers
    assert "grow_post (seed 42): resumes at step 4\n" in out and "; about 6m40s to go\n" in out
    assert out.endswith("To do: 1 run, about 6m40s\n")


def test_broken_summaries_are_written_again(bench: Bench) -> None:
    runs = bench.runs()
    bench("--only", "grow_pre")
    summary = runs[0].folder / "summary.json"
    for text in ("", '{"phases": [', "[]", '{"phases": []}', '{"phases": [{"steps": 6}], "manifest": {}}', "3"):
        summary.write_text(text)
        assert read_summary(runs[0].folder) is None and state_of(runs[0]).words == "resumes at step 6"
    status, out, _ = bench("--only", "grow_pre")
    assert status == 0 and "complete in" in out and bench.launches == ["grow_pre-s42"] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--seeds x", "--seeds is ['x']; it must be whole numbers from 0 on"),
        ("--scale tin", 'there is no scale "tin" in'),
        ("--only grow", 'recipe two has no run "grow"; did you mean "grow_p'),
        ("--launcher no_such_program", '--launcher is "no_such_program", which is no program'),
        ("x -- --debug.seed 3", "--debug.seed after -- cannot be set: each run has its own"),
        ("x -- --job.dump-folder=3", "--job.dump_folder after -- cannot be set"),
        ("x -- --growth.freeze never", 'run grow_pre at scale toy: growth.freeze is "never"; it must be one of'),
    ],
)
def test_mistakes_are_one_line(bench: Bench, arguments: str, words: str) -> None:
    status, _, err = bench(*arguments.removeprefix("x").split())
    assert status == 2 and err.startswith(f"Config error: {words}") and err.count("\n") == 1, err
    assert not bench.out.exists()


def test_an_unknown_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["interactoin"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "data_rewind, freeze, interaction, joint_budget, optimizer_and_lr" in err


class Screen:
    """A stream that is a terminal, or not."""

    def __init__(self, terminal: bool) -> None:
        self.terminal, self.text = terminal, ""

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_console(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(launching.time, "monotonic", lambda: now[0])
    screen: Any = Screen(terminal=True)
    console = Console(screen)
    for seconds in (0.0, 0.5, 0.6):  # the second comes too early
        now[0] += seconds
        console.progress(lambda: "p" * 500)
    console.line("end")
    assert re.sub("p+", "p", screen.text) == "\r\x1b[Kp" * 2 + "\r\x1b[Kend\n" and "p" * 500 not in screen.text
    screen = Screen(terminal=False)
    console = Console(screen)
    console.line("start")
    for seconds in (30.0, 31.0, 1.0):
        now[0] += seconds
        console.progress(lambda: "p")
    assert screen.text == "start\np\n"


def test_progress(bench: Bench) -> None:
    runner = launching.Runner(bench.runs(), [], bench.out, Console(Screen(False)), launching.Stop())  # type: ignore[arg-type]
    event = {"step": 5, "phase": 1, "active_layers": 2, "ce": 4.40351}
    assert runner._progress(0, None, 0, 3.0) == "starting at step 1/6, eta unknown yet"
    runner.later_work = 9 * 8  # the other run
    # 70 s for 3 x 1 + 2 x 2 active-layer steps; 2 are left here, 9 in the other run
    text = "step 5/6, phase 1, ce 4.4035, eta 20s, all 1m50s"
    assert runner._progress(0, event, 0, 70.0) == text
    runner.pace = 5.0 / 8  # of complete runs: 5 s for an active-layer step; this run has a pace of its own
    assert runner._progress(0, event, 0, 70.0) == text.replace("1m50s", "1m05s")
    assert runner._progress(0, event | {"step": 4}, 0, 70.0).endswith("eta 20s, all 1m05s")
    assert runner._progress(0, None, 4, 1.0) == "starting at step 5/6, eta 20s, all 1m05s"


def test_last_train_event(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_train_event(path) is None
    path.write_text("")
    assert last_train_event(path) is None
    lines = [{"event": "train", "step": step, "x": "y" * 300} for step in range(1000)] + [
        {"event": "validation", "step": 999}
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "train", "st')
    event = last_train_event(path)
    assert event is not None and event["step"] == 999


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("INFO: fine\nConfig error: growth.freeze is bad\nSomeError: x\n", "Config error: growth.freeze is bad"),
        ("a\n[rank0]:torch.OutOfMemoryError: CUDA out\n====\n", "[rank0]:torch.OutOfMemoryError: CUDA out"),
        ("first\nlast words\n----\n", "last words"),
        ("", "nothing on its console"),
    ],
)
def test_failure_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "console.log"
    earlier = "Config error: of an earlier launch\n"
    path.write_text(earlier + text)
    assert failure_line(path, len(earlier)) == line


def test_pace_of_nothing(tmp_path: Path) -> None:
    assert measured_pace(tmp_path / "absent") is None


def test_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe, configs and launcher that are shipped are found from anywhere."""
    assert os.access(SCRIPT, os.X_OK)
    monkeypatch.chdir(tmp_path)
    assert main(["freeze", "--dry-run", "--seeds", "1"]) == 0
    out, err = capsys.readouterr()
    launcher = os.path.relpath(SCRIPT.parents[1] / "run_train.sh")
    assert err == "" and out.count(f"  {launcher} --job.config_file ") == 4 and not any(tmp_path.iterdir())


def test_without_the_packages_it_starts_again_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "bash").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "bash").chmod(0o755)
    command = [sys.executable, "-S", "-E", str(SCRIPT), "freeze", "--dry-run"]
    result = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-4:] == [str(SCRIPT), str(SCRIPT.parents[1]), "freeze", "--dry-run"]
    assert "setup_env.sh" in result.stdout
