"""Parallelisation of the student: activation checkpointing, then compile, then FSDP2, in torchtitan's order.

One rank is sharded too (on a mesh of one), so that one rank and many run the same numerics: FSDP's mixed precision,
never autocast.
"""

import torchtitan.distributed.activation_checkpoint as titan_ac
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.infra.parallelize import apply_compile, disable_fsdp_gradient_division
from torchtitan.models.qwen3.infra.parallelize import _op_sac_save_list
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type


class DataParallelDims(ParallelDims):
    """torchtitan's mesh, with an ``fsdp`` dimension even on one rank."""

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return name == "fsdp" or super()._mesh_exist(name, degree)

    @property
    def fsdp_enabled(self) -> bool:
        return True


def data_parallel_dims(job_config: JobConfig, world_size: int) -> DataParallelDims:
    """The mesh of ``[parallelism]`` over the student's ``world_size`` ranks."""
    config = job_config.parallelism
    return DataParallelDims(
        dp_shard=config.data_parallel_shard_degree,
        dp_replicate=config.data_parallel_replicate_degree,
        cp=config.context_parallel_degree,
        tp=config.tensor_parallel_degree,
        pp=config.pipeline_parallel_degree,
        ep=config.expert_parallel_degree,
        etp=config.expert_tensor_parallel_degree,
        world_size=world_size,
    )


def parallelize_block_stack(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Apply activation checkpointing, torch.compile per layer and FSDP2 (HSDP with replicas), in this order.

    Args:
        model: A ``BlockStackModel`` on the meta device, with ``requires_grad`` already as its phase wants it.
        parallel_dims: The student world's mesh.
        job_config: The job's config.

    Raises:
        NotImplementedError: If tensor, context or pipeline parallelism is asked for.
    """
    for name, degree in (("tensor", parallel_dims.tp), ("context", parallel_dims.cp), ("pipeline", parallel_dims.pp)):
        if degree > 1:
            raise NotImplementedError(f"parallelism.{name}_parallel_degree is {degree}; only 1 is supported")

    compile_layers = job_config.compile.enable and "model" in job_config.compile.components
    if job_config.activation_checkpoint.mode != "none":
        titan_ac._layer_sac_count = 0  # "every nth layer" counts globally; a rebuild must wrap the same layers again
        titan_ac.apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compile_layers,
            op_sac_save_list=_op_sac_save_list,
            base_folder=job_config.job.dump_folder,
        )
    if compile_layers:
        apply_compile(model, job_config.compile)
    _apply_fsdp(model, parallel_dims, job_config)
    return model


def _apply_fsdp(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> None:
    """One FSDP unit for the embedding, for each layer and for the head; the boundary norm goes with the root."""
    mesh_dims = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    config: dict = {
        "mesh": parallel_dims.get_mesh(mesh_dims),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce],
        ),
    }
    if job_config.training.enable_cpu_offload:
        config["offload_policy"] = CPUOffloadPolicy()
    reshard = job_config.parallelism.fsdp_reshard_after_forward
    # The embedding is frozen under distillation: a unit of its own never reduces a gradient.
    for unit in (model.get_submodule("tok_embeddings"), *model.get_submodule("layers").children()):
        fully_shard(unit, **config, reshard_after_forward=reshard != "never")
    # The head's backward starts right after its forward: keep it gathered unless told otherwise.
    fully_shard(model.get_submodule("output"), **config, reshard_after_forward=reshard == "always")
    fully_shard(model, **config)

    disable_fsdp_gradient_division(model)  # the loss is scaled by the global number of valid tokens instead
    if device_type == "cpu":
        for module in model.modules():  # not recursive: every unit must be told
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    logger.info(f"Applied {'HSDP' if parallel_dims.dp_replicate_enabled else 'FSDP'} to the model")
