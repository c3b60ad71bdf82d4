"""Whole toy jobs: every step of the schedule leaves its mark in metrics.jsonl and summary.json."""

import json
from pathlib import Path

import pytest

from tests.unit_tests.jobs import arguments, losses, run_job, train_events, validations
from tests.unit_tests.rank_pool import RankPool


@pytest.mark.parametrize(("world_size", "teacher_ranks"), [(1, 0), (2, 1), (2, 0), (3, 1)])
def test_a_growing_job(
    rank_pool: RankPool, workspace: Path, tmp_path: Path, world_size: int, teacher_ranks: int
) -> None:
    args = arguments(workspace, tmp_path, teacher__ranks=teacher_ranks, training__local_batch_size=2)
    events = rank_pool.run(run_job, world_size, args=args)[0]
    assert [e["step"] for e in train_events(events)] == [1, 2, 3, 4, 5, 6]
    assert [e["active_layers"] for e in train_events(events)] == [1, 1, 1, 2, 2, 2]
    assert [v[:2] for v in validations(events)] == [(0, 0), (3, 0), (3, 1), (6, 1)]
    assert all(v[3] > 0 for v in validations(events))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["steps"] for row in summary["phases"]] == [3, 3]
    assert losses(events)[-1][2] < losses(events)[0][2]
