"""Parts of torchtitan that this plugin does not combine with, or that would be ignored: refused by name.

Each refusal is raised before anything is built, where torchtitan would fail later with a traceback or go on without.
"""

import importlib.util

import torch
from torchtitan.protocols.model_converter import _registry_model_converter_cls
from torchtitan.tools.utils import device_type

from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.placement import PLACEMENTS

COMPONENTS = ("model", "loss")  # what torchtitan compiles
DETERMINISM_CHECKS = ("default", "none")  # what torch's activation checkpointing knows


def check_unsupported(job_config: JobConfig, dry_run: bool) -> None:
    """Refuse what this plugin does not support.

    Args:
        job_config: The merged config, its types checked.
        dry_run: Nothing runs, so what this machine lacks does not matter.

    Raises:
        ValueError, NotImplementedError: Naming the field, its value and what to set instead.
    """
    _check_switches(job_config)
    _check_checkpoint(job_config)
    _check_compile(job_config)
    _check_activation_checkpoint(job_config)
    if not dry_run:
        _check_machine(job_config)


def _check_switches(job_config: JobConfig) -> None:
    for name in ("tensor", "context", "pipeline", "expert", "expert_tensor"):
        field = f"{name}_parallel_degree"
        if (degree := getattr(job_config.parallelism, field)) != 1:
            raise NotImplementedError(
                f"parallelism.{field} is {degree}; only 1 is supported: students are sharded by FSDP2 "
                "(data_parallel_shard_degree, data_parallel_replicate_degree)"
            )
    switches = {
        "fault_tolerance.enable": job_config.fault_tolerance.enable,
        "memory_estimation.enable": job_config.memory_estimation.enable,
        "optimizer.early_step_in_backward": job_config.optimizer.early_step_in_backward,
        "checkpoint.create_seed_checkpoint": job_config.checkpoint.create_seed_checkpoint,
    }
    _refuse_true(switches, "which growth does not support: set it to false")
    if job_config.comm.mode == "local_tensor":
        raise NotImplementedError('comm.mode is "local_tensor", which is not supported: leave COMM_MODE unset')
    replaced = {
        "model.tokenizer_path": (job_config.model.tokenizer_path, "model.hf_assets_path"),
        "experimental.custom_args_module": (job_config.experimental.custom_args_module, "job.custom_config_module"),
    }
    for name, (text, instead) in replaced.items():
        if text:
            raise ValueError(f'{name} is "{text}", but that field is not used any more: set {instead} instead')
    for name in job_config.model.converters:
        if name not in _registry_model_converter_cls:
            raise ValueError(
                f'model.converters has "{name}"; it must be one of {", ".join(_registry_model_converter_cls)}'
            )


def _check_checkpoint(job_config: JobConfig) -> None:
    checkpoint = job_config.checkpoint
    if checkpoint.last_save_in_hf and not PLACEMENTS[job_config.block_stack.placement].is_qwen3:
        raise NotImplementedError(
            f'checkpoint.last_save_in_hf is true with block_stack.placement "{job_config.block_stack.placement}": only a '
            "pre-norm student is a plain Qwen3; set it to false and export with `python -m tools.convert_hf to-hf`"
        )
    if checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        raise ValueError(
            "checkpoint.last_save_in_hf is true, but Hugging Face's format holds the model only: set "
            "checkpoint.last_save_model_only = true as well"
        )
    if checkpoint.initial_load_path and not checkpoint.initial_load_model_only:
        raise NotImplementedError(
            "checkpoint.initial_load_model_only is false: a run's step, optimizer and data position belong to its own "
            "dump folder; set it to true to start from another run's weights"
        )


def _check_compile(job_config: JobConfig) -> None:
    config = job_config.compile
    for component in config.components:
        if component not in COMPONENTS:
            raise ValueError(f'compile.components has "{component}"; it must be one of {", ".join(COMPONENTS)}')
    if not config.enable:
        return
    backends = torch.compiler.list_backends(exclude_tags=())
    if config.backend not in backends:
        raise ValueError(f'compile.backend is "{config.backend}"; it must be one of {", ".join(backends)}')
    packed = job_config.documents.micro_batching == "packed" and "model" in config.components
    if device_type == "cuda" and packed and job_config.training.mixed_precision_param == "float32":
        raise NotImplementedError(
            'documents.micro_batching is "packed" with compile.enable in training.mixed_precision_param = "float32": on CUDA '
            'only 16-bit attention within documents can be compiled; use "bfloat16", or micro_batching = "balanced"'
        )


def _check_activation_checkpoint(job_config: JobConfig) -> None:
    config, compiled = job_config.activation_checkpoint, job_config.compile
    if config.mode == "memory_budget" and not (compiled.enable and "model" in compiled.components):
        raise ValueError(
            'activation_checkpoint.mode is "memory_budget", which the compiler carries out: set compile.enable = true with '
            '"model" in compile.components, or another mode'
        )
    option = config.selective_ac_option
    if option != "op" and not option.isdecimal():
        raise ValueError(
            f'activation_checkpoint.selective_ac_option is "{option}"; it must be "op", or a number n for every nth layer'
        )
    if config.determinism_check not in DETERMINISM_CHECKS:
        raise ValueError(
            f'activation_checkpoint.determinism_check is "{config.determinism_check}"; it must be one of '
            f"{', '.join(DETERMINISM_CHECKS)}"
        )


def _check_machine(job_config: JobConfig) -> None:
    if job_config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "metrics.enable_wandb is true, but wandb is not installed: pip install wandb, or set it to false"
        )
    if device_type != "cpu":
        return
    only_on_accelerators = {
        "training.enable_cpu_offload": job_config.training.enable_cpu_offload,
        "profiling.enable_profiling": job_config.profiling.enable_profiling,
        "profiling.enable_memory_snapshot": job_config.profiling.enable_memory_snapshot,
    }
    _refuse_true(only_on_accelerators, "which needs an accelerator: set it to false on a CPU")
    if job_config.checkpoint.async_mode == "async_with_pinned_mem":
        raise NotImplementedError(
            'checkpoint.async_mode is "async_with_pinned_mem", which needs an accelerator: use "async" on a CPU'
        )


def _refuse_true(switches: dict[str, bool], why: str) -> None:
    for name, value in switches.items():
        if value:
            raise NotImplementedError(f"{name} is true, {why}")
