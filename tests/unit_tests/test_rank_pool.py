"""The pool of rank processes: results, isolation of jobs from each other, and survival of every kind of failure."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.rank_pool import RankError, RankPool, init_gloo


def _sum_of_ranks(rank: int, world_size: int, store: dist.Store, offset: float) -> tuple[int, torch.Tensor]:
    init_gloo(store, rank, world_size)
    total = torch.full((2,), rank + offset)
    dist.all_reduce(total)
    return os.getpid(), total


def _worlds(rank: int, world_size: int, store: dist.Store) -> tuple[int, float]:
    """Ranks 0 and 1 form one world, rank 2 another, both on the default group of their own."""
    name, local_rank, size = ("student", rank, 2) if rank < 2 else ("teacher", 0, 1)
    init_gloo(store, local_rank, size, name)
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    return dist.get_world_size(), total.item()


def _leave_a_mess(rank: int, world_size: int, store: dist.Store) -> None:
    init_gloo(store, rank, world_size)
    dist.new_group([0])
    os.chdir("/")
    os.environ["LEFT_OVER"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.rand(3)
    torch.use_deterministic_algorithms(True)
    store.set("key", "value")
    threading.Thread(target=store.wait, args=(["never set"],), daemon=True).start()


def _state(rank: int, world_size: int, store: dist.Store) -> dict:
    return {
        "pid": os.getpid(),
        "group": dist.is_initialized(),
        "folder": os.getcwd(),
        "environment": sorted({"LEFT_OVER", "RANK", "WORLD_SIZE"} & set(os.environ)),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": torch.rand(1).item(),
        "keys": store.check(["key"]),
        "threads": torch.get_num_threads(),
    }


def _fail_in_rank_one(rank: int, world_size: int, store: dist.Store) -> int:
    if rank == 1:
        print("printed by rank one")
        raise ValueError(f"rank {rank} of {world_size} objects")
    return os.getpid()


def _fail_hang_and_die(rank: int, world_size: int, store: dist.Store) -> None:
    if rank == 1:
        store.set("rank one hangs", "")
        store.wait(["never set"])
    store.wait(["rank one hangs"])
    if rank == 0:
        raise ValueError("rank zero gives up")
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(rank: int, world_size: int, store: dist.Store) -> None:
    store.wait(["never set"])


def _unpicklable(rank: int, world_size: int, store: dist.Store) -> threading.Lock:
    return threading.Lock()


@pytest.mark.parametrize("world_size", [3, 2, 1])
def test_results_come_back_by_rank(rank_pool: RankPool, world_size: int) -> None:
    results = rank_pool.run(_sum_of_ranks, world_size, offset=0.5)
    expected = sum(rank + 0.5 for rank in range(world_size))
    assert [total.tolist() for _, total in results] == [[expected] * 2] * world_size
    pids = {pid for pid, _ in results}
    assert len(pids) == world_size and os.getpid() not in pids
    assert {pid for pid, _ in rank_pool.run(_sum_of_ranks, world_size, offset=0.5)} == pids


def test_worlds_with_names_of_their_own(rank_pool: RankPool) -> None:
    assert rank_pool.run(_worlds, 3) == [(2, 3.0), (2, 3.0), (1, 3.0)]


def test_a_job_leaves_nothing_behind(rank_pool: RankPool) -> None:
    before = rank_pool.run(_state, 2)
    rank_pool.run(_leave_a_mess, 2)
    assert rank_pool.run(_state, 2) == before
    assert before[0] | {"pid": 0, "random": 0} == {
        "pid": 0,
        "group": False,
        "folder": os.getcwd(),
        "environment": [],
        "dtype": torch.float32,
        "deterministic": False,
        "random": 0,
        "keys": False,
        "threads": 1,
    }


def test_a_failing_rank_is_reported_and_survives(rank_pool: RankPool) -> None:
    pids = [state["pid"] for state in rank_pool.run(_state, 2)]
    with pytest.raises(RankError, match="ValueError: rank 1 of 2 objects") as error:
        rank_pool.run(_fail_in_rank_one, 2)
    text = str(error.value)
    assert text.startswith("_fail_in_rank_one failed in rank(s) 1\n")
    assert "raise ValueError" in text and "printed by rank one" in text
    assert [state["pid"] for state in rank_pool.run(_state, 2)] == pids


def test_stuck_and_dead_ranks_are_replaced(rank_pool: RankPool) -> None:
    pids = [state["pid"] for state in rank_pool.run(_state, 3)]
    with pytest.raises(RankError) as error:
        rank_pool.run(_fail_hang_and_die, 3, grace=0.5)
    texts = dict(zip("012", sorted(str(error.value).split("---- rank ")[1:]), strict=True))
    assert "ValueError: rank zero gives up" in texts["0"]
    assert "did not finish within 0.5 s after rank" in texts["1"]
    assert "in _fail_hang_and_die" in texts["1"]  # where it hung
    assert "died with exit code -9" in texts["2"]
    after = [state["pid"] for state in rank_pool.run(_state, 3)]
    assert after[0] == pids[0] and not set(after[1:]) & set(pids)


def test_timeout(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"failed in rank\(s\) 0\n(.*\n)*did not finish within 0.2 s: killed"):
        rank_pool.run(_hang, 1, timeout=0.2)
    assert not rank_pool.run(_state, 1)[0]["group"]


def test_what_cannot_be_sent_is_refused(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        rank_pool.run(_unpicklable, 1)
    with pytest.raises(ValueError, match="must be a function at the top level of a module"):
        rank_pool.run(lambda rank, world_size, store: None, 1)
    with pytest.raises(ValueError, match="world_size is 4, must be from 1 to 3"):
        rank_pool.run(_state, 4)
