"""Ranks that stop, die, leave, or lose the job's store: who notices, when, and what is left of the others.

The ranks are forked, so that they can be stopped and killed; their hearts beat ten times as fast. The main thread of each
hangs in a wait without Python's lock, as in a collective.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import pytest
import torch
import torch.distributed as dist

from blockgrow_titan.teacher import heartbeats, place
from blockgrow_titan.teacher.heartbeats import RankLost, Silence, cause_of, one_line
from blockgrow_titan.teacher.place import World
from blockgrow_titan.teacher.worlds import WorldLayout

TIMEOUT = 1.5
FORK = multiprocessing.get_context("fork")
Act = Callable[[World], None]


def hang(world: World) -> None:
    world.store.wait(["never"], timedelta(hours=1))


def until(condition: Callable[[], bool]) -> None:
    """Wait for it; a rank or test that never sees it is ended by ``Job``."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _serve_store(port: "multiprocessing.Queue[int]") -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(store.port)
    signal.pause()


def _be_rank(port: int, layout: WorldLayout, rank: int, act: Act, error_file: str, stop_file: Path) -> None:
    os.environ |= {"TORCHELASTIC_ERROR_FILE": error_file, "MASTER_ADDR": "first_node"}
    heartbeats.BEAT_SECONDS, heartbeats.GRACE_SECONDS, place.GRACE_SECONDS, place.LOOK_SECONDS = 0.1, 0.6, 0.6, 0.8
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    role = layout.role_of(rank)
    place_in_job = (layout, role, layout.role_rank(rank), layout.size_of(role), rank)
    world = World(*place_in_job, store, f"node{rank}", heartbeat_timeout=TIMEOUT, join_timeout=TIMEOUT + 1)
    store.set(f"host/{rank}", world.host)
    world.start_heartbeat(stop_file.exists)
    store.add("joined", 1)
    act(world)
    world.close()


class Job:
    """A store in a process of its own, and a process for each rank.

    Args:
        folder: For what the ranks leave.
        layout: Student and teacher ranks.
        acts: What each rank's main thread does once it has joined; ranks without one are never started.
    """

    def __init__(self, folder: Path, layout: tuple[int, int], acts: Sequence[Act]) -> None:
        self.folder, self.layout, self.acts = folder, WorldLayout(*layout), acts

    def __enter__(self) -> "Job":
        port: multiprocessing.Queue[int] = FORK.Queue()
        self.server = FORK.Process(target=_serve_store, args=(port,))
        self.server.start()
        number = port.get(timeout=30)
        self.stop_file = self.folder / "stop"
        self.ranks = [
            FORK.Process(
                target=_be_rank,
                args=(number, self.layout, rank, act, str(self.folder / f"error-{rank}"), self.stop_file),
            )
            for rank, act in enumerate(self.acts)
        ]
        for process in self.ranks:
            process.start()
        self.store = dist.TCPStore("127.0.0.1", number, is_master=False)
        until(lambda: self.store.add("joined", 0) == len(self.acts))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for process in (*self.ranks, self.server):
            process.kill()
            process.join()

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.ranks[rank].pid or 0, number)

    def end(self, rank: int) -> tuple[int | None, str]:
        """Wait for a rank's end: its exit status, and what it left for torchrun."""
        self.ranks[rank].join(20)
        path = self.folder / f"error-{rank}"
        text = json.loads(path.read_text())["message"]["message"] if path.exists() else ""
        return self.ranks[rank].exitcode, text

    def running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.ranks) if process.exitcode is None]


def test_silence_is_time_in_which_somebody_looked() -> None:
    silence = Silence()
    assert [silence.look(*look) for look in ((4, 10.0), (4, 11.0), (4, 12.5), (5, 13.0), (5, 14.0))] == [
        0,
        1,
        2.5,
        0,
        1,
    ]
    assert silence.look(5, 1000.0) == 1 + 3 * heartbeats.BEAT_SECONDS  # suspended in between
    assert silence.look(6, 2000.0) == 0


def test_a_stopped_rank_is_named_and_ends_the_job(tmp_path: Path) -> None:
    with Job(tmp_path, (2, 1), [hang] * 3) as job:
        job.signal(signal.SIGSTOP, 2)
        status, text = job.end(1)
        assert status == 1
        assert text.startswith("RankLost: no sign of life of teacher rank 0 (global rank 2, host node2) for ")
        assert text.endswith("(comm.heartbeat_timeout_seconds = 1.5)")
        status, text = job.end(0)
        assert status == 1
        assert text.startswith(
            "RankLost: student rank 1 (global rank 1, host node1) failed: RankLost: no sign of life of "
        )
        assert "teacher rank 0" in text


def test_ranks_that_are_suspended_together_go_on_together(tmp_path: Path) -> None:
    """The first of them to go on has heard nothing of the other for long, but knows that it did not look."""
    with Job(tmp_path, (2, 0), [hang] * 2) as job:
        job.signal(signal.SIGSTOP, 1)
        time.sleep(0.4)
        job.signal(signal.SIGSTOP, 0)
        time.sleep(TIMEOUT)
        job.signal(signal.SIGCONT, 0)
        time.sleep(0.4)
        job.signal(signal.SIGCONT, 1)
        time.sleep(TIMEOUT)
        assert job.running() == [0, 1]


