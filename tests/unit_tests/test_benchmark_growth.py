"""The growth benchmark counts what it says: bytes of weights and state, collectives, what a growth leaves behind."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.jobs import arguments
from tests.unit_tests.models import DIMS, small_model
from tests.unit_tests.rank_pool import RankPool, init_gloo
from tools.benchmarks import growth, jobs


def test_bytes_of_weights_and_state() -> None:
    model = small_model(blocks=2)
    d, heads, kv, head, hidden, vocab = (
        DIMS[name] for name in ("dim", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size")
    )
    layer = 2 * d * heads * head + 2 * d * kv * head + 3 * d * hidden + 2 * head + 2 * d
    trained, frozen, rotary = 2 * layer + vocab * d + d, vocab * d, 64 * 2 * head
    assert growth.weight_bytes(model) == 4 * (trained + frozen + rotary)
    assert growth.state_bytes(model) == 4 * (4 * trained + frozen + rotary)


def count(rank: int, world_size: int, store: dist.Store) -> tuple[int, int]:
    init_gloo(store, rank, world_size)
    with growth.Collectives() as counted:
        torch.ones(7) + 1
        dist.all_reduce(torch.ones(10))
        dist.all_gather_into_tensor(torch.empty(6, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
    return counted.calls, counted.bytes


def test_collectives_are_counted(rank_pool: RankPool) -> None:
    (calls, sent), other = rank_pool.run(count, 2)
    assert calls == 2 and sent >= 40 + 24 and other == (calls, sent)


def run_growths(rank: int, world_size: int, store: dist.Store, args: list[str]) -> Any:
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(world_size)
    with mock.patch.object(jobs, "rendezvous", lambda: (store, rank, world_size)):
        return growth.grow(rank, world_size, args, timed=1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_growths(rank_pool: RankPool, workspace: Path, tmp_path: Path, world_size: int) -> None:
    phases = 2 + 4
    steps = [1 + growth.STEPS] * phases
    args = arguments(
        workspace, tmp_path, validation__enable=False, checkpoint__enable=False, teacher__prefetch=0,
        block_stack__num_blocks=phases, growth__phase_steps=steps, growth__active_blocks=list(range(1, 1 + phases)),
        training__steps=sum(steps),
    )  # fmt: skip
    results = rank_pool.run(run_growths, world_size, args=args)
    for result in results:
        assert len(result["timed"]) == 1 and len(result["trained"]) + len(result["bare"]) == 4
        for counted in (*result["trained"], *result["bare"]):
            assert counted["sent"] == counted["collectives"] == counted["alive"] == 0
            assert counted["carried"] < counted["weights"] < counted["state"]
            assert counted["peak"] >= counted["weights"] and 0 <= counted["left"] < 65536
    rows = {row.name.partition(": ")[2]: row for row in growth.rows("toy", results)}
    assert all(row.holds for name, row in rows.items() if "alive" in name or "sent" in name)
    assert ("bytes sent" in rows) == (world_size == 2)
