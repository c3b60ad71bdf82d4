"""A part of the job's store for each start of its ranks.

torchrun keeps its store when it starts the ranks again. What those of an earlier start have left there (addresses of gloo,
heartbeats, the point to resume from) must not be read, and there is no number of the start that all agree on: nodes count
their restarts differently. So the ranks agree on a name. Rank 0 draws one; every rank signs it with a mark of its own; and
rank 0 confirms the marks. A name of an earlier start is never confirmed with the marks of this one.
"""

import time
import uuid
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store

POLL_SECONDS = 0.02


def store_of_this_start(store: Store, rank: int, world_size: int) -> Store:
    """The part of a store that the ranks of this start share, and no earlier ones have written to. All ranks must call.

    Raises:
        DistStoreError: If a rank has not come within the store's timeout.
    """
    mark = uuid.uuid4().hex
    patience: timedelta = store.timeout  # type: ignore[attr-defined]
    if rank == 0:
        name = uuid.uuid4().hex
        store.set("start", name)
        marks = [store.get(f"{name}/mark/{other}") for other in range(1, world_size)]
        store.set(f"{name}/marks", b" ".join(marks).decode())
        return PrefixStore(name, store)
    deadline = time.monotonic() + patience.total_seconds()
    while time.monotonic() < deadline:
        name = store.get("start").decode()  # waits for the first start's
        store.set(f"{name}/mark/{rank}", mark)
        if store.check([f"{name}/marks"]) and mark in store.get(f"{name}/marks").decode().split():
            return PrefixStore(name, store)
        time.sleep(POLL_SECONDS)
    raise DistStoreError(f"rank 0 has not started after {patience.total_seconds():.0f} s")
