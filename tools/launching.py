"""How ``tools/run_recipe.py`` runs jobs: the state of a run's folder, one launch, its progress and the time that is left.

A run is complete when its ``summary.json`` has every step and its manifest is that of the run's config; else its newest
checkpoint says where it resumes. A launch holds a lock on the folder, which the job inherits, so that two commands never
train in one folder. Times are measured on the complete runs of the scale (wall time of their launches, in ``run.json``)
in proportion to active-layer tokens.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from blockgrow_titan.checkpoint import find_resume_point
from blockgrow_titan.events import METRICS_FILE
from blockgrow_titan.growth.manifest import check_config
from blockgrow_titan.metrics import SUMMARY_FILE, duration
from tools.recipe_runs import Run

RUN_FILE = "run.json"
LOG_FILE = "console.log"
LOCK_FILE = ".lock"
POLL_SECONDS = 0.2
REWRITE_SECONDS = 1.0
REPEAT_SECONDS = 60.0  # where the output is no terminal
TAIL_BYTES = 1 << 16
STEPS_OF_A_PACE = 5  # a launch's own pace is told after so many steps


@dataclass(frozen=True)
class State:
    """Where a run stands on disk."""

    step: int = 0
    """Of the checkpoint that it resumes; 0: none."""
    complete: bool = False
    ce: float | None = None
    """Of the validation at the last step, once complete; None without validation."""
    refused: str = ""
    """Why its folder cannot be used."""

    @property
    def words(self) -> str:
        if self.refused:
            return "refused"
        return "complete" if self.complete else f"resumes at step {self.step}" if self.step else "new"


def read_json(path: Path) -> Any:
    """What a JSON file holds; None if it is absent or broken."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_summary(folder: Path) -> dict[str, Any] | None:
    """A run's ``summary.json``; None if it is absent or not as a run writes it (a complete run writes it again)."""
    summary = read_json(folder / SUMMARY_FILE)
    try:
        well_formed = all({"steps", "active_layers", "ce"} <= row.keys() for row in summary["phases"])
        return summary if well_formed and summary["phases"] and "config" in summary["manifest"] else None
    except (KeyError, TypeError, AttributeError):
        return None


def state_of(run: Run) -> State:
    """The state of a run's folder."""
    summary = read_summary(run.folder)
    try:
        point = find_resume_point(run.job_config)
        if summary is None:
            return State(point.step)
        check_config(summary["manifest"], run.job_config, str(run.folder))
    except ValueError as error:
        return State(refused=f"{error}; here by another --out")
    if sum(row["steps"] for row in summary["phases"]) < run.schedule.total_steps:
        return State(point.step)
    return State(run.schedule.total_steps, complete=True, ce=summary["phases"][-1]["ce"])


def measured_pace(folder: Path) -> float | None:
    """Seconds for a document and active layer, from the complete runs in a scale's folder; None without one."""
    seconds = work = 0.0
    for path in folder.glob(f"*/{RUN_FILE}"):
        run, summary = read_json(path), read_summary(path.parent)
        if summary is not None and isinstance(run, dict) and run.get("seconds"):
            documents = summary["manifest"]["config"]["training.global_batch_size"]
            seconds += run["seconds"]
            work += documents * sum(row["steps"] * row["active_layers"] for row in summary["phases"])
    return seconds / work if work else None


def work_between(run: Run, step: int, end: int) -> int:
    """Documents times active layers of the steps after ``step``, up to ``end``."""
    steps = run.active_layer_steps(end) - run.active_layer_steps(step)
    return steps * run.job_config.training.global_batch_size


def work_left(run: Run, state: State) -> int:
    """Documents times active layers that a run has still to do."""
    total = run.schedule.total_steps
    return 0 if state.complete else work_between(run, state.step, total)


