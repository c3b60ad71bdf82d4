"""Rank processes that live as long as the pytest session, for tests of distributed code.

A spawned rank spends several seconds on imports, so every test shares one pool (the fixture `rank_pool`) instead of
spawning its own. The flow of a call of `RankPool.run`:

1. The parent starts the ranks that are not there yet, and waits until they have imported torch and the package.
2. It sends each rank the test function (by qualified name) and its arguments through a pipe. All ranks share one
   TCPStore, served by the parent; a job sees it under a prefix of its own.
3. The rank calls `fn(rank, world_size, store, **kwargs)` with no default process group and sends back the result or the
   text of its traceback.
4. Once every rank has answered, each puts its process-wide state back (`_restore`) and is ready for the next job. Not
   before: a rank that destroys its group early would break peers that are still connecting to it. A rank that failed
   does so at once, for that is what frees its peers from a collective that it will not join.
5. A rank that dies, or does not answer in time, has the stacks of its threads written to its log and is killed; the
   next call starts a new one. Every other rank stays.

Footgun: a test module is imported anew in each rank, so module-level state set by the test's own process is not there.
"""

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# The ranks share this machine's one loopback interface; a name look-up of the host may fail or be slow.
_HOST = "127.0.0.1"
_READY_TIMEOUT = 180.0
_LOG_LINES = 40


class RankError(RuntimeError):
    """At least one rank failed; the text has each failed rank's traceback and the end of its output."""


