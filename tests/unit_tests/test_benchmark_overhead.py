"""The overhead benchmark: the plugin trains as torchtitan does, and the interval of a median is what it says."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.unit_tests.rank_pool import RankPool
from tools.benchmarks import overhead

ROUNDS = 3


def measured(rank: int, world_size: int, store: dist.Store, folder: str, tokenizer: str) -> Any:
    """``measure_sides`` on the pool's ranks, at toy size, over the pool's store."""
    import tests.unit_tests.jobs  # noqa: F401  (registers the flavor "toy")
    from tools.benchmarks import jobs

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    jobs.rendezvous = lambda: (store, rank, world_size)  # type: ignore[assignment]
    overrides = {"model__flavor": "toy", "model__hf_assets_path": tokenizer, "training__seq_len": 14}
    return overhead.measure_sides(rank, world_size, folder, ROUNDS, overrides)


@pytest.fixture(scope="module")
def sides(rank_pool: RankPool, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("overhead")
    overhead.write_documents(folder / "documents.jsonl", count=20)
    return rank_pool.run(measured, 2, folder=str(folder), tokenizer=str(workspace / "tokenizer"))


def test_the_same_losses_as_torchtitan(sides: Any) -> None:
    for of_rank in sides:
        assert [*of_rank] == [overhead.STOCK, *overhead.KINDS]
        stock = of_rank[overhead.STOCK]["losses"]
        assert len(stock) == ROUNDS and len(set(stock)) == ROUNDS and stock[-1] < stock[0]
        for kind in overhead.KINDS:
            assert of_rank[kind]["losses"] == pytest.approx(stock, rel=1e-6)
    assert sides[0][overhead.STOCK]["losses"] == sides[1][overhead.STOCK]["losses"]


def _sides(ours: list[float], losses: list[float]) -> dict[str, dict[str, list[float]]]:
    warmup = [9.0] * overhead.WARMUP_STEPS
    plugin = {"seconds": warmup + ours, "losses": losses}
    stock = {"seconds": warmup + [2.0] * len(ours), "losses": [1.0] * len(losses)}
    return {overhead.STOCK: stock} | dict.fromkeys(overhead.KINDS, plugin)


def test_rows() -> None:
    step, packed, count = overhead.rows_of(_sides([2.0, 2.02, 2.04, 2.18], [1.0] * 7))
    assert step.value == 2.0 and packed.value == pytest.approx(1.015) and packed.holds
    assert "which includes 1.03" in packed.note and "4 pairs" in packed.note and "whole time 1.030" in packed.note
    assert (count.value, count.bar) == (packed.value, "<= 1.03")
    *_, missed = overhead.rows_of(_sides([2.2, 2.3, 2.4], [1.0] * 6))
    assert not missed.holds and "includes" not in missed.note


def test_other_losses_are_no_comparison() -> None:
    with pytest.raises(AssertionError, match="losses differ by 1.0e-03"):
        list(overhead.rows_of(_sides([2.0], [1.0, 1.001])))
    late = [1.0] * overhead.COMPARED_STEPS + [1.001]
    assert "1.0e-03 in all" in list(overhead.rows_of(_sides([2.0], late)))[1].note


def test_interval_of_a_median() -> None:
    """Against the exact order statistics: of 41 values, the 14th and the 28th bound a median with 95.7%."""
    low, high = overhead.interval_of_median([float(i) for i in range(1, 42)])
    assert 13 <= low <= 16 and 26 <= high <= 29
    assert overhead.interval_of_median([3.0] * 5) == (3.0, 3.0)
