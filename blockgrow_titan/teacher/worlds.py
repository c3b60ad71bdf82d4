"""One job, two worlds: the student's ranks and the teacher's.

``torchrun`` starts N ranks. The last T of them are the teacher's world, the others the student's (``WorldLayout``).
Each world initialises its own default process group, over its own prefix of the job's store and with ranks counted
inside the role (``join_world``), before torchtitan would; every collective that torchtitan makes on the default group
then stays inside the student's world. What crosses between the worlds goes over ``bridge`` alone.

What all ranks of both worlds can know without any message is in the job's store (``place.py``).
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from blockgrow_titan.teacher.place import World
from blockgrow_titan.teacher.starts import store_of_this_start

STUDENT = "student"
TEACHER = "teacher"

DRY_RUN_MODES = ("fake_backend", "local_tensor")


@dataclass(frozen=True)
class WorldLayout:
    """Which ranks are the student's, which the teacher's, and which pairs of them talk to each other.

    The first ``num_students`` ranks are the student's and the last ``num_teachers`` the teacher's. With
    ``num_teachers = 0`` there is no teacher, or it runs on the student's ranks (colocated).
    """

    num_students: int
    num_teachers: int

    @classmethod
    def plan(cls, world_size: int, teacher_ranks: int, has_teacher: bool, shard_degree: int = 1) -> "WorldLayout":
        """Divide ``world_size`` ranks as ``teacher.ranks`` and ``teacher.shard_degree`` say.

        Args:
            world_size: Ranks of the whole job, NGPU times the number of nodes.
            teacher_ranks: ``teacher.ranks``: -1 is half of the ranks, rounded down, at least one; 0 is colocated.
            has_teacher: False if ``teacher.path`` is empty; both settings are then ignored.
            shard_degree: ``teacher.shard_degree``; must divide the ranks that hold the teacher.

        Raises:
            ValueError: If no student rank would be left, or a setting is out of its range.
        """
        if not has_teacher:
            return cls(world_size, 0)
        if teacher_ranks < -1:
            raise ValueError(
                f"teacher.ranks = {teacher_ranks} must be -1 (half of the ranks), 0 (on the student's ranks) or the "
                f"number of the teacher's own ranks; this job has {world_size} ranks (NGPU): set --teacher.ranks"
            )
        if teacher_ranks == -1 and world_size == 1:
            raise ValueError(
                "teacher.ranks = -1 gives the teacher a rank of its own, but this job has 1 rank (NGPU = 1), which is "
                "the student's: use NGPU=2 or --teacher.ranks 0"
            )
        num_teachers = max(1, world_size // 2) if teacher_ranks == -1 else teacher_ranks
        if num_teachers >= world_size:
            raise ValueError(
                f"teacher.ranks = {num_teachers} leaves no student rank: this job has {world_size} rank(s) (NGPU). Set "
                f"NGPU to at least {num_teachers + 1}, or --teacher.ranks to at most {world_size - 1} (0: the teacher "
                "runs on the student's ranks)"
            )
        layout = cls(world_size - num_teachers, num_teachers)
        holders = layout.num_teachers or layout.num_students
        if shard_degree < 1 or holders % shard_degree:
            raise ValueError(
                f"teacher.shard_degree = {shard_degree} must divide the {holders} rank(s) that hold the teacher "
                f"(teacher.ranks = {teacher_ranks} of {world_size} ranks, NGPU): set --teacher.shard_degree or "
                "--teacher.ranks"
            )
        return layout

    @property
    def world_size(self) -> int:
        return self.num_students + self.num_teachers

    def size_of(self, role: str) -> int:
        """Ranks of a role."""
        return self.num_teachers if role == TEACHER else self.num_students

    def role_of(self, rank: int) -> str:
        """Role of a global rank: ``STUDENT`` or ``TEACHER``."""
        return STUDENT if rank < self.num_students else TEACHER

    def role_rank(self, rank: int) -> int:
        """Rank inside its role of a global rank."""
        return rank if rank < self.num_students else rank - self.num_students

    def global_rank(self, role: str, role_rank: int) -> int:
        """Global rank of a role's rank."""
        return role_rank if role == STUDENT else self.num_students + role_rank

    def teachers_of(self, student: int) -> list[int]:
        """Teacher ranks that a student rank deals its micro-batches to, in turn. Empty without separate teachers."""
        if not self.num_teachers:
            return []
        if self.num_students >= self.num_teachers:
            return [student % self.num_teachers]
        return list(range(student, self.num_teachers, self.num_students))

    def students_of(self, teacher: int) -> list[int]:
        """Student ranks that a teacher rank serves; at least one."""
        return [s for s in range(self.num_students) if teacher in self.teachers_of(s)]

    def routes(self) -> list[tuple[int, int]]:
        """All (student rank, teacher rank) pairs that exchange messages: max(S, T) of them, or none."""
        return [(s, t) for s in range(self.num_students) for t in self.teachers_of(s)]


