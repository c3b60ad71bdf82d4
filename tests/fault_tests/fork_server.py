"""Ranks that start in a moment: processes forked from one that has imported what a rank imports.

A rank under torchrun spends most of its start on imports. The server imports them once, starts no thread and runs no
computation (neither survives a fork), and then forks a process for every rank it is asked for. The process is otherwise
what torchrun would start: a session, an environment and an output file of its own, and an interpreter that ends in the
usual way, with all its exit handlers.

    server = ForkServer()
    rank = server.start("tests.fault_tests.ranks:run", {"arguments": [...]}, environment, log)
    server.wait([rank], seconds=60)
    rank.status                       # as subprocess.Popen.returncode: negative after a signal
"""

import gc
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tools.benchmarks.pace import KEEP_FREED

ROOT = Path(__file__).absolute().parents[2]
PRELOADED = (
    "tests.unit_tests.jobs",
    "blockgrow_titan.trainer",
    "blockgrow_titan.teacher.server",
    "torch.utils.tensorboard",
    "tests.fault_tests.ranks",
)
REAP_SECONDS = 0.01
READY_SECONDS = 180.0


@dataclass
class ForkedRank:
    """One process of the server's."""

    pid: int
    log: Path
    status: int | None = None
    """None while it runs, else as ``subprocess.Popen.returncode``."""
    ended_at: float = 0.0
    """When it ended, by ``time.monotonic``."""

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")


class ForkServer:
    """The client's end: starts the server process, and ranks from it."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ
            | KEEP_FREED  # read when a process starts: what is forked from it has the server's
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        )
        theirs.close()
        self._ranks: dict[int, ForkedRank] = {}
        if not self._connection.poll(READY_SECONDS):
            raise RuntimeError(f"the fork server was not ready after {READY_SECONDS:.0f} s")
        self._connection.recv()

    def start(self, function: str, arguments: dict[str, Any], environment: dict[str, str], log: Path) -> ForkedRank:
        """Fork a process that calls ``module:function`` with these keyword arguments and then ends.

        Args:
            function: A function at the top level of an importable module.
            arguments: Its keyword arguments, picklable.
            environment: All of its environment.
            log: Its output goes to the end of this file.
        """
        self._connection.send((function, arguments, environment, str(log)))
        while True:  # news of other processes may come first
            news = self._connection.recv()
            if news[0] == "started":
                rank = self._ranks[news[1]] = ForkedRank(news[1], log)
                return rank
            self._note(*news[1:])

    def wait(self, ranks: Sequence[ForkedRank], seconds: float) -> bool:
        """Wait until all of these have ended, at most so long; returns whether they have."""
        deadline = time.monotonic() + seconds
        while any(rank.status is None for rank in ranks):
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                return False
            self._note(*self._connection.recv()[1:])
        return True

    def wait_any(self, ranks: Sequence[ForkedRank], seconds: float) -> bool:
        """Wait until one more of these has ended, at most so long; returns whether one has."""
        running = [rank for rank in ranks if rank.status is None]
        deadline = time.monotonic() + seconds
        while running and all(rank.status is None for rank in running):
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                return False
            self._note(*self._connection.recv()[1:])
        return True

    def _note(self, pid: int, status: int, ended_at: float) -> None:
        rank = self._ranks.pop(pid)
        rank.status, rank.ended_at = status, ended_at

    def close(self) -> None:
        """End the server and whatever it has started that still runs."""
        self._connection.close()
        self._process.wait(timeout=30)


def _serve(connection: Connection) -> tuple[str, dict[str, Any], dict[str, str], str] | None:
    """Fork what is asked for, until the client is gone. Returns None then, and in each forked process what it is to do."""
    children: set[int] = set()
    while True:
        if connection.poll(REAP_SECONDS if children else None):
            try:
                request = connection.recv()
            except EOFError:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return None
            pid = os.fork()
            if pid == 0:
                connection.close()
                return request
            children.add(pid)
            connection.send(("started", pid))
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            children.discard(pid)
            connection.send(("ended", pid, os.waitstatus_to_exitcode(status), time.monotonic()))


def _become(function: str, arguments: dict[str, Any], environment: dict[str, str], log: str) -> None:
    """Be the process that was asked for."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(**arguments)


def main(descriptor: int) -> None:
    """The server's process, and every process that it forks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's, who closes the connection
    connection = Connection(descriptor)
    for module in PRELOADED:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"the fork server has {threads} threads, of which a forked process would have one"
    gc.collect()
    gc.freeze()  # what is imported stays, and its memory shared
    connection.send("ready")
    request = _serve(connection)
    if request is None:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _become(*request)


if __name__ == "__main__":
    main(int(sys.argv[1]))
