"""Checks of a job's config, before a process group, a model or any device memory exists.

``check_config`` refuses the values and combinations that would only fail later: the message names the field, its value,
what it must be and how to set it. ``ValueError`` is bad input, ``NotImplementedError`` a combination that is not
supported.
"""

import importlib
import os
from collections.abc import Sequence
from typing import Any

from torchtitan.components.optimizer import build_optimizers
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.tools.logging import logger

from blockgrow_titan.documents.dealing import MICRO_BATCHING
from blockgrow_titan.documents.readers import RECORD_READERS
from blockgrow_titan.documents.records import open_tokenizer
from blockgrow_titan.documents.source import ON_BAD_DOCUMENT
from blockgrow_titan.growth import schedule as growth_schedule
from blockgrow_titan.growth.hooks import load_hooks
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.model.placement import PLACEMENTS
from blockgrow_titan.parse import check_types
from blockgrow_titan.paths import resolve
from blockgrow_titan.ranges import check_ranges
from blockgrow_titan.teacher.check import check_teacher
from blockgrow_titan.unsupported import check_unsupported

TEACHER_DTYPES = ("bfloat16", "float32")
DOWNLOAD = "A published model, tokenizer included, comes with: hf download ORGANISATION/MODEL --local-dir FOLDER"
MAX_LAYERS = 10_000  # more would be a slip of the keys, and take hours to build
MAX_TOKENS = 2**31 - 1  # kernels count the tokens of a micro-batch in 32 bits
OPTIMIZERS = ("Adam", "AdamW")  # what torchtitan's builder knows


def check_config(job_config: JobConfig, *, needs_tokenizer: bool = True) -> None:
    """Refuse what cannot train. In a dry run, absent documents and teacher files are warnings.

    Args:
        job_config: The merged config.
        needs_tokenizer: False: in a dry run, an absent tokenizer is a warning too.

    Raises:
        ValueError: For a bad value or combination.
        NotImplementedError: For an unsupported one.
    """
    check_types(job_config)
    check_ranges(job_config)
    spec = _check_model(job_config)
    _check_values(job_config, spec)
    check_unsupported(job_config, dry_run=is_dry_run(job_config))
    if job_config.growth.start_phase != 0:
        raise ValueError("growth.start_phase is not a setting: remove it; a run resumes at its checkpoint's phase")
    growth_schedule.schedule_of(job_config)
    load_hooks((), job_config.growth.hooks)
    _check_paths(job_config)
    args: Any = spec.model_args[job_config.model.flavor]
    tokenizer = _check_tokenizer(job_config, args, needs_tokenizer)
    check_teacher(job_config, args, tokenizer, may_be_absent=is_dry_run(job_config))


def is_dry_run(job_config: JobConfig) -> bool:
    """Whether this job only checks its config (``dry_run.py``)."""
    return job_config.comm.mode == "fake_backend"


def _check_model(job_config: JobConfig) -> TrainSpec:
    """Import the user's module first, since it may add flavors, placements and readers; its spec must be able to grow."""
    module, name = job_config.experimental.custom_import, job_config.model.name
    try:
        if module:
            importlib.import_module(module)
        spec = get_train_spec(name)
    except Exception as error:  # a module of the user's may raise anything
        raise ValueError(
            f'model.name is "{name}" and experimental.custom_import is "{module}": {type(error).__name__}: {error}. This '
            'plugin\'s are "qwen3_block_stack" and "blockgrow_titan"'
        ) from error
    if not hasattr(spec, "phase_hooks"):
        raise ValueError(
            f'model.name is "{name}", whose train spec cannot grow: use "qwen3_block_stack" or a GrowthTrainSpec'
        )
    return spec


