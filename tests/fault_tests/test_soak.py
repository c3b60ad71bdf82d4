"""A long run uses no more at its end than at its beginning: 5,000 steps, ten growths, 200 checkpoints in one job."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockgrow_titan.checkpoint import saved_steps
from tests.fault_tests.comparing import complete_lines
from tests.fault_tests.harness import FaultBench, Layout
from tests.fault_tests.report import FaultReport

# The first phase and the last are long, so that each shows a slope at equal depth; the nine between grow quickly.
PHASE_STEPS = [3650, *[50] * 9, 900]
WARM_UP = {0: 500, 10: 300}  # steps of a phase that are left out, until its first saves have what memory they need
EVERY, HASH_EVERY = 25, 250
JOB = Layout(
    2,
    1,
    {
        "block_stack__num_blocks": 11,
        "growth__phase_steps": PHASE_STEPS,
        "growth__active_blocks": list(range(1, 12)),
        "training__steps": sum(PHASE_STEPS),
        "training__local_batch_size": 8,
        "checkpoint__interval": 25,
        "checkpoint__async_mode": "async",
        "validation__freq": 500,
        "metrics__log_freq": 100,
    },
)
SECONDS = 1500.0
MEMORY_MIB = {0: 2.0, 10: 10.0}  # in 1,000 steps, by phase; the last has 600, in which 2 MiB at once show as up to 5
SPARE = 2  # handles and threads of a save that is under way


def slope(lines: Sequence[dict[str, Any]], name: str) -> float:
    """Change of a figure in 1,000 steps, by least squares."""
    return statistics.linear_regression([x["at"] for x in lines], [x[name] for x in lines]).slope * 1000


def middle(lines: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(line[name] for line in lines)


def test_a_long_run_stays_flat(fault_bench: FaultBench, fault_report: FaultReport, tmp_path: Path) -> None:
    run, samples = tmp_path / "run", tmp_path / "samples"
    samples.mkdir()
    launch = fault_bench.launch(
        fault_bench.arguments(JOB, run),
        JOB.world_size,
        seconds=SECONDS,
        prepare="tests.fault_tests.watching:watch",
        prepare_arguments={"folder": str(samples), "every": EVERY, "hash_every": HASH_EVERY},
    )
    assert launch.statuses == [0] * JOB.world_size, launch.output
    events = complete_lines(run / "metrics.jsonl")
    steps = [event for event in events if event["event"] == "train"]
    assert [step["step"] for step in steps] == list(range(1, sum(PHASE_STEPS) + 1))
    assert sum(event["event"] == "growth" for event in events) == 10
    assert sum(event["event"] == "checkpoint" for event in events) == 200
    assert saved_steps(str(run / "checkpoint"))[-3:] == [4950, 4975, 5000]

    for phase, layers in ((0, 1), (10, 11)):
        seconds = [step["step_s"] for step in steps if step["phase"] == phase][WARM_UP[phase] :]
        tenth = len(seconds) // 10
        fault_report.line(
            "A long run: time of a step",
            layers=layers,
            steps=len(seconds),
            first_tenth=f"{statistics.median(seconds[:tenth]) * 1000:.1f} ms",
            last_tenth=f"{statistics.median(seconds[-tenth:]) * 1000:.1f} ms",
        )
    lines = [complete_lines(samples / f"rank-{rank}.jsonl") for rank in range(JOB.world_size)]
    for rank, of_rank in enumerate(lines):
        check_flat(JOB.role_of(rank), of_rank, fault_report)
    hashes = [[line["hash"] for line in of_rank if "hash" in line] for of_rank in lines[: JOB.num_students]]
    assert len(hashes[0]) == len(steps) // HASH_EVERY and hashes[0] == hashes[1], "the students have drifted apart"
    assert len(set(hashes[0])) == len(hashes[0])


def check_flat(name: str, lines: Sequence[dict[str, Any]], fault_report: FaultReport) -> None:
    """A rank's samples: memory without a slope at equal depth, as many handles and threads at the end as at the start.

    A teacher's depth is always the same; its samples are counted in answers, one to each student for each step.
    """
    if "phase" in lines[0]:
        first_steps = {phase: sum(PHASE_STEPS[:phase]) + warm_up for phase, warm_up in WARM_UP.items()}
        warm = {at: [x for x in lines if x["phase"] == at and x["at"] > first] for at, first in first_steps.items()}
    else:
        warm = {0: [x for x in lines if x["at"] > WARM_UP[0]]}
    slopes = {phase: slope(of_depth, "memory") / 2**20 for phase, of_depth in warm.items()}
    first, last = min(warm), max(warm)
    ends = warm[first][: len(warm[first]) // 3], warm[last][-len(warm[last]) // 3 :]
    fault_report.line(
        "A long run: what a rank uses",
        rank=name,
        memory=" and ".join(f"{end[len(end) // 2]['memory'] / 2**20:.0f} MiB" for end in ends),
        slope=", ".join(f"{value:+.2f} MiB" for value in slopes.values()) + " in 1,000 steps",
        handles=" and ".join(f"{middle(end, 'handles'):.0f}" for end in ends),
        threads=" and ".join(f"{middle(end, 'threads'):.0f}" for end in ends),
    )
    for phase, value in slopes.items():
        assert value < MEMORY_MIB[phase], f"{name}: memory grows by {value:.1f} MiB in 1,000 steps of phase {phase}"
    for what in ("handles", "threads"):
        assert middle(ends[1], what) <= middle(ends[0], what) + SPARE, f"{name}: {what} grow"