def test_a_rank_that_has_left_is_not_missed_and_the_next_one_is_watched(tmp_path: Path) -> None:
    with Job(tmp_path, (2, 1), [hang, lambda world: None, hang]) as job:
        assert job.end(1) == (0, "")
        time.sleep(TIMEOUT + 0.5)
        assert job.running() == [0, 2]
        job.signal(signal.SIGSTOP, 2)
        status, text = job.end(0)
        assert status == 1 and "no sign of life of teacher rank 0 (global rank 2, host node2)" in text


def test_a_rank_that_never_joins_is_named(tmp_path: Path) -> None:
    with Job(tmp_path, (1, 1), [hang]) as job:
        status, text = job.end(0)
        assert status == 1
        assert text.startswith("RankLost: teacher rank 0 (global rank 1, host unknown) has not joined the job after ")
        assert text.endswith("(comm.init_timeout_seconds = 2.5)")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "RankLost: lost the job's store on first_node, the first node: "),
        (signal.SIGSTOP, "RankLost: no answer of the job's store on first_node, the first node, for "),
    ],
)
def test_no_rank_outlives_the_store(tmp_path: Path, number: int, words: str) -> None:
    with Job(tmp_path, (1, 1), [lambda world: time.sleep(60)] * 2) as job:
        os.kill(job.server.pid or 0, number)
        for rank in range(2):
            status, text = job.end(rank)
            assert status == 1 and text.startswith(words)


def _fail(world: World) -> None:
    world.report_failure("ValueError: no more disk")
    hang(world)


def _end_first(world: World) -> None:
    until(lambda: world.first_failure() is not None)


def test_a_reported_failure_ends_all_ranks_whatever_they_hang_in(tmp_path: Path) -> None:
    with Job(tmp_path, (2, 1), [_fail, hang, _end_first]) as job:
        assert job.end(0) == (1, "RankLost: ValueError: no more disk")
        text = "RankLost: student rank 0 (global rank 0, host node0) failed: ValueError: no more disk"
        assert job.end(1) == (1, text)
        assert job.end(2) == (0, "")


def _stop(world: World) -> None:
    until(world.stop_requested)


def _stop_and_ask(world: World) -> None:
    world.request_stop()
    world.request_stop()
    assert world.stop_requested()


@pytest.mark.parametrize("asked_by_file", [True, False])
def test_any_rank_may_ask_the_job_to_stop(tmp_path: Path, asked_by_file: bool) -> None:
    with Job(tmp_path, (1, 1), [_stop, hang if asked_by_file else _stop_and_ask]) as job:
        if asked_by_file:
            job.stop_file.touch()
        assert job.end(0) == (0, "")


GLOO = "[/some/where/pair.cc:553] Connection closed by peer [127.0.0.1]:5. This is typically caused by a crash."


def _reduce(world: World) -> None:
    """Sum over all ranks again and again; at its end, leave what is to be said of it."""
    group = dist.ProcessGroupGloo(dist.PrefixStore("group", world.store), world.global_rank, 3, timedelta(seconds=30))
    try:
        while True:
            group.allreduce([torch.ones(1)]).wait()
            world.store.set("reducing", "")
    except RuntimeError as error:
        world.store.set(f"text/{world.global_rank}", world.explain(error))
    hang(world)


def test_a_broken_collective_is_explained_by_the_rank_that_broke_it(tmp_path: Path) -> None:
    with Job(tmp_path, (3, 0), [_reduce] * 3) as job:
        job.store.wait(["reducing"], timedelta(seconds=30))
        job.signal(signal.SIGKILL, 1)
        for rank in (0, 2):
            text = job.store.get(f"text/{rank}").decode()
            assert text.startswith("RuntimeError: ") and "127.0.0.1" in text
            # as "is gone", or as another rank has reported it by then
            assert "; student rank " in text and "student rank 1 (global rank 1, host node1)" in text


def _explain(world: World) -> None:
    until(lambda: world.first_failure() is not None)
    world.store.set("text", world.explain(RuntimeError(GLOO)))


def test_a_broken_collective_is_explained_by_the_failure_that_a_rank_has_reported(tmp_path: Path) -> None:
    with Job(tmp_path, (2, 1), [_explain, _fail, hang]) as job:
        assert job.store.get("text").decode() == (
            "RuntimeError: Connection closed by peer [127.0.0.1]:5; "
            "student rank 1 (global rank 1, host node1) failed: ValueError: no more disk"
        )


@pytest.mark.parametrize(
    "error", [ValueError("a connection"), RankLost("lost a connection"), RuntimeError("no\n more")]
)
def test_other_errors_are_told_as_they_are(error: Exception) -> None:
    world = World(WorldLayout(2, 0), "student", 0, 2, 0, dist.HashStore(), "node0")
    began = time.monotonic()
    assert world.explain(error) == one_line(error) == f"{type(error).__name__}: {' '.join(str(error).split())}"
    assert time.monotonic() - began < place.LOOK_SECONDS


def test_cause_is_the_first_sentence_of_gloo() -> None:
    assert cause_of(RuntimeError(GLOO)) == "Connection closed by peer [127.0.0.1]:5"
    assert cause_of(RuntimeError()) == "RuntimeError"
