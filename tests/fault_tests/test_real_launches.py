"""The same faults in jobs that ``run_train.sh`` starts: torchrun's own restart, and the same command given again."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.fault_tests.comparing import differences
from tests.fault_tests.fork_server import ROOT
from tests.fault_tests.harness import BOUND_SECONDS, FaultBench
from tests.fault_tests.points import DIED, Kill
from tests.fault_tests.ranks import KILLS
from tests.fault_tests.report import FaultReport

SEPARATE = "1 student, 1 teacher"


def launch(args: list[str], kills: list[list[Kill]], max_restarts: int) -> tuple[int, list[str]]:
    """Start two ranks as a user would; kills by attempt of torchrun's. Returns the exit status and the lines printed."""
    environment = {
        "TRAIN_FILE": "tests.fault_tests.ranks",
        "NGPU": "2",
        "OMP_NUM_THREADS": "1",
        "MAX_RESTARTS": str(max_restarts),
        KILLS: json.dumps([[vars(kill) for kill in attempt] for attempt in kills]),
    }
    done = subprocess.run(
        [str(ROOT / "run_train.sh"), *args],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("fault", "kills"),
    [
        ("between a checkpoint's data and its metadata", [[Kill("checkpoint's metadata", 0, 4)]]),
        ("in the teacher's forward", [[Kill("teacher's forward", 1, 20)], [Kill("step", 0, 1)]]),
    ],
)
def test_torchrun_starts_the_ranks_again(
    fault_bench: FaultBench, fault_report: FaultReport, tmp_path: Path, fault: str, kills: list[list[Kill]]
) -> None:
    """One launch, as many restarts as deaths: it ends with status 0 and what an undisturbed run has."""
    case = fault_bench.case(SEPARATE)
    status, lines = launch(fault_bench.arguments(case.layout, tmp_path), kills, max_restarts=len(kills))
    lost = differences(tmp_path, case.folder)
    fault_report.fault(f"SIGKILL {fault}, torchrun restarts", where=f"run_train.sh, {SEPARATE}", lost=lost)
    assert status == 0 and not lost, "\n".join([*lost, *lines[-40:]])


def test_the_same_command_again(fault_bench: FaultBench, fault_report: FaultReport, tmp_path: Path) -> None:
    """The first launch ends with one line about the killed rank, soon, the second one completes the run."""
    case = fault_bench.case(SEPARATE)
    args = fault_bench.arguments(case.layout, tmp_path)
    status, lines = launch(args, [[Kill("optimizer step", 0, 5)]], max_restarts=0)
    ended_at = time.time()
    (died,) = [line for line in lines if DIED in line]
    seconds = ended_at - float(died.split()[-1])
    assert status == 1 and seconds < BOUND_SECONDS, "\n".join(lines[-40:])
    assert "student rank 0" in lines[-1] and "SIGKILL" in lines[-1]
    status, lines = launch(args, [], max_restarts=0)
    lost = differences(tmp_path, case.folder)
    fault_report.fault("SIGKILL in a step", where=f"run_train.sh, {SEPARATE}", lost=lost, seconds=seconds)
    assert status == 0 and not lost, "\n".join([*lost, *lines[-40:]])
