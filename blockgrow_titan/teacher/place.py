"""A rank's place in the job, and what it can tell and learn through the job's store alone, without any message.

Under the store's keys is who has joined and where, who shows signs of life (``heartbeats.py``), who has left or failed,
and whether the job is to stop.
"""

import atexit
import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.distributed import Store

from blockgrow_titan import stopping
from blockgrow_titan.teacher.heartbeats import GRACE_SECONDS, Heartbeat, JobError, cause_of, one_line

if TYPE_CHECKING:
    from blockgrow_titan.teacher.worlds import WorldLayout

LOOK_SECONDS = 3.0  # a few heartbeats
# How gloo, NCCL and the store say that a rank they talked to is no longer there.
_LOST_CONNECTION = re.compile(r"connection|socket|nccl|gloo|broken pipe|timed? ?out", re.IGNORECASE)


@dataclass(frozen=True)
class Peer:
    """A rank, as messages name it."""

    role: str
    role_rank: int
    global_rank: int
    host: str

    def __str__(self) -> str:
        return f"{self.role} rank {self.role_rank} (global rank {self.global_rank}, host {self.host})"


@dataclass
class World:
    """A rank's place in the job, and the job's store. ``close`` ends its heartbeat."""

    layout: "WorldLayout"
    role: str
    role_rank: int
    role_size: int
    global_rank: int
    store: Store
    """The store that all ranks of the job share, without any prefix."""
    host: str
    heartbeat_timeout: float = 60.0
    """``comm.heartbeat_timeout_seconds``."""
    join_timeout: float = 300.0
    """Seconds that a rank may join later than another."""
    _heartbeat: Heartbeat | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # A client connection of its own, for short calls only: no wait, of a collective say, ever holds it up.
        self._side_store = self.store.clone()  # type: ignore[attr-defined]

    def start_heartbeat(self, local_stop: Callable[[], bool] = lambda: False) -> None:
        """Give signs of life and watch another rank's, until ``close``; see ``heartbeats.py``.

        Args:
            local_stop: Asked about once a second; once true, it becomes the job's stop request.
        """
        self._heartbeat = Heartbeat(self, local_stop)
        self._heartbeat.start()
        atexit.register(self.close)
        stopping.before_end.append(self.report_failure)  # for the ranks of other nodes

    @property
    def me(self) -> Peer:
        """This rank, as messages name it."""
        return Peer(self.role, self.role_rank, self.global_rank, self.host)

    def beat(self) -> None:
        """Give one sign of life."""
        self._side_store.add(f"heartbeat/{self.global_rank}", 1)

    def beats_of(self, rank: int) -> int:
        """Signs of life that a global rank has given; 0 before it has joined."""
        return self._side_store.add(f"heartbeat/{rank}", 0)

    def flag(self, name: str) -> None:
        """Raise a flag of this rank that others see with ``has_flag``."""
        self._side_store.add(f"flag/{name}/{self.global_rank}", 1)

    def has_flag(self, name: str, rank: int) -> bool:
        return self._side_store.add(f"flag/{name}/{rank}", 0) > 0

    def peer(self, rank: int) -> Peer:
        """Describe a global rank; its host is "unknown" before it has joined."""
        key = f"host/{rank}"
        host = self._side_store.get(key).decode() if self._side_store.check([key]) else "unknown"
        return Peer(self.layout.role_of(rank), self.layout.role_rank(rank), rank, host)

    def doom(self, text: str) -> None:
        """End this process in ``GRACE_SECONDS`` unless the main thread ends it, or calls ``close``, before."""
        if self._heartbeat is not None:
            self._heartbeat.doom(text, GRACE_SECONDS)

    def report_failure(self, text: str) -> None:
        """Leave the reason why this rank ends, and with it the job: all ranks, this one too, are doomed."""
        self.doom(text)  # first: the store may be what failed, or hang
        with contextlib.suppress(RuntimeError):
            self._side_store.set(f"failure/{self.global_rank}", text)
            self._side_store.compare_set("first_failure", "", str(self.global_rank))

    def failure_of(self, rank: int) -> str | None:
        """What a global rank left with ``report_failure``, or None."""
        key = f"failure/{rank}"
        return self._side_store.get(key).decode() if self._side_store.check([key]) else None

    def first_failure(self) -> str | None:
        """Which rank of the job failed first, and with what text; None as long as all is well."""
        if not self._side_store.check(["first_failure"]):
            return None
        rank = int(self._side_store.get("first_failure"))
        return f"{self.peer(rank)} failed: {self.failure_of(rank)}"

    def lost_ranks(self) -> list[str]:
        """What has become of this world's ranks, one text for each that is gone; takes up to ``LOOK_SECONDS``.

        A failure that any rank has reported is found at once, and is then the only one.
        """
        first, size = self.layout.global_rank(self.role, 0), self.role_size
        others = [rank for rank in range(first, first + size) if rank != self.global_rank]
        if not others:
            return []
        before = {rank: self.beats_of(rank) for rank in others}
        deadline = time.monotonic() + LOOK_SECONDS
        while (failure := self.first_failure()) is None and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 20)
        if failure is not None:
            return [failure]
        return [f"{self.peer(rank)} is gone" for rank in others if self.beats_of(rank) == before[rank]]

    def explain(self, error: BaseException) -> str:
        """``one_line`` of an error; if it may come from a rank of this world that is gone, its cause and that rank's name.

        Call it before ``report_failure``.
        """
        text = one_line(error)
        if isinstance(error, JobError) or not isinstance(error, RuntimeError) or not _LOST_CONNECTION.search(text):
            return text
        text = f"{type(error).__name__}: {cause_of(error)}"
        try:
            return "; ".join([text, *self.lost_ranks()])
        except RuntimeError:  # the store is gone too
            return text

    def request_stop(self) -> None:
        """Ask the whole job to stop at the end of its step; any rank may, at any time and again."""
        with contextlib.suppress(RuntimeError):  # without a store the job is over anyway
            self._side_store.set("stop", "")
        if self._heartbeat is not None:
            self._heartbeat.stop_requested = True

    def stop_requested(self) -> bool:
        """Whether any rank has asked the job to stop, as this rank knows: the student's first within two seconds."""
        return self._heartbeat is not None and self._heartbeat.stop_requested

    def find_stop_request(self) -> bool:
        """Look for a stop request in the store."""
        return self._side_store.check(["stop"])

    def leave(self) -> None:
        """Mark this rank as one that gives no more signs of life because it has ended well."""
        self._side_store.add(f"left/{self.global_rank}", 1)

    def has_left(self, rank: int) -> bool:
        return self._side_store.check([f"left/{rank}"])

    def close(self) -> None:
        """End the heartbeat. Safe to call again."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            atexit.unregister(self.close)
            if self.report_failure in stopping.before_end:
                stopping.before_end.remove(self.report_failure)
