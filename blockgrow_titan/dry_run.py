"""``COMM_MODE=fake_backend NGPU=16 ./run_train.sh ...``: check a job without its GPUs.

One process stands for a student rank of the whole job: every config check has run; here each phase's student is built on
the meta device with its real mesh, activation checkpointing, compile wrapping and ``fully_shard`` over a fake process
group, and its size is printed. Nothing is allocated, no step runs.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from blockgrow_titan.growth.schedule import schedule_of
from blockgrow_titan.infra.parallelize import data_parallel_dims
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.metrics import plural
from blockgrow_titan.teacher.worlds import WorldLayout


def shard_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that this rank holds."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() * p.element_size() for p in model.parameters())


def dry_run(job_config: JobConfig, layout: WorldLayout) -> None:
    """Build every phase's student on meta, sharded over ``layout.num_students`` fake ranks, and print its size.

    Expects the student's fake process group as the default one (``teacher.worlds.join_world``).
    """
    logger.info(
        f"Dry run of {layout.world_size} ranks: {layout.num_students} of the student's world, {layout.num_teachers} of the "
        "teacher's"
    )
    spec = get_train_spec(job_config.model.name)
    args = spec.model_args[job_config.model.flavor]
    args.update_from_config(job_config)
    parallel_dims = data_parallel_dims(job_config, layout.num_students)
    for phase in schedule_of(job_config).phases:
        phase_args = args.for_phase(phase, job_config)
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
            model: nn.Module = spec.model_cls(phase_args)
        total = sum(p.numel() for p in model.parameters())
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        model = spec.parallelize_fn(model, parallel_dims, job_config)
        logger.info(
            f"phase {phase.index}: steps {phase.first_step} to {phase.last_step}, {plural(phase.active_blocks, 'block')} of "
            f"{plural(phase_args.layers_per_block, 'layer')}; {total:,} parameters, {trainable:,} trainable; "
            f"{shard_bytes(model) / 2**20:,.1f} MiB of parameters on this rank"
        )
    logger.info("Dry run completed: the config is sound")
