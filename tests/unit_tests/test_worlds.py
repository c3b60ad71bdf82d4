"""Layouts, routes and devices as pure functions; two worlds with default process groups of their own."""

import logging
import os
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtitan.config import JobConfig
from torchtitan.distributed.utils import init_distributed
from torchtitan.tools.logging import logger

from blockgrow_titan.job_config import Teacher
from blockgrow_titan.teacher import worlds
from blockgrow_titan.teacher.worlds import STUDENT, TEACHER, WorldLayout, assign_device, join_world, shard_ranks


@pytest.mark.parametrize(
    "world_size, teacher_ranks, has_teacher, expected",
    [
        (2, -1, True, (1, 1)),
        (3, -1, True, (2, 1)),
        (8, -1, True, (4, 4)),
        (5, 2, True, (3, 2)),
        (1, 0, True, (1, 0)),
        (4, 0, True, (4, 0)),
        (1, -1, False, (1, 0)),
        (4, 9, False, (4, 0)),
    ],
)
def test_plan(world_size, teacher_ranks, has_teacher, expected):
    layout = WorldLayout.plan(world_size, teacher_ranks, has_teacher)
    assert (layout.num_students, layout.num_teachers) == expected


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((1, -1, True), ("teacher.ranks = -1", "NGPU=2", "--teacher.ranks 0")),
        ((4, 4, True), ("teacher.ranks = 4", "4 rank(s)", "NGPU to at least 5", "at most 3")),
        ((1, 1, True), ("teacher.ranks = 1", "NGPU", "at most 0")),
        ((4, -2, True), ("teacher.ranks = -2", "--teacher.ranks")),
        ((8, -1, True, 3), ("teacher.shard_degree = 3", "4 rank(s)", "--teacher.shard_degree")),
        ((3, 0, True, 2), ("teacher.shard_degree = 2", "3 rank(s)", "teacher.ranks = 0")),
        ((2, 1, True, 0), ("teacher.shard_degree = 0",)),
    ],
)
def test_plan_refuses(arguments, words):
    with pytest.raises(ValueError) as error:
        WorldLayout.plan(*arguments)
    for word in words:
        assert word in str(error.value)


def test_routes_and_roles_over_a_grid():
    for students in range(1, 10):
        for teachers in range(1, 10):
            layout = WorldLayout(students, teachers)
            roles = [(layout.role_of(rank), layout.role_rank(rank)) for rank in range(layout.world_size)]
            assert roles == [(STUDENT, s) for s in range(students)] + [(TEACHER, t) for t in range(teachers)]
            assert [layout.global_rank(*role) for role in roles] == list(range(students + teachers))
            routes = layout.routes()
            assert len(routes) == len(set(routes)) == max(students, teachers)
            for s in range(students):
                assert [t for route_s, t in routes if route_s == s] == layout.teachers_of(s) != []
            for t in range(teachers):
                expected = [s for s in range(students) if s % teachers == t] if students >= teachers else [t % students]
                assert [s for s, route_t in routes if route_t == t] == layout.students_of(t) == expected
    assert WorldLayout(3, 0).routes() == [] and WorldLayout(3, 0).teachers_of(1) == []


def test_shard_ranks():
    assert shard_ranks(6, 3) == [[0, 1, 2], [3, 4, 5]]
    assert shard_ranks(2, 1) == [[0], [1]]


def _devices(layout: WorldLayout, local_world_size: int, num_devices: int) -> list[int | None]:
    """Device of each rank of the job, over nodes of ``local_world_size`` ranks."""
    return [
        assign_device(layout, rank, rank % local_world_size, local_world_size, num_devices)
        for rank in range(layout.world_size)
    ]


def test_devices():
    assert _devices(WorldLayout(4, 4), 8, 8) == list(range(8))
    assert _devices(WorldLayout(1, 1), 2, 1) == [0, 0]
    assert _devices(WorldLayout(2, 1), 3, 2) == [0, 1, 1]
    assert _devices(WorldLayout(8, 8), 16, 8) == [*range(8), *reversed(range(8))]
    assert _devices(WorldLayout(3, 0), 3, 4) == [0, 1, 2]
    assert _devices(WorldLayout(5, 5), 10, 0) == [None] * 10
    # Two nodes of three ranks and two devices: the second has one student and two teachers.
    assert _devices(WorldLayout(4, 2), 3, 3) == [0, 1, 2, 0, 1, 2]
    assert [assign_device(WorldLayout(4, 2), rank, rank - 3, 3, 2) for rank in (3, 4, 5)] == [0, 1, 0]
    # Whenever an assignment exists, no two ranks of one world share a device.
    for students in range(1, 6):
        for teachers in range(5):
            for devices in range(max(students, teachers), students + teachers + 1):
                layout = WorldLayout(students, teachers)
                taken = _devices(layout, students + teachers, devices)
                assert len(set(taken[:students])) == students and len(set(taken[students:])) == teachers
                assert set(taken) <= set(range(devices))


