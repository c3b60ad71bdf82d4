"""What depends on the number of student ranks: the data-parallel degrees, and what torchtitan is shown and logs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockgrow_titan.checks import check_ranks
from tests.unit_tests.jobs import arguments, run_job, train_events
from tests.unit_tests.rank_pool import RankError, RankPool


def degrees(replicate: int, shard: int) -> Any:
    config = SimpleNamespace(data_parallel_replicate_degree=replicate, data_parallel_shard_degree=shard)
    return SimpleNamespace(parallelism=config)


@pytest.mark.parametrize(("replicate", "shard", "ranks"), [(1, -1, 3), (1, 3, 3), (2, -1, 4), (2, 2, 4), (4, 1, 4)])
def test_degrees_that_fit(replicate: int, shard: int, ranks: int) -> None:
    check_ranks(degrees(replicate, shard), ranks)


@pytest.mark.parametrize(
    ("replicate", "shard", "ranks", "words"),
    [
        (2, -1, 1, "do not multiply to the 1 student rank"),
        (1, 2, 1, "do not multiply to the 1 student rank"),
        (2, 1, 4, "do not multiply to the 4 student rank"),
        (0, -1, 2, "must be at least 1"),
        (1, 0, 2, "must be at least 1"),
    ],
)
def test_degrees_that_do_not(replicate: int, shard: int, ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_ranks(degrees(replicate, shard), ranks)


def test_refused_before_anything_is_built(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    args = arguments(workspace, tmp_path / "dump", teacher__ranks=1, parallelism__data_parallel_shard_degree=2)
    with pytest.raises(RankError, match="ConfigError: parallelism.data_parallel_replicate_degree 1 and"):
        rank_pool.run(run_job, 2, args=args)
    assert not (tmp_path / "dump").exists()


def test_the_saved_config_is_the_users(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    """torchtitan's constructor sees a copy with another global batch and without checkpoints; that is not what is saved."""
    args = arguments(workspace, tmp_path, job__save_config_file="config.json", training__local_batch_size=3)
    events = rank_pool.run(run_job, 2, args=args)[0]
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["training"]["global_batch_size"] == 8
    assert saved["checkpoint"]["enable"] and saved["validation"]["enable"]
    assert [e["documents"] for e in train_events(events)] == [[8 * t, 8 * t + 8] for t in range(6)]