def _check_paths(job_config: JobConfig) -> None:
    """The documents must be there; in a dry run, absent ones are a warning."""
    if not job_config.job.dump_folder:
        raise ValueError('job.dump_folder is empty; set it to the folder of this run, "." for the current one')
    training, validation = job_config.training, job_config.validation
    sections = {"training": training, "validation": validation} if validation.enable else {"training": training}
    divided = {}
    for section, values in sections.items():
        reader, path = RECORD_READERS[values.dataset], values.dataset_path or ""
        try:
            reader.check_path(path, f"{section}.dataset_path")
            divided[section] = reader.divided_path(path)
        except ValueError as error:
            if not is_dry_run(job_config):
                raise
            logger.warning(f"{error}. A run would be refused")
    if len({path for path in divided.values() if path is not None}) > 1:
        raise ValueError(
            f'training.dataset_path is "{training.dataset_path}" and validation.dataset_path "{validation.dataset_path}"; '
            f"their documents are divided from {divided['training']} and {divided['validation']}, but both sets must come from "
            "one, for the held-out documents are the first of those that are trained on: name the same for both"
        )


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f'{name} is "{value}"; it must be one of {", ".join(allowed)}')


def check_ranks(job_config: JobConfig, student_ranks: int) -> None:
    """The data-parallel degrees must multiply to the student's ranks.

    Raises:
        ValueError: Naming the degrees and the ranks.
    """
    config = job_config.parallelism
    replicate, shard = config.data_parallel_replicate_degree, config.data_parallel_shard_degree
    if replicate < 1 or (shard < 1 and shard != -1):
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree is {replicate} and data_parallel_shard_degree {shard}; they must "
            "be at least 1 (-1 for the second: whatever is left)"
        )
    if student_ranks % replicate or shard not in (-1, student_ranks // replicate):
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree {replicate} and data_parallel_shard_degree {shard} do not "
            f"multiply to the {student_ranks} student rank(s) that NGPU and teacher.ranks leave: set "
            "--parallelism.data_parallel_shard_degree -1 or change the ranks"
        )


def _check_values(job_config: JobConfig, spec: TrainSpec) -> None:
    growth, distill, teacher, documents = (
        job_config.growth,
        job_config.distill,
        job_config.teacher,
        job_config.documents,
    )
    _one_of("model.flavor", job_config.model.flavor, list(spec.model_args))
    _one_of("block_stack.placement", job_config.block_stack.placement, list(PLACEMENTS))
    _one_of("growth.freeze", growth.freeze, growth_schedule.FREEZE)
    _one_of("growth.optimizer_at_growth", growth.optimizer_at_growth, growth_schedule.OPTIMIZER_AT_GROWTH)
    _one_of("growth.lr_at_growth", growth.lr_at_growth, growth_schedule.LR_AT_GROWTH)
    _one_of("growth.data_at_growth", growth.data_at_growth, growth_schedule.DATA_AT_GROWTH)
    _one_of("growth.new_block_init", growth.new_block_init, growth_schedule.NEW_BLOCK_INIT)
    _one_of("teacher.dtype", teacher.dtype, TEACHER_DTYPES)
    if spec.build_optimizers_fn is build_optimizers:
        _one_of("optimizer.name", job_config.optimizer.name, OPTIMIZERS)
    _one_of("documents.on_bad_document", documents.on_bad_document, ON_BAD_DOCUMENT)
    _one_of("training.dataset", job_config.training.dataset, list(RECORD_READERS))
    _one_of("documents.micro_batching", documents.micro_batching, MICRO_BATCHING)
    if distill.kd_weight == distill.ce_weight == 0:
        raise ValueError("distill.kd_weight and distill.ce_weight are both 0: nothing would be trained")
    if not teacher.path and distill.kd_weight != 0:
        raise ValueError(
            f"distill.kd_weight is {distill.kd_weight} without a teacher (teacher.path is empty): set teacher.path, or "
            "distill.kd_weight = 0 to train from scratch"
        )
    if growth.lr_at_growth == "restart" and job_config.lr_scheduler.total_steps is not None:
        raise ValueError(
            f"lr_scheduler.total_steps is {job_config.lr_scheduler.total_steps}, but with growth.lr_at_growth = "
            '"restart" each phase has a schedule over its own steps: remove it, or set lr_at_growth = "continue"'
        )
    if (steps := job_config.lr_scheduler.total_steps) is not None and steps < job_config.training.steps:
        raise ValueError(
            f"lr_scheduler.total_steps is {steps}, but training.steps is {job_config.training.steps}: after the end of the "
            "schedule the learning rate would be negative; set it to at least training.steps, or remove it"
        )
    layers = job_config.block_stack.num_blocks * job_config.block_stack.layers_per_block
    if layers > MAX_LAYERS:
        raise ValueError(
            f"block_stack.num_blocks {job_config.block_stack.num_blocks} times block_stack.layers_per_block "
            f"{job_config.block_stack.layers_per_block} is {layers:,} layers; they must be {MAX_LAYERS:,} at most"
        )
    _check_micro_batch("training", job_config.training)
    _check_padding("training.seq_len", job_config.training.seq_len, documents.pad_to_multiple_of)
    _check_validation(job_config)