def assign_device(
    layout: WorldLayout, rank: int, local_rank: int, local_world_size: int, num_devices: int
) -> int | None:
    """Index of the device that a rank uses on its node.

    With as many devices as ranks, each rank has its own. With fewer, the node's i-th student rank takes device i and
    its j-th teacher rank the j-th device from the end: two ranks share a device only if they are of different worlds.

    Args:
        layout: The job's layout.
        rank: Global rank; the node's ranks are ``rank - local_rank`` and the ``local_world_size - 1`` after it.
        local_rank: The rank's number on its node.
        local_world_size: Ranks of the node.
        num_devices: Accelerators of the node; 0 on CPU.

    Returns:
        The index, or None on CPU, where nothing limits the number of ranks.

    Raises:
        ValueError: If two ranks of one world would share a device.
    """
    if num_devices == 0:
        return None
    if num_devices >= local_world_size:
        return local_rank
    first = rank - local_rank
    role = layout.role_of(rank)
    by_role = {
        r: [i for i in range(first, first + local_world_size) if layout.role_of(i) == r] for r in (STUDENT, TEACHER)
    }
    for name, members in by_role.items():
        if len(members) > num_devices:
            raise ValueError(
                f"{len(members)} {name} ranks on one machine need {len(members)} GPUs, but it has {num_devices}: "
                f"NGPU = {local_world_size} with {layout.num_teachers} teacher rank(s) (teacher.ranks) would put two "
                "ranks of one world on one GPU, which NCCL cannot do; only a student and a teacher rank may share one. "
                f"Lower NGPU, or set --teacher.ranks so that neither world has more than {num_devices} rank(s) here"
            )
    place = by_role[role].index(rank)
    return place if role == STUDENT else num_devices - 1 - place


def _check_interfaces() -> None:
    """gloo itself says of an unknown interface neither the variable nor what there is."""
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    there = [name for _, name in socket.if_nameindex()]
    if unknown := [name for name in filter(None, wanted.split(",")) if name not in there]:
        raise ValueError(
            f'GLOO_SOCKET_IFNAME="{wanted}" must name network interfaces of {socket.gethostname()}, which has '
            f'{", ".join(there)} and no "{unknown[0]}"'
        )


def rendezvous(comm_mode: str = "default") -> tuple[Store, int, int]:
    """(store, global rank, world size) of the job that torchrun started; its agent's store, restarts included.

    A dry run (``comm.mode`` other than "default") is one process that stands for rank RANK (0 by default) of NGPU ranks.

    Raises:
        ValueError: If the environment variable GLOO_SOCKET_IFNAME names no network interface of this host; in a dry run,
            if NGPU is not a positive number, or RANK not below it.
    """
    _check_interfaces()
    if comm_mode not in DRY_RUN_MODES:
        store, rank, world_size = next(dist.rendezvous("env://"))
        return store_of_this_start(store, rank, world_size), rank, world_size
    ngpu = os.environ.get("NGPU", "")
    if not ngpu.isdigit() or not int(ngpu):
        raise ValueError(f'comm.mode = "{comm_mode}" needs the number of ranks in NGPU, got NGPU="{ngpu}"')
    rank = os.environ.get("RANK", "0")
    if not rank.isdigit() or int(rank) >= int(ngpu):
        raise ValueError(
            f'comm.mode = "{comm_mode}" shows one rank of NGPU = {ngpu}: RANK="{rank}" must be 0 to {int(ngpu) - 1}'
        )
    return HashStore(), int(rank), int(ngpu)