def last_train_event(path: Path) -> dict[str, Any] | None:
    """The last complete train line of a ``metrics.jsonl``, read from its end."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")[:-1]
        for line in reversed(lines):
            if '"event": "train"' in line:
                return json.loads(line)
    except (OSError, ValueError):
        pass
    return None


def failure_line(log: Path, start: int) -> str:
    """What the console says of a failure, from byte ``start`` of the log on: its last error, or its last words."""
    with open(log, "rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    for pattern in (r"^Config error: ", r"\w(Error|Exception)\b.*: ", r"\w"):
        if found := [line for line in lines if re.search(pattern, line)]:
            return found[-1]
    return "nothing on its console"


class Stop:
    """Within it, SIGINT, SIGTERM and SIGHUP are noted in ``signal`` (the first) and ``count`` instead of ending this process."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.count = 0
        self.before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        self.count += 1

    def __enter__(self) -> "Stop":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Console:
    """Lines, and a line of progress: rewritten in place on a terminal, printed once a minute elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.rewrites = stream.isatty()
        self.due = 0.0
        self.open = False

    def line(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self.open else text, file=self.stream, flush=True)
        self.open, self.due = False, time.monotonic() + (0.0 if self.rewrites else REPEAT_SECONDS)

    def progress(self, text: Callable[[], str]) -> None:
        """Show what ``text`` returns, if it is time."""
        if time.monotonic() < self.due:
            return
        if not self.rewrites:
            self.line(text())
            return
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text()[:width]}", end="", file=self.stream, flush=True)
        self.open, self.due = True, time.monotonic() + REWRITE_SECONDS


class Runner:
    """Launches the runs of a recipe that are not complete.

    Args:
        runs: All runs, in their order.
        launcher: The command before a run's arguments.
        folder: The scale's folder, whose complete runs tell the pace.
        console: Where progress goes.
        stop: Asked all the time whether to end.
    """

    def __init__(
        self, runs: Sequence[Run], launcher: Sequence[str], folder: Path, console: Console, stop: Stop
    ) -> None:
        self.runs = runs
        self.launcher = launcher
        self.folder = folder
        self.console = console
        self.stop = stop
        self.pace: float | None = None
        self.later_work = 0  # of the runs after this one

    def run(self) -> list[str]:
        """Run all; returns a line for each that failed. Ends early once ``stop`` has noted a signal."""
        failures = []
        for index, run in enumerate(self.runs):
            if self.stop.signal:
                break
            title = f"[{index + 1}/{len(self.runs)}] {run}"
            run.folder.mkdir(parents=True, exist_ok=True)
            with open(run.folder / LOCK_FILE, "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    failure = f"another command is training in {run.folder}"
                else:
                    failure = self._run_one(index, title, lock)
            if failure:
                self.console.line(f"{title}: FAILED: {failure}")
                failures.append(f"{run}: {failure}")
        return failures

    def _run_one(self, index: int, title: str, lock: TextIO) -> str:
        """Launch a run unless it is complete; returns how it failed, empty if it did not."""
        run = self.runs[index]
        state, log = state_of(run), run.folder / LOG_FILE
        if state.complete:
            self.console.line(f"{title}: complete already{_ce(state)}")
            return ""
        if state.refused:  # since the start of this command
            return state.refused
        self.pace = measured_pace(self.folder)
        self.later_work = sum(work_left(later, state_of(later)) for later in self.runs[index + 1 :])
        self.console.line(f"{title}: {state.words if state.step else 'starts'}; console in {log}")
        started, log_start = time.monotonic(), log.stat().st_size if log.exists() else 0
        status = self._launch(index, title, state.step, lock)
        if self.stop.signal:
            return ""
        seconds, state = time.monotonic() - started, state_of(run)
        if status == 0 and state.complete:
            self.console.line(f"{title}: complete in {duration(seconds)}{_ce(state)}")
            return ""
        if status == 0:
            return f"its job ended without completing it (console: {log})"
        ending = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
        return f"its job {ending}: {failure_line(log, log_start)} (console: {log})"

    def _launch(self, index: int, title: str, first_step: int, lock: TextIO) -> int:
        """One job from launch to exit; returns its exit status.

        The first signal goes to its process group, which then finishes its step and saves; so does the second, which ends it.
        """
        run = self.runs[index]
        seconds = note_run(run)
        metrics = run.folder / METRICS_FILE
        inode = _inode(metrics)
        started = time.monotonic()
        with open(run.folder / LOG_FILE, "a") as log:
            process = subprocess.Popen(
                [*self.launcher, *run.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
        signalled = 0
        try:
            while (status := _wait(process, POLL_SECONDS)) is None:
                if self.stop.signal and signalled < min(self.stop.count, 2):
                    signalled += 1
                    what = "its job saves and ends" if signalled == 1 else "ending its job at once"
                    self.console.line(f"{title}: {self.stop.signal.name}, {what}")
                    os.killpg(process.pid, self.stop.signal)
                elif not signalled:
                    # a job that resumes replaces the file; until then it is the last launch's
                    event = last_train_event(metrics) if _inode(metrics) != inode else None
                    self._show(index, title, event, first_step, time.monotonic() - started)
        finally:
            if process.poll() is None:  # something went wrong here
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        note_run(run, seconds + time.monotonic() - started)
        return status

    def _show(self, index: int, title: str, event: dict[str, Any] | None, first_step: int, elapsed: float) -> None:
        run, position = self.runs[index], title.partition(" ")[0]
        self.console.progress(
            lambda: f"{position} {run.name} s{run.seed}: {self._progress(index, event, first_step, elapsed)}"
        )

    def _progress(self, index: int, event: dict[str, Any] | None, first_step: int, elapsed: float) -> str:
        """Step, phase, ce and the time left, for this run and for all."""
        run, step, pace = self.runs[index], first_step, self.pace
        text = f"starting at step {first_step + 1}/{run.schedule.total_steps}"
        if event is not None:
            step = event["step"]
            text = f"step {step}/{run.schedule.total_steps}, phase {event['phase']}, ce {event['ce']:.4f}"
            if step >= first_step + STEPS_OF_A_PACE:
                pace = elapsed / work_between(run, first_step, step)
        if pace is None:
            return f"{text}, eta unknown yet"
        own = pace * work_between(run, step, run.schedule.total_steps)
        others = (self.pace or pace) * self.later_work
        return f"{text}, eta {duration(own)}, all {duration(own + others)}"


def _ce(state: State) -> str:
    return "" if state.ce is None else f", ce {state.ce:.4f}"


def _inode(path: Path) -> int:
    return path.stat().st_ino if path.exists() else 0


def _wait(process: subprocess.Popen, seconds: float) -> int | None:
    """Its exit status, None if it still runs after these seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def note_run(run: Run, seconds: float | None = None) -> float:
    """Write into a run's folder what it is and the wall time of its launches.

    Args:
        run: The run.
        seconds: The time of all launches; None: as it was.

    Returns:
        The time that was noted before.
    """
    path = run.folder / RUN_FILE
    before = read_json(path)
    before = before if isinstance(before, dict) else {}
    noted = float(before.get("seconds", 0.0))
    values = {
        "run": before.get("run", run.name),
        "scale": run.scale,
        "seed": run.seed,
        "digest": run.digest,
        "arguments": list(run.arguments),
        "seconds": noted if seconds is None else round(seconds, 3),
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values, indent=1) + "\n")
    os.replace(temporary, path)
    return noted
