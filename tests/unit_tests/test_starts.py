"""Ranks that torchrun has started again find nothing in the store of what the ranks before them have left."""

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, HashStore, PrefixStore, Store

from blockgrow_titan.teacher.starts import store_of_this_start

RANKS = 3


def start(store: Store, delays: dict[int, float]) -> list[Store]:
    """All ranks of a start, each after its delay in seconds; their stores."""
    stores: dict[int, Store] = {}

    def run(rank: int) -> None:
        time.sleep(delays.get(rank, 0.0))
        stores[rank] = store_of_this_start(store, rank, RANKS)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [stores[rank] for rank in range(RANKS)]


@pytest.mark.parametrize("late", range(RANKS))
def test_each_start_has_a_part_of_its_own(late: int) -> None:
    """Whichever rank comes last, and though the earlier starts' names are still there."""
    store = HashStore()
    for number in range(3):
        stores = start(store, {late: 0.2})
        for rank, its_store in enumerate(stores):
            assert isinstance(its_store, PrefixStore) and not its_store.check(["from 0"])
            its_store.set(f"seen by {rank}", str(number))
        for its_store in stores:
            assert [its_store.get(f"seen by {rank}") for rank in range(RANKS)] == [str(number).encode()] * RANKS
        stores[0].set("from 0", "an address")


def test_a_start_without_its_first_rank_is_given_up() -> None:
    """Though an earlier start was complete."""
    store = HashStore()
    start(store, {})
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(DistStoreError, match="rank 0 has not started"):
        store_of_this_start(store, 1, RANKS)
