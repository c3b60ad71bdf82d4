"""``COMM_MODE=fake_backend NGPU=16 ./run_train.sh ...``: check a job without its GPUs.

One process, with neither weights nor documents: every config check runs; then, over a fake process group of the
student's ranks, each phase's student is built on the meta device with its real mesh, activation checkpointing, compile
wrapping and ``fully_shard``, and its size is printed; then the same for the teacher's world. Nothing is allocated, no
step runs. ``RANK=n`` shows another rank's shards.
"""

from typing import cast

from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.logging import logger

from blockgrow_titan.growth.schedule import schedule_of
from blockgrow_titan.infra.footprint import fake_world, shard_bytes, student_on_meta
from blockgrow_titan.infra.parallelize import data_parallel_dims
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.metrics import plural
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.teacher.check import teacher_args
from blockgrow_titan.teacher.messages import teacher_dtype
from blockgrow_titan.teacher.model import meta_teacher
from blockgrow_titan.teacher.worlds import STUDENT, TEACHER, WorldLayout, shard_mesh


def dry_run(job_config: JobConfig, layout: WorldLayout, rank: int) -> None:
    """Build both worlds on the meta device and print what a rank of each holds.

    Args:
        job_config: The job's config, already checked.
        layout: Its ranks.
        rank: Global rank whose shards are shown; the other world is shown as its first rank sees it.
    """
    shown = {STUDENT: 0, TEACHER: 0} | {layout.role_of(rank): layout.role_rank(rank)}
    logger.info(
        f"Dry run of {layout.world_size} ranks: {layout.num_students} of the student's world, {layout.num_teachers} of the "
        "teacher's"
    )
    with fake_world(shown[STUDENT], layout.num_students):
        _build_students(job_config, layout.num_students, shown[STUDENT])
    if job_config.teacher.path:
        role = TEACHER if layout.num_teachers else STUDENT
        with fake_world(shown[role], layout.size_of(role)):
            _build_teacher(job_config, role, layout.size_of(role), shown[role])
    logger.info("Dry run completed: the config is sound")


def _build_students(job_config: JobConfig, size: int, rank: int) -> None:
    args = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
    assert isinstance(args, BlockStackArgs)
    args.update_from_config(job_config)
    parallel_dims = data_parallel_dims(job_config, size)
    for phase in schedule_of(job_config).phases:
        phase_args = args.for_phase(phase, job_config)
        model, total, trainable = student_on_meta(job_config, phase_args, parallel_dims)
        logger.info(
            f"phase {phase.index}: steps {phase.first_step} to {phase.last_step}, {plural(phase.active_blocks, 'block')} of "
            f"{plural(phase_args.layers_per_block, 'layer')}; {total:,} parameters, {trainable:,} trainable; "
            f"{shard_bytes(model) / 2**20:,.1f} MiB of parameters on student rank {rank}"
        )


def _build_teacher(job_config: JobConfig, role: str, size: int, rank: int) -> None:
    flavor = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
    args = teacher_args(job_config, cast(Qwen3ModelArgs, flavor))
    dtype = teacher_dtype(job_config)
    degree = job_config.teacher.shard_degree
    model = meta_teacher(args, dtype, shard_mesh(size, degree))
    total = sum(p.numel() for p in model.parameters())
    logger.info(
        f"teacher: {plural(args.n_layers, 'layer')}, {total:,} parameters without the head, {job_config.teacher.dtype}, "
        f"one copy on {plural(degree, 'rank')}; {shard_bytes(model) / 2**20:,.1f} MiB of parameters on {role} rank {rank}"
    )