def _check_micro_batch(name: str, section: Any) -> None:
    tokens = section.local_batch_size * section.seq_len
    if tokens > MAX_TOKENS:
        raise ValueError(
            f"{name}.local_batch_size {section.local_batch_size} times {name}.seq_len {section.seq_len} is {tokens:,} tokens "
            f"in a micro-batch; they must be {MAX_TOKENS:,} at most: lower either"
        )


def _check_padding(name: str, seq_len: int, multiple: int) -> None:
    if multiple != -1 and seq_len % multiple:
        raise ValueError(
            f"documents.pad_to_multiple_of is {multiple}, which does not divide {name} = {seq_len}: a micro-batch could be "
            "padded beyond the length that the model is built for; choose a divisor"
        )


def _check_validation(job_config: JobConfig) -> None:
    validation, diagnostics = job_config.validation, job_config.diagnostics
    if diagnostics.enable and not validation.enable:
        raise ValueError(
            "diagnostics.enable is true but validation.enable false; diagnostics are taken at each validation, on its "
            "documents: set validation.enable = true, or diagnostics.enable = false"
        )
    if not validation.enable:
        return
    _one_of("validation.dataset", validation.dataset, list(RECORD_READERS))
    if validation.steps != -1:
        raise ValueError(f"validation.steps is {validation.steps}; it must be -1: every document of the set is used")
    if not 2 <= validation.seq_len <= job_config.training.seq_len:
        raise ValueError(
            f"validation.seq_len is {validation.seq_len}; it must be from 2 to training.seq_len = "
            f"{job_config.training.seq_len}, the length that the model is built for"
        )
    _check_micro_batch("validation", validation)
    _check_padding("validation.seq_len", validation.seq_len, job_config.documents.pad_to_multiple_of)


def _check_tokenizer(job_config: JobConfig, args: BlockStackArgs, needed: bool) -> HuggingFaceTokenizer | None:
    try:
        folder = resolve(job_config.model.hf_assets_path, "model.hf_assets_path")
        if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
            raise ValueError(
                f"model.hf_assets_path is {folder}, which has no tokenizer.json: point it at the tokenizer's folder"
            )
    except ValueError as error:
        if needed:
            raise ValueError(f"{error}. {DOWNLOAD}") from None
        logger.warning(f"{error}. A run would be refused")
        return None
    tokenizer = open_tokenizer(folder, "model.hf_assets_path")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= args.vocab_size:
        raise ValueError(
            f"model.hf_assets_path {folder} has a tokenizer of {tokenizer.get_vocab_size()} entries with ids up to {largest}, "
            f'beyond the vocabulary of {args.vocab_size} of model.flavor "{job_config.model.flavor}": choose the flavor that '
            "fits the tokenizer"
        )
    if tokenizer.token_to_id(job_config.documents.end_of_document) is None:
        raise ValueError(
            f'documents.end_of_document is "{job_config.documents.end_of_document}", which the tokenizer in {folder} lacks'
        )
    return tokenizer