@pytest.mark.parametrize(
    "layout, devices, world", [((2, 1), 1, "student"), ((1, 2), 1, "teacher"), ((2, 0), 1, "student")]
)
def test_two_ranks_of_one_world_never_share_a_device(layout, devices, world):
    with pytest.raises(ValueError) as error:
        _devices(WorldLayout(*layout), sum(layout), devices)
    for word in (f"2 {world} ranks", f"NGPU = {sum(layout)}", "teacher.ranks", "NCCL"):
        assert word in str(error.value)


def test_dry_run_rendezvous(monkeypatch):
    monkeypatch.setenv("NGPU", "6")
    monkeypatch.delenv("RANK", raising=False)
    _, rank, world_size = worlds.rendezvous("fake_backend")
    assert (rank, world_size) == (0, 6)
    monkeypatch.setenv("RANK", "4")
    assert worlds.rendezvous("fake_backend")[1] == 4
    for rank in ("6", "-1", "first"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ValueError, match=f'RANK="{rank}" must be 0 to 5'):
            worlds.rendezvous("fake_backend")
    monkeypatch.setenv("NGPU", "many")
    with pytest.raises(ValueError, match='NGPU="many"'):
        worlds.rendezvous("local_tensor")


def test_an_unknown_interface_is_refused(monkeypatch):
    monkeypatch.setenv("NGPU", "1")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert worlds.rendezvous("fake_backend")[1:] == (0, 1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth77")
    with pytest.raises(ValueError, match=r'GLOO_SOCKET_IFNAME="lo,eth77" must name .* which has lo.* and no "eth77"'):
        worlds.rendezvous("fake_backend")


def _two_worlds(rank: int, world_size: int, store: dist.Store, dump_folder: str) -> dict:
    """Ranks 0 and 1 are the student's, rank 2 the teacher's."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "1"
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    config: Any = JobConfig()
    config.teacher = Teacher(timeout_seconds=400)
    config.comm.heartbeat_timeout_seconds = 60
    config.job.dump_folder = dump_folder
    config.checkpoint.async_mode = "async"
    world = join_world(config, WorldLayout(2, 1), store, rank, device_index=7)
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)  # crosses no world
    size = init_distributed(config.comm)  # what torchtitan's trainer does next
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    world.flag("here")
    while not all(world.has_flag("here", r) for r in range(world_size)):
        time.sleep(0.01)
    other = (rank + 1) % world_size
    peers = [str(world.peer(r)) for r in range(world_size)]
    world.report_failure(f"rank {rank} failed")
    while world.failure_of(other) is None:
        time.sleep(0.01)
    world.flag("seen")
    while not all(world.has_flag("seen", r) for r in range(world_size)):
        time.sleep(0.01)
    world.close()
    world.close()
    while not world.has_left(other):
        time.sleep(0.01)
    logger.removeHandler(handler)
    return {
        "role": (world.role, world.role_rank, world.role_size, world.global_rank),
        "environment": [os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCH_FR_BUFFER_SIZE")]
        + [os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"], os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"]],
        "traces": os.environ["TORCH_FR_DUMP_TEMP_FILE"],
        "total": total.item(),
        "size": size,
        "timeout": timeout,
        "peers": peers,
        "failure": world.failure_of(other),
        "logged": [record.getMessage() for record in records],
    }


def test_two_worlds(rank_pool, tmp_path):
    reports = rank_pool.run(_two_worlds, 3, dump_folder=str(tmp_path))
    assert [r["role"] for r in reports] == [("student", 0, 2, 0), ("student", 1, 2, 1), ("teacher", 0, 1, 2)]
    assert [r["total"] for r in reports] == [3.0, 3.0, 3.0]
    assert [r["size"] for r in reports] == [2, 2, 1]
    # a student's peers wait in a collective while it waits for its teacher: the named error must come first
    assert {r["timeout"] for r in reports} == {460.0}
    for rank, report in enumerate(reports):
        role, role_rank, role_size, _ = report["role"]
        assert report["environment"] == [str(role_rank), str(role_size), "7", "20000", "3", "1"]
        assert report["traces"] == str(tmp_path / "comm_traces" / role / "rank_")
        assert (tmp_path / "comm_traces" / role).is_dir()
        host = socket.gethostname()
        assert report["peers"] == [
            f"{role} rank {number} (global rank {r}, host {host})"
            for r, (role, number) in enumerate([("student", 0), ("student", 1), ("teacher", 0)])
        ]
        assert report["failure"] == f"rank {(rank + 1) % 3} failed"
        assert any("TORCH_FR_BUFFER_SIZE" in line for line in report["logged"])  # overridden, and said so
        assert not any("already initialized" in line for line in report["logged"])