def join_world(
    job_config: Any,
    layout: WorldLayout,
    store: Store,
    rank: int,
    device_index: int | None = None,
    local_stop: Callable[[], bool] = lambda: False,
) -> World:
    """Initialise the default process group of this rank's role and set the environment to match.

    RANK and WORLD_SIZE become those inside the role, and LOCAL_RANK the device index if there is one. The group gets
    what torchtitan's ``init_distributed`` would have given it: ``comm.init_timeout_seconds`` (longer if a teacher may
    take longer), the backend (with a CPU
    backend for offload and asynchronous checkpoints), and the variables of NCCL's error handling and trace buffer, with
    a trace folder per role. torchtitan's warning that these settings are ignored is silenced, as they are not.

    Args:
        job_config: The job's config.
        layout: The job's layout.
        store: The job's store, shared by all its ranks, from ``rendezvous``.
        rank: Global rank.
        device_index: From ``assign_device``.
        local_stop: Whether this rank's node has been asked to stop the job; see ``World.start_heartbeat``.

    Returns:
        This rank's world, its heartbeat running.
    """
    role, role_rank = layout.role_of(rank), layout.role_rank(rank)
    role_size = layout.size_of(role)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(role_rank), str(role_size)
    if device_index is not None:
        os.environ["LOCAL_RANK"] = str(device_index)
    beats, joins = job_config.comm.heartbeat_timeout_seconds, job_config.comm.init_timeout_seconds
    world = World(layout, role, role_rank, role_size, rank, store, socket.gethostname(), beats, max(beats, joins))
    _silence_titan_warning()
    store.set(f"host/{rank}", world.host)
    world.start_heartbeat(local_stop)
    _set_comm_environment(job_config.comm, job_config.job.dump_folder, role)
    cpu_backend = job_config.training.enable_cpu_offload or job_config.checkpoint.async_mode != "disabled"
    dist.init_process_group(
        backend=_backend(cpu_backend),
        timeout=timedelta(seconds=_collective_timeout(job_config, layout)),
        store=PrefixStore(role, store),
        rank=role_rank,
        world_size=role_size,
    )
    return world


def _collective_timeout(job_config: Any, layout: WorldLayout) -> int:
    """Seconds a collective may take. A student's peers wait in one while it waits for its teacher: the named error about
    an overdue answer must come first."""
    seconds = job_config.comm.init_timeout_seconds
    return max(seconds, job_config.teacher.timeout_seconds + 60) if layout.num_teachers else seconds


def _backend(cpu_backend: bool) -> str:
    """The device's backend, beside gloo for CPU tensors if these are sent too."""
    backend = dist.Backend.default_device_backend_map.get(device_type, "nccl")
    return f"{device_type}:{backend},cpu:gloo" if cpu_backend and device_type != "cpu" else backend


def _set_comm_environment(comm: Any, dump_folder: str, role: str) -> None:
    """What torchtitan sets before it initialises; NCCL reads it when a group is made."""
    # The flight recorder needs mode 3 (skip clean-up): in mode 1 the watchdog aborts before the dump.
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_FR_BUFFER_SIZE": str(comm.trace_buf_size)}
    if comm.trace_buf_size > 0:
        folder = os.path.join(dump_folder, comm.save_traces_folder, role)
        os.makedirs(folder, exist_ok=True)
        variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
        variables["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(folder, comm.save_traces_file_prefix)
    for name, value in variables.items():
        if os.environ.get(name, value) != value:
            logger.warning(f"ENV[{name}] = {os.environ[name]} will be overridden to {value} based on job config")
        os.environ[name] = value


def _is_not_titan_warning(record: logging.LogRecord) -> bool:
    return "torch.distributed is already initialized. Skipping init_distributed" not in record.getMessage()


def _silence_titan_warning() -> None:
    if _is_not_titan_warning not in logger.filters:
        logger.addFilter(_is_not_titan_warning)


def shard_ranks(role_size: int, shard_degree: int) -> Sequence[list[int]]:
    """The role ranks of each shard group: contiguous runs of ``shard_degree`` ranks."""
    return [list(range(first, first + shard_degree)) for first in range(0, role_size, shard_degree)]


def shard_mesh(role_size: int, shard_degree: int) -> dist.device_mesh.DeviceMesh | None:
    """One-dimensional mesh of this rank's shard group, None if nothing is sharded. Every rank of the role must call."""
    if shard_degree == 1:
        return None
    shape = (role_size // shard_degree, shard_degree)
    mesh = dist.device_mesh.init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    return mesh["shard"]
