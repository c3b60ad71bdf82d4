"""60 kill points drawn at random, seeded: in which kind of job, at which point, which rank, at which call, before or after.

Some runs are hit again after their restart; half of them keep their store over it, as under torchrun's own restart. Points are drawn from those that an undisturbed run comes to, so every first
fault happens.
"""

import random
from pathlib import Path

import pytest

from tests.fault_tests.harness import LAYOUTS, Case, FaultBench
from tests.fault_tests.points import LOAD, POINTS, START, Kill
from tests.fault_tests.report import FaultReport

SEED = 2026
COUNT = 60
SECOND_FAULTS = 0.35
MOST_ALL_REDUCES = 100  # teachers that share a copy have idle rounds, of which there may be fewer the next time


def draw(rng: random.Random, case: Case, restart: bool = False) -> Kill:
    """A kill point of a case; of a restarted run one that comes early, or belongs to starts alone."""
    rank = rng.randrange(case.layout.world_size)
    calls = {name: count for name, count in case.calls[rank].items() if count}
    calls |= {name: min(calls[name], MOST_ALL_REDUCES) for name in {"all-reduce"} & calls.keys()}
    if restart:
        calls = {name: 1 if POINTS[name].during in (START, LOAD) else max(1, n // 4) for name, n in calls.items()}
        if rank < case.layout.num_students:
            calls |= {name: 1 for name, point in POINTS.items() if point.during == LOAD}
    during = rng.choice(sorted({POINTS[name].during for name in calls}))
    name = rng.choice(sorted(name for name in calls if POINTS[name].during == during))
    after = POINTS[name].half is None and rng.random() < 0.5
    return Kill(name, rank, rng.randint(1, calls[name]), after)


@pytest.mark.parametrize("number", range(COUNT))
def test_a_run_with_random_faults(
    fault_bench: FaultBench, fault_report: FaultReport, tmp_path: Path, number: int
) -> None:
    rng = random.Random(f"{SEED} {number}")
    case = fault_bench.case(rng.choice(sorted(LAYOUTS)))
    faults = [[draw(rng, case)]]
    if rng.random() < SECOND_FAULTS:
        faults.append([draw(rng, case, restart=True)])
    keep_store = rng.random() < 0.5
    outcome = fault_bench.disturb(case, faults, tmp_path / "run", keep_store=keep_store)
    for kills, launch in zip(faults, outcome.launches, strict=False):
        if any(launch.statuses):  # a second fault may come at a point that the restarted run does not reach
            during = POINTS[kills[0].point].during
            fault_report.fault(
                f"SIGKILL at random in {during}",
                where=f"{case.name}{', one store' * keep_store}",
                lost=outcome.lost,
                seconds=launch.ended_after,
            )
    print(f"{number}: {case.name}: {'; then '.join(str(kill) for (kill,) in faults)}")
    assert not outcome.lost, outcome.text
    assert any(outcome.launches[0].statuses), "the fault did not happen"