def init_gloo(store: dist.Store, rank: int, world_size: int, name: str = "default") -> None:
    """Makes the default process group (gloo) of the calling rank, as an entry point under torchrun would.

    Sets RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE too; the pool restores the environment and destroys the
    group after the job.

    Args:
        store: The job's store.
        rank: The caller's rank in the group.
        world_size: Ranks in the group; every one of them must call this.
        name: Prefix in the store; ranks of different worlds need different names.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )


@dataclass
class _Rank:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    log: Path
    ready: bool = False


class RankPool:
    """Up to `max_ranks` rank processes, started on first use; close with `close()`."""

    def __init__(self, max_ranks: int = 3):
        self.max_ranks = max_ranks
        self._ranks: dict[int, _Rank] = {}
        self._jobs = 0
        self._starts = 0
        self._store: dist.TCPStore | None = None
        self._logs = tempfile.TemporaryDirectory(prefix="rank_pool_")
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., Any], world_size: int, timeout: float = 120.0, grace: float = 5.0, **kwargs: Any
    ) -> list[Any]:
        """Runs `fn(rank, world_size, store, **kwargs)` in ranks 0 to `world_size - 1`.

        Args:
            fn: A function at the top level of an importable module.
            world_size: Ranks that take part.
            timeout: Seconds that every rank has; those still busy are killed.
            grace: Seconds that the other ranks have once one has failed (they may be stuck in a collective).
            **kwargs: Passed on; must be picklable, like the results.

        Returns:
            The results by rank.

        Raises:
            ValueError: If `world_size` is not from 1 to `max_ranks`, or `fn` is not at the top level of a module.
            RankError: If a rank raised, died, or did not answer in time.
        """
        if not 1 <= world_size <= self.max_ranks:
            raise ValueError(f"world_size is {world_size}, must be from 1 to {self.max_ranks}, the size of the pool")
        if "." in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} must be a function at the top level of a module: ranks import it")
        self._start(world_size)
        self._jobs += 1
        job = pickle.dumps((f"job{self._jobs}", world_size, fn, kwargs))
        log_starts = {rank: self._ranks[rank].log.stat().st_size for rank in range(world_size)}
        for rank in range(world_size):
            self._ranks[rank].connection.send_bytes(job)
        try:
            results, errors = self._collect(world_size, timeout, grace)
            texts = [
                f"---- rank {r} of {world_size}\n{text}{self._output(r, log_starts[r])}" for r, text in errors.items()
            ]
            self._release(world_size)
        except BaseException:  # Ctrl-C: answers of this job must not be taken for the next one's
            self.close()
            raise
        if errors:
            raise RankError(f"{fn.__qualname__} failed in rank(s) {', '.join(map(str, errors))}\n" + "\n".join(texts))
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """Ends every rank; the pool may be used again afterwards."""
        for rank in self._ranks.values():
            rank.connection.close()  # an idle rank ends when its pipe does
        for rank in self._ranks.values():
            rank.process.join(5)
            if rank.process.exitcode is None:
                rank.process.kill()
                rank.process.join()
        self._ranks.clear()

    def _start(self, world_size: int) -> None:
        """Starts the missing ones of ranks 0 to `world_size - 1` and waits until all are ready."""
        if self._store is None:
            self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(world_size):
            if rank in self._ranks:
                continue
            self._starts += 1
            log = Path(self._logs.name) / f"rank{rank}_{self._starts}.log"
            log.touch()
            here, there = context.Pipe()
            # Not daemons: those may have no children, and a test's DataLoader may want workers.
            process = context.Process(target=_serve, args=(rank, there, self._store.port, str(log)))
            process.start()
            there.close()
            self._ranks[rank] = _Rank(process, here, log)
        self._await_ready(range(world_size))

    def _await_ready(self, numbers: Iterable[int]) -> None:
        """Waits until these ranks can take a job. Raises RankError, and forgets the rank, if one does not get there."""
        deadline = time.monotonic() + _READY_TIMEOUT
        for number in numbers:
            rank = self._ranks[number]
            if rank.ready:
                continue
            try:
                if not rank.connection.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError
                rank.connection.recv_bytes()
                rank.ready = True
            except (EOFError, ConnectionResetError):
                output = self._output(number, 0)
                self._kill({number})
                del self._ranks[number]
                raise RankError(f"rank {number} did not get ready for a job\n{output}") from None

    def _release(self, world_size: int) -> None:
        """Forgets the ranks that died in a job and lets the others put their state back."""
        alive = [rank for rank in range(world_size) if self._ranks[rank].process.exitcode is None]
        for number in set(range(world_size)) - set(alive):
            del self._ranks[number]
        for number in alive:
            self._ranks[number].ready = False
            self._ranks[number].connection.send_bytes(b"all answered")
        self._await_ready(alive)

    def _collect(self, world_size: int, timeout: float, grace: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Waits for the answers. Returns results by rank and error texts by rank, in the order of their arrival."""
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        pending = {self._ranks[rank].connection: rank for rank in range(world_size)}
        deadline = time.monotonic() + timeout
        reason = f"did not finish within {timeout:g} s"
        while pending:
            answered = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not answered:
                self._kill(set(pending.values()))
                return results, errors | {rank: f"{reason}: killed\n" for rank in pending.values()}
            for connection in answered:
                rank = pending.pop(connection)
                try:
                    succeeded, answer = pickle.loads(self._ranks[rank].connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._ranks[rank].process.join()
                    succeeded, answer = False, f"died with exit code {self._ranks[rank].process.exitcode}\n"
                if succeeded:
                    results[rank] = answer
                    continue
                errors[rank] = answer
                if time.monotonic() + grace < deadline:
                    deadline = time.monotonic() + grace
                    reason = f"did not finish within {grace:g} s after rank {rank} failed"
        return results, errors

    def _kill(self, numbers: set[int]) -> None:
        """Kills ranks, after they have written the stacks of their threads to their logs."""
        for number in numbers:
            if self._ranks[number].ready:  # else the handler may not be there yet
                os.kill(self._ranks[number].process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        for number in numbers:
            self._ranks[number].process.kill()
            self._ranks[number].process.join()

    def _output(self, number: int, start: int) -> str:
        """The end of what a rank printed since `start`, with a header line; empty if it printed nothing."""
        lines = self._ranks[number].log.read_bytes()[start:].decode(errors="replace").splitlines()
        if not lines:
            return ""
        return "\n".join([f"its output (last {_LOG_LINES} lines):", *lines[-_LOG_LINES:], ""])


def _serve(rank: int, connection: Connection, port: int, log: str) -> None:
    """A rank's life: import, then one job after the other until the parent closes the pipe."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes the pipe
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    importlib.import_module("blockgrow_titan.infra.device")
    environment, folder = dict(os.environ), os.getcwd()
    gc.collect()
    gc.freeze()  # the imported modules are here to stay: later collections skip them
    while True:
        connection.send_bytes(b"ready")
        try:
            job = connection.recv_bytes()
        except EOFError:
            return
        succeeded = False
        try:
            name, world_size, fn, kwargs = pickle.loads(job)
            _seed()
            # A client of its own for each job: a thread that a test left waiting on its store cannot block the next.
            store = dist.TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=60))
            answer = pickle.dumps((True, fn(rank, world_size, dist.PrefixStore(name, store), **kwargs)))
            succeeded = True
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        fn = kwargs = store = None
        if not succeeded:
            _restore(environment, folder)
        connection.send_bytes(answer)
        try:
            connection.recv_bytes()
        except EOFError:
            return
        _restore(environment, folder)


def _seed() -> None:
    """The same random state before every job, so that no test depends on the ones before it."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _restore(environment: dict[str, str], folder: str) -> None:
    """Puts back what a job may have changed in this process."""
    from blockgrow_titan.teacher.place import World

    # The type itself: a weak proxy would answer isinstance for what may be gone.
    for world in [found for found in gc.get_objects() if type(found) is World]:
        world.close()  # its watchdog would end this process in a later job
    if dist.is_initialized():
        dist.destroy_process_group()  # all groups
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.enable()  # torchtitan's trainer disables it
    gc.collect()
