"""Runs the integration tests of `features.py`, one after the other.

Each definition gets a folder: its launches go through `run_train.sh` with `--job.dump_folder` there, the console output
of each launch into a log file beside it, and then its checks are called. A failing test shows the end of the log of its
last launch and does not stop the others. The last line counts the tests; the exit status is 0 if none failed.

    python -m tests.integration_tests.run_tests                       # all
    python -m tests.integration_tests.run_tests --test_name NAME ...  # some
    python -m tests.integration_tests.run_tests --list
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.integration_tests import OverrideDefinitions
from tests.integration_tests.reading import METRICS_FILE, log_file

ROOT = Path(__file__).resolve().parents[2]
LOG_LINES = 50


@dataclass
class Outcome:
    """How one test ended: `failure` and `skipped` are empty for one that passed."""

    name: str
    seconds: float = 0.0
    failure: str = ""
    skipped: str = ""


def kill(processes: Iterable[psutil.Process]) -> None:
    """Sends SIGKILL to every process, in this order, and waits until they are gone."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=30)


def has_step(metrics: Path, step: int) -> bool:
    """True if `metrics.jsonl` has a complete train line of `step` or a later one."""
    if not metrics.is_file():
        return False
    lines = metrics.read_text().rpartition("\n")[0].splitlines()
    return any(e["event"] == "train" and e["step"] >= step for e in map(json.loads, lines))


def launch(
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    timeout: float,
    kill_when: Callable[[], bool] = lambda: False,
) -> int | None:
    """Runs one command to its end, or until `kill_when()` is true.

    Args:
        command: Program and arguments.
        env: Its whole environment.
        log: File for its stdout and stderr.
        timeout: Seconds after which it is killed.
        kill_when: Asked ten times a second; once true, all processes of the launch get SIGKILL.

    Returns:
        The exit status, or None if it was killed because of `kill_when`.

    Raises:
        AssertionError: If it took longer than `timeout`, or left a process behind.
    """
    with open(log, "w") as output:
        child = psutil.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    deadline = time.monotonic() + timeout
    # torchrun gives each rank a session of its own, so descendants are found while their parent lives.
    descendants: set[psutil.Process] = set()
    try:
        while True:
            try:
                status = child.wait(0.1)
                break
            except psutil.TimeoutExpired:
                descendants |= set(child.children(recursive=True))
            if kill_when():
                return None
            assert time.monotonic() < deadline, f"the launch took longer than {timeout:g} s and was killed"
        left = psutil.wait_procs(descendants, timeout=10)[1]
        assert not left, f"the launch ended with status {status}, but left processes behind: {left}"
        return status
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants |= set(child.children(recursive=True))
        kill([child, *descendants])


def run_definition(definition: OverrideDefinitions, folder: Path, launcher: Path) -> None:
    """Runs the launches and the checks of one definition.

    Args:
        definition: The test.
        folder: An empty folder for it; the dump folder is `folder / "dump"`.
        launcher: The script to start.

    Raises:
        AssertionError: If a launch ends otherwise than expected. What a check raises passes through.
    """
    dump = folder / "dump"
    launcher = ROOT / definition.launcher if definition.launcher else launcher
    last = len(definition.override_args) - 1
    for number, overrides in enumerate(definition.override_args):
        arguments = [argument.replace("{dump}", str(dump)) for argument in overrides]
        command = [str(launcher), "--job.config_file", definition.config, "--job.dump_folder", str(dump), *arguments]
        env = os.environ | {"NGPU": str(definition.ranks(number))} | dict(definition.env)
        kill_step = definition.kill_at_step if number == 0 else 0
        status = launch(
            command,
            env,
            log_file(dump, number),
            definition.timeout,
            kill_when=lambda step=kill_step: step > 0 and has_step(dump / METRICS_FILE, step),
        )
        if kill_step:
            assert status is None, f"launch {number} ended with status {status} before it could be killed"
        elif number == last and definition.expect_failure:
            assert status != 0, f"launch {number} succeeded, but should fail with: {definition.expect_failure}"
            output = log_file(dump, number).read_text(errors="replace")
            assert definition.expect_failure in output, f"launch {number} did not print: {definition.expect_failure}"
        else:
            assert status == 0, f"launch {number} ended with status {status}"
    for check in definition.checks:
        check(dump)


