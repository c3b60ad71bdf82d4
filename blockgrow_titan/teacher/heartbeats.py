"""Signs of life: every rank gives them and watches another rank's, and no rank outlives its job.

Each rank has two daemon threads. The first speaks with the job's store about every second: it counts up this rank's
heartbeat, looks at that of the next rank (a ring over all ranks of the job, so the traffic of a rank does not grow with
the job), and asks whether any rank has reported a failure or wants the job to stop. The second calls nothing that could
hold it up. It ends this process, in whatever collective or kernel the main thread hangs:

- at once if the watched rank has shown no sign of life for ``comm.heartbeat_timeout_seconds`` (or has not even joined
  after ``comm.init_timeout_seconds``), or the store has not answered for as long;
- after ``GRACE_SECONDS`` if a rank has reported a failure, a peer was lost or the store is gone. The main thread mostly
  ends before, with an error of its own.

A rank that is busy, however long, still gives its sign of life; only one that is stopped, cut off or dead does not.
"""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torchtitan.tools.logging import logger

from blockgrow_titan import stopping

if TYPE_CHECKING:
    from blockgrow_titan.teacher.place import World

BEAT_SECONDS = 1.0
GRACE_SECONDS = 6.0  # more than a rank takes to tell its peers why it ends


class JobError(RuntimeError):
    """Something outside of this rank ended the job; the text names it."""


class RankLost(JobError):
    """A rank of the job, or the job's store, is gone or shows no sign of life."""


class Silence:
    """Seconds that a counter has stood still, as far as somebody looked.

    Between two looks at most three beats count: a process that was suspended itself, together with the watched one
    say, or that waited long for the store, has seen nothing and accuses nobody.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count, self._looked = -1, 0.0

    def look(self, count: int, now: float) -> float:
        """Take note of the counter's value at a monotonic time; returns ``seconds``."""
        if count != self._count:
            self.seconds = 0.0
        else:
            self.seconds += min(now - self._looked, 3 * BEAT_SECONDS)
        self._count, self._looked = count, now
        return self.seconds


@dataclass(frozen=True)
class Verdict:
    """Why this process must end, and when."""

    text: str
    deadline: float


class Heartbeat:
    """The two threads of a rank.

    Args:
        world: This rank's world.
        local_stop: Asked once a second whether the job is to stop; for a stop request that only this rank's node sees.
    """

    def __init__(self, world: "World", local_stop: Callable[[], bool]) -> None:
        self.world, self.local_stop = world, local_stop
        self.stop_requested = False
        self._beats = 0
        self._watched = self._after(world.global_rank)
        self._silence = Silence()
        self._verdict: Verdict | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("heartbeat", self._beat), ("watchdog", self._watch))
        ]

    def start(self) -> None:
        """Give the first sign of life, then start the threads."""
        self.world.beat()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads; the first one's last act is to mark this rank as one that has left. Safe to call again."""
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def doom(self, text: str, grace: float) -> None:
        """This process must end within ``grace`` seconds; the first text stays, the earliest deadline counts."""
        deadline = time.monotonic() + grace
        with self._lock:
            first, before = self._verdict is None, self._verdict or Verdict(text, deadline)
            self._verdict = Verdict(before.text, min(deadline, before.deadline))
        if first:
            with contextlib.suppress(OSError):  # it is only for the launcher's last words
                stopping.note(f"failure-{self.world.global_rank}", text)

    def _after(self, rank: int) -> int:
        return (rank + 1) % self.world.layout.world_size

    def _beat(self) -> None:
        """The thread that speaks with the store."""
        try:
            while not self._closed.wait(BEAT_SECONDS):
                self.world.beat()
                self._beats += 1
                self._look_at_neighbour()
                self._look_for_failure()
                self._look_for_stop()
            self.world.leave()
        except Exception as error:
            if not self._closed.is_set():
                self.doom(f"lost the job's store{_store_address()}, the first node: {cause_of(error)}", GRACE_SECONDS)

    def _look_at_neighbour(self) -> None:
        while self._watched != self.world.global_rank:
            count = self.world.beats_of(self._watched)
            seconds = self._silence.look(count, time.monotonic())
            if seconds > 3 * BEAT_SECONDS and self.world.has_left(self._watched):
                self._watched, self._silence = self._after(self._watched), Silence()
                continue
            limit = self.world.heartbeat_timeout if count else self.world.join_timeout
            if seconds > limit:
                peer = self.world.peer(self._watched)
                what = f"no sign of life of {peer} for" if count else f"{peer} has not joined the job after"
                field = "comm.heartbeat_timeout_seconds" if count else "comm.init_timeout_seconds"
                text = f"{what} {seconds:.0f} s ({field} = {limit:g})"
                self.doom(text, BEAT_SECONDS)
                self.world.report_failure(f"RankLost: {text}")
            return

    def _look_for_failure(self) -> None:
        if (failure := self.world.first_failure()) is not None:
            self.doom(failure, GRACE_SECONDS)

    def _look_for_stop(self) -> None:
        if not self.stop_requested and self.local_stop():
            self.world.request_stop()
        if self.world.global_rank == 0 and not self.stop_requested:
            self.stop_requested = self.world.find_stop_request()

    def _watch(self) -> None:
        """The thread that nothing holds up."""
        silence, limit = Silence(), self.world.heartbeat_timeout
        while not self._closed.wait(BEAT_SECONDS / 2):
            now = time.monotonic()
            seconds = silence.look(self._beats, now)
            if seconds > limit:
                self.doom(
                    f"no answer of the job's store{_store_address()}, the first node, for {seconds:.0f} s "
                    f"(comm.heartbeat_timeout_seconds = {limit:g}): its machine or the network is down, or its launcher "
                    "is stopped",
                    0.0,
                )
            if (verdict := self._verdict) is not None and now >= verdict.deadline:
                end_process(verdict.text)


def end_process(text: str) -> NoReturn:
    """Log one line, leave it for torchrun and the launcher, and end with status 1, whatever other threads do."""
    try:
        raise RankLost(text)
    except RankLost as error:
        logger.error(text)
        get_error_handler().record_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _store_address() -> str:
    """Where the store is, as " on HOST"."""
    host = os.environ.get("MASTER_ADDR")
    return f" on {host}" if host else ""


def one_line(error: BaseException) -> str:
    """An exception's type and text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def cause_of(error: BaseException) -> str:
    """The reason that gloo or the store gives, without source locations, advice and stack."""
    text = re.sub(r"^(\[[^\]]*\]\s*)+", "", str(error).strip())
    return text.split(". This is typically")[0].splitlines()[0] if text else type(error).__name__
