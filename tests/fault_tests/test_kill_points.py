"""SIGKILL of a chosen rank at a chosen point, in every kind of job: the restarted run ends as if nothing had happened."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fault_tests.harness import LAYOUTS, FaultBench
from tests.fault_tests.points import POINTS, Kill
from tests.fault_tests.report import FaultReport

COLOCATED, SEPARATE = "1 student, colocated teacher", "1 student, 1 teacher"
TWO, TWO_AND_ONE = "2 students, colocated teacher", "2 students, 1 teacher"
SHARDED = "1 student, 2 teachers that share a copy"

# fault, layout, kills of each launch. Call numbers fit the seven steps of the jobs: growth is after step 3.
FAULTS: list[tuple[str, str, list[list[Kill]]]] = [
    ("in the first step", SEPARATE, [[Kill("step", 0, 1)]]),
    ("in a step", TWO, [[Kill("micro-batch", 1, 5)]]),
    ("between gradients and update", TWO_AND_ONE, [[Kill("optimizer step", 1, 4)]]),
    ("after the update of one of two students", TWO, [[Kill("optimizer step", 0, 5, after=True)]]),
    ("in the teacher's forward", SEPARATE, [[Kill("teacher's forward", 1, 9)]]),
    ("in the teacher's forward", TWO_AND_ONE, [[Kill("teacher's forward", 2, 14)]]),
    ("in the forward of a shared teacher", SHARDED, [[Kill("teacher's forward", 2, 6)]]),
    ("between a question's header and its payload", SEPARATE, [[Kill("payload of a message", 0, 6)]]),
    ("between an answer's header and its payload", TWO_AND_ONE, [[Kill("payload of a message", 2, 7)]]),
    ("during the look-ahead", SEPARATE, [[Kill("micro-batch asked ahead", 0, 8)]]),
    ("in the first checkpoint's save", COLOCATED, [[Kill("half a file of a checkpoint", 0, 3)]]),
    ("in the first checkpoint's save", TWO, [[Kill("checkpoint's data", 1, 1)]]),
    ("in a later checkpoint's save", TWO, [[Kill("checkpoint's data", 0, 4)]]),
    ("in a later checkpoint's save", TWO_AND_ONE, [[Kill("half a file of a checkpoint", 1, 40)]]),
    ("between a checkpoint's data and its metadata", COLOCATED, [[Kill("checkpoint's metadata", 0, 2)]]),
    ("between a checkpoint's data and its metadata", SEPARATE, [[Kill("checkpoint's metadata", 0, 3)]]),
    ("before the metadata gets its name", TWO_AND_ONE, [[Kill("metadata's last name", 0, 3)]]),
    ("after a save, before its line", COLOCATED, [[Kill("line of a checkpoint", 0, 3)]]),
    ("in the middle of a line of metrics.jsonl", TWO, [[Kill("half a line", 0, 12)]]),
    ("in the removal of an old checkpoint", COLOCATED, [[Kill("half a checkpoint removed", 0, 1)]]),
    ("during growth, before anything changed", TWO, [[Kill("phase change", 1, 1)]]),
    ("during growth, parameters carried", TWO_AND_ONE, [[Kill("parameters carried", 1, 1, after=True)]]),
    ("during growth, before its line", SEPARATE, [[Kill("line of a growth", 0, 1)]]),
    ("in validation", TWO_AND_ONE, [[Kill("validation", 1, 3)]]),
    ("in validation, before its line", COLOCATED, [[Kill("line of a validation", 0, 4)]]),
    ("at the last step", SEPARATE, [[Kill("step", 0, 7)]]),
    ("at the last step, after its save", TWO, [[Kill("save", 1, 7, after=True)]]),
    ("after the last step's save, before its line", COLOCATED, [[Kill("line of a checkpoint", 0, 7)]]),
    ("in the middle of the last line of metrics.jsonl", TWO_AND_ONE, [[Kill("half a line", 0, 20)]]),
    ("in the last removal of an old checkpoint", COLOCATED, [[Kill("half a checkpoint removed", 0, 2)]]),
    ("while summary.json is written", TWO_AND_ONE, [[Kill("summary.json replaced", 0, 1)]]),
    ("in the restart, while it loads", TWO, [[Kill("step", 0, 5)], [Kill("checkpoint's data read", 1, 1)]]),
    ("in the restart, at metrics.jsonl", SEPARATE, [[Kill("step", 0, 6)], [Kill("metrics.jsonl replaced", 0, 1)]]),
    (
        "in the restart's first step, twice",
        COLOCATED,
        [[Kill("step", 0, 6)], [Kill("step", 0, 1)], [Kill("step", 0, 1, after=True)]],
    ),
]


def test_every_point_is_reached(fault_bench: FaultBench) -> None:
    """By an undisturbed run of some layout; those of a restart by the restart alone."""
    reached = {name for layout in LAYOUTS for calls in fault_bench.case(layout).calls for name, n in calls.items() if n}
    restart = {"checkpoint's metadata read", "checkpoint's data read"}
    assert set(POINTS) - reached == restart


@pytest.mark.parametrize(("fault", "layout", "kills"), FAULTS)
def test_a_killed_rank(
    fault_bench: FaultBench,
    fault_report: FaultReport,
    tmp_path: Path,
    fault: str,
    layout: str,
    kills: Sequence[Sequence[Kill]],
) -> None:
    """Its job ends within 15 s; launched again, the run ends bit for bit as the undisturbed one."""
    outcome = fault_bench.disturb(fault_bench.case(layout), kills, tmp_path / "run")
    fault_report.fault(f"SIGKILL {fault}", where=layout, lost=outcome.lost, seconds=outcome.slowest_end)
    assert not outcome.lost, outcome.text
    assert len(outcome.launches) == len(kills) + 1, "a fault did not happen"