def run_one(definition: OverrideDefinitions, folder: Path, launcher: Path) -> Outcome:
    """Runs one definition and turns what it raises into an `Outcome`; see `run_definition`."""
    outcome = Outcome(definition.test_name, skipped=definition.disabled)
    if definition.disabled:
        return outcome
    folder.mkdir(parents=True)
    start = time.monotonic()
    try:
        run_definition(definition, folder, launcher)
    except Exception as error:
        logs = sorted(folder.glob("launch_*.log"))
        outcome.failure = traceback.format_exc() if not isinstance(error, AssertionError) else f"{error}\n"
        if logs:
            lines = logs[-1].read_text(errors="replace").splitlines()[-LOG_LINES:]
            outcome.failure += "\n".join([f"the last {len(lines)} lines of {logs[-1]}:", *lines, ""])
    outcome.seconds = time.monotonic() - start
    return outcome


def write_junit(outcomes: Sequence[Outcome], path: Path) -> None:
    """Writes the outcomes as a JUnit report, which CI services read."""
    suite = ET.Element("testsuite", name="integration_tests", errors="0", tests=str(len(outcomes)))
    suite.set("failures", str(sum(bool(o.failure) for o in outcomes)))
    suite.set("skipped", str(sum(bool(o.skipped) for o in outcomes)))
    for outcome in outcomes:
        case = ET.SubElement(suite, "testcase", name=outcome.name, time=f"{outcome.seconds:.1f}")
        if outcome.failure:
            # a console's colours are no XML characters
            ET.SubElement(case, "failure").text = re.sub(r"[^\t\n -\ud7ff\ue000-\ufffd]", "", outcome.failure)
        if outcome.skipped:
            ET.SubElement(case, "skipped", message=outcome.skipped)
    ET.ElementTree(suite).write(path)


def run_all(
    definitions: Sequence[OverrideDefinitions],
    folder: Path,
    junitxml: Path | None = None,
    launcher: Path = ROOT / "run_train.sh",
) -> int:
    """Runs the definitions, prints a line for each and the counts. Returns the number of failed ones."""
    outcomes = []
    for number, definition in enumerate(definitions, start=1):
        print(f"[{number:2d}/{len(definitions)}] {definition!r} ... ", end="", flush=True)
        outcome = run_one(definition, folder / definition.test_name, launcher)
        outcomes.append(outcome)
        if outcome.skipped:
            print(f"skipped: {outcome.skipped}", flush=True)
        elif outcome.failure:
            print(f"FAILED ({outcome.seconds:.1f} s)\n{outcome.failure}", flush=True)
        else:
            print(f"passed ({outcome.seconds:.1f} s)", flush=True)
        if junitxml:
            write_junit(outcomes, junitxml)
    failed, skipped = sum(bool(o.failure) for o in outcomes), sum(bool(o.skipped) for o in outcomes)
    launches = sum(len(definition.override_args) for definition in definitions if not definition.disabled)
    print(f"{launches} launches, {sum(o.seconds for o in outcomes):.0f} s")
    counts = f"{len(outcomes) - failed - skipped} passed, {failed} failed"
    print(f"{counts}, {skipped} skipped" if skipped else counts, flush=True)
    return failed


def select(definitions: Sequence[OverrideDefinitions], names: Sequence[str]) -> list[OverrideDefinitions]:
    """The definitions with these names, or all if there are none. Raises ValueError for a name that is unknown."""
    known = [definition.test_name for definition in definitions]
    assert len(set(known)) == len(known), f"test names must be unique: {known}"
    if unknown := set(names) - set(known):
        raise ValueError(f"--test_name is {', '.join(sorted(unknown))}, must be of: {', '.join(known)}")
    return [definition for definition in definitions if not names or definition.test_name in names]


def main() -> int:
    """Command line; see the module's docstring. Returns the exit status."""
    from tests.integration_tests.features import build_features_test_list

    parser = argparse.ArgumentParser(description="Runs the integration tests: whole jobs through run_train.sh.")
    parser.add_argument("--test_name", nargs="+", default=[], help="run these tests only")
    parser.add_argument("--output_dir", type=Path, help="keep dump folders and logs here; must not exist or be empty")
    parser.add_argument("--junitxml", type=Path, help="write a JUnit report to this file")
    parser.add_argument("--list", action="store_true", help="print the tests and exit")
    arguments = parser.parse_args()
    try:
        definitions = select(build_features_test_list(), arguments.test_name)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        print("\n".join(map(repr, definitions)))
        return 0
    if arguments.output_dir and arguments.output_dir.exists() and any(arguments.output_dir.iterdir()):
        parser.error(f"--output_dir is {arguments.output_dir}, must not exist or be empty")
    # So that `finally` clauses end the launches when the harness is told to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = (arguments.output_dir or Path(tempfile.mkdtemp(prefix="integration_tests_"))).resolve()
    print(f"dump folders and logs: {folder}{'' if arguments.output_dir else ' (removed if all tests pass)'}")
    failed = run_all(definitions, folder, arguments.junitxml)
    if not failed and not arguments.output_dir:
        shutil.rmtree(folder)
    return min(failed, 1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
