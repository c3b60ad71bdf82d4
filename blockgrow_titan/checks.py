"""Checks of a job's config, before a process group, a model or any device memory exists.

``parse_config`` reads TOML and command line with torchtitan's ConfigManager and turns its tracebacks into one line.
``check_config`` refuses every value and combination that could only fail later: the message names the field, its value,
what it must be and how to set it. ``ValueError`` is bad input, ``NotImplementedError`` a combination that is not
supported.
"""

import dataclasses
import difflib
import importlib
import json
import os
import tomllib
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import device_type

from blockgrow_titan.documents.readers import RECORD_READERS
from blockgrow_titan.documents.source import ON_BAD_DOCUMENT
from blockgrow_titan.growth import schedule as growth_schedule
from blockgrow_titan.growth.hooks import load_hooks
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import FLAVORS, BlockStackArgs
from blockgrow_titan.model.placement import PLACEMENTS
from blockgrow_titan.paths import resolve
from blockgrow_titan.teacher.model import TeacherFiles

TEACHER_DTYPES = ("bfloat16", "float32")
OPTIMIZERS = ("Adam", "AdamW")  # what torchtitan's builder knows
CONFIG_MODULE = '"blockgrow_titan.job_config"'
PLUGIN_SECTIONS = ("block_stack", "growth", "distill", "teacher", "documents")


class GrowthConfigManager(ConfigManager):
    """torchtitan's ConfigManager with one-line errors: a misspelt field is answered with the nearest name."""

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
        path = _option(args, "job.config_file")
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                return tomllib.load(file)
        except OSError as error:
            raise ValueError(
                f'job.config_file is "{path}", which cannot be read ({error.strerror}; current folder: {os.getcwd()})'
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f'job.config_file is "{path}", which is not valid TOML: {error}') from None

    def _maybe_add_custom_config(self, args: list[str], toml_values: dict[str, Any] | None) -> Any:
        try:
            return super()._maybe_add_custom_config(args, toml_values)
        except ImportError as error:
            raise ValueError(
                f"job.custom_config_module cannot be imported ({error}); set it to {CONFIG_MODULE}, or to a module of "
                "yours that extends it"
            ) from None

    def _dict_to_dataclass(self, cls: Any, data: dict[str, Any]) -> Any:
        if not dataclasses.is_dataclass(cls):
            return data
        types_of = {f.name: f.type for f in dataclasses.fields(cls)}
        names = list(types_of)
        for name, value in data.items():
            if dataclasses.is_dataclass(types_of.get(name)) and not isinstance(value, dict):
                raise ValueError(f"the config has {name} = {value!r}; it must be a section, [{name}]")
            if name not in names:
                section = getattr(cls, "__name__", "").removeprefix("Merged")
                near = difflib.get_close_matches(name, names, n=1)
                hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(names)}"
                if name in PLUGIN_SECTIONS:
                    hint = f"it is this plugin's: set job.custom_config_module = {CONFIG_MODULE}"
                raise ValueError(f'the config has "{name}" in {section}, which has no such field; {hint}')
        return super()._dict_to_dataclass(cls, data)

    def _validate_config(self) -> None:
        """torchtitan only warns about a missing tokenizer here; ``check_config`` refuses it."""


def _option(args: list[str], name: str) -> str | None:
    """The value of ``--name value`` or ``--name=value`` on the command line, with underscores or hyphens."""
    spellings = {f"--{name}", f"--{name.replace('_', '-')}"}
    for arg, following in zip(args, [*args[1:], None], strict=True):
        option, equals, value = arg.partition("=")
        if option in spellings:
            return value if equals else following
    return None


def parse_config(args: Sequence[str]) -> JobConfig:
    """Parse the command line (and the TOML that ``--job.config_file`` names) into the merged JobConfig.

    Raises:
        ValueError: If the file cannot be read or a section has an unknown field. tyro itself exits on bad arguments.
    """
    return typing.cast(JobConfig, GrowthConfigManager().parse_args(list(args)))


def check_config(job_config: JobConfig) -> None:
    """Refuse what cannot train.

    Raises:
        ValueError: For a bad value or combination.
        NotImplementedError: For an unsupported one.
    """
    if not hasattr(job_config, "growth"):
        raise ValueError(f"the config lacks this plugin's sections: set job.custom_config_module = {CONFIG_MODULE}")
    _check_types(job_config)
    _check_unsupported(job_config)
    _check_values(job_config)
    if job_config.growth.start_phase != 0:
        raise ValueError("growth.start_phase is not a setting: remove it; a run resumes at its checkpoint's phase")
    growth_schedule.schedule_of(job_config)
    load_hooks((), job_config.growth.hooks)
    _check_model(job_config)
    args = FLAVORS[job_config.model.flavor]
    tokenizer = _check_tokenizer(job_config, args)
    check_teacher(job_config, args, tokenizer)


def _check_model(job_config: JobConfig) -> None:
    """The train spec must be registered and growth-aware, the documents' files must be there."""
    module, name = job_config.experimental.custom_import, job_config.model.name
    try:
        if module:
            importlib.import_module(module)
        spec = get_train_spec(name)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f'model.name is "{name}" and experimental.custom_import is "{module}": {error}. This plugin\'s are '
            '"qwen3_block_stack" and "blockgrow_titan"'
        ) from None
    if not hasattr(spec, "phase_hooks"):
        raise ValueError(
            f'model.name is "{name}", whose train spec cannot grow: use "qwen3_block_stack" or a GrowthTrainSpec'
        )
    sections = {"training": job_config.training}
    if job_config.validation.enable:
        sections["validation"] = job_config.validation
    for section, values in sections.items():
        if values.dataset != "datasets":  # that kind may name a data set on the hub
            resolve(values.dataset_path or "", f"{section}.dataset_path")


def _matches(value: Any, kind: Any) -> bool:
    """Whether a value has an annotated type; TOML hands any type through."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, argument) for argument in arguments)
    if origin is list:
        return isinstance(value, list) and all(_matches(item, arguments[0]) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else True


def _check_types(section: Any, prefix: str = "") -> None:
    for f in dataclasses.fields(section):
        value, name = getattr(section, f.name), f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            _check_types(value, f"{name}.")
        elif dataclasses.is_dataclass(f.type):
            raise ValueError(f"{name} is {value!r}; it must be a section: [{name}]")
        elif not isinstance(f.type, str) and not _matches(value, f.type):
            wanted = getattr(f.type, "__name__", None) if not typing.get_args(f.type) else str(f.type)
            raise ValueError(f"{name} is {value!r}, a {type(value).__name__}; it must be {wanted}")


def _check_unsupported(job_config: JobConfig) -> None:
    """Parts of torchtitan that this plugin does not combine with, by name."""
    parallelism = job_config.parallelism
    for name in ("tensor", "context", "pipeline", "expert", "expert_tensor"):
        field = f"{name}_parallel_degree"
        if (degree := getattr(parallelism, field)) > 1:
            raise NotImplementedError(
                f"parallelism.{field} is {degree}; only 1 is supported: students are sharded by FSDP2 "
                "(data_parallel_shard_degree, data_parallel_replicate_degree)"
            )
    refused = {
        "fault_tolerance.enable": job_config.fault_tolerance.enable,
        "optimizer.early_step_in_backward": job_config.optimizer.early_step_in_backward,
        "checkpoint.create_seed_checkpoint": job_config.checkpoint.create_seed_checkpoint,
    }
    for name, value in refused.items():
        if value:
            raise NotImplementedError(f"{name} is true, which growth does not support: set it to false")
    if job_config.comm.mode == "local_tensor":
        raise NotImplementedError('comm.mode is "local_tensor", which is not supported: leave COMM_MODE unset')
    if job_config.checkpoint.last_save_in_hf and job_config.block_stack.placement != "pre":
        raise NotImplementedError(
            f'checkpoint.last_save_in_hf is true with block_stack.placement "{job_config.block_stack.placement}": only a '
            "pre-norm student is a plain Qwen3; set it to false"
        )
    if device_type == "cpu":
        only_on_accelerators = {
            "training.enable_cpu_offload": job_config.training.enable_cpu_offload,
            "profiling.enable_profiling": job_config.profiling.enable_profiling,
            "profiling.enable_memory_snapshot": job_config.profiling.enable_memory_snapshot,
        }
        for name, value in only_on_accelerators.items():
            if value:
                raise NotImplementedError(f"{name} is true, which needs an accelerator: set it to false on a CPU")
        if job_config.checkpoint.async_mode == "async_with_pinned_mem":
            raise NotImplementedError(
                'checkpoint.async_mode is "async_with_pinned_mem", which needs an accelerator: use "async" on a CPU'
            )


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f'{name} is "{value}"; it must be one of {", ".join(allowed)}')


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def _check_values(job_config: JobConfig) -> None:
    growth, distill, teacher, documents = (
        job_config.growth,
        job_config.distill,
        job_config.teacher,
        job_config.documents,
    )
    _one_of("model.flavor", job_config.model.flavor, list(FLAVORS))
    _one_of("block_stack.placement", job_config.block_stack.placement, list(PLACEMENTS))
    _one_of("growth.freeze", growth.freeze, growth_schedule.FREEZE)
    _one_of("growth.optimizer_at_growth", growth.optimizer_at_growth, growth_schedule.OPTIMIZER_AT_GROWTH)
    _one_of("growth.lr_at_growth", growth.lr_at_growth, growth_schedule.LR_AT_GROWTH)
    _one_of("growth.data_at_growth", growth.data_at_growth, growth_schedule.DATA_AT_GROWTH)
    _one_of("growth.new_block_init", growth.new_block_init, growth_schedule.NEW_BLOCK_INIT)
    _one_of("teacher.dtype", teacher.dtype, TEACHER_DTYPES)
    _one_of("optimizer.name", job_config.optimizer.name, OPTIMIZERS)
    _one_of("documents.on_bad_document", documents.on_bad_document, ON_BAD_DOCUMENT)
    _one_of("training.dataset", job_config.training.dataset, list(RECORD_READERS))
    least = {
        "block_stack.num_blocks": (job_config.block_stack.num_blocks, 1),
        "block_stack.layers_per_block": (job_config.block_stack.layers_per_block, 1),
        "training.steps": (job_config.training.steps, 1),
        "training.seq_len": (job_config.training.seq_len, 2),
        "training.local_batch_size": (job_config.training.local_batch_size, 1),
        "training.global_batch_size": (job_config.training.global_batch_size, 1),
        "distill.kd_weight": (distill.kd_weight, 0),
        "distill.ce_weight": (distill.ce_weight, 0),
        "distill.chunk_tokens": (distill.chunk_tokens, 1),
        "teacher.ranks": (teacher.ranks, -1),
        "teacher.shard_degree": (teacher.shard_degree, 1),
        "teacher.prefetch": (teacher.prefetch, 0),
        "teacher.timeout_seconds": (teacher.timeout_seconds, 1),
        "documents.pad_to_multiple_of": (documents.pad_to_multiple_of, 1),
        "metrics.log_freq": (job_config.metrics.log_freq, 1),
        "checkpoint.interval": (job_config.checkpoint.interval, 1),
        "checkpoint.keep_latest_k": (job_config.checkpoint.keep_latest_k, 0),
    }
    for name, (value, minimum) in least.items():
        _at_least(name, value, minimum)
    if documents.shard_documents != -1:
        _at_least("documents.shard_documents (or -1 for all)", documents.shard_documents, 1)
    if distill.temperature <= 0:
        raise ValueError(f"distill.temperature is {distill.temperature}; it must be above 0")
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
    if job_config.checkpoint.keep_latest_k == 1:
        raise ValueError("checkpoint.keep_latest_k is 1: keep at least 2 (one may be half-written), or 0 for all")
    _check_padding("training.seq_len", job_config.training.seq_len, documents.pad_to_multiple_of)
    _check_validation(job_config)


def _check_padding(name: str, seq_len: int, multiple: int) -> None:
    if seq_len % multiple:
        raise ValueError(
            f"documents.pad_to_multiple_of is {multiple}, which does not divide {name} = {seq_len}: a micro-batch could be "
            "padded beyond the length that the model is built for; choose a divisor"
        )


def _check_validation(job_config: JobConfig) -> None:
    validation = job_config.validation
    if not validation.enable:
        return
    _one_of("validation.dataset", validation.dataset, list(RECORD_READERS))
    _at_least("validation.freq", validation.freq, 1)
    _at_least("validation.local_batch_size", validation.local_batch_size, 1)
    if validation.steps != -1:
        raise ValueError(f"validation.steps is {validation.steps}; it must be -1: every document of the set is used")
    if not 2 <= validation.seq_len <= job_config.training.seq_len:
        raise ValueError(
            f"validation.seq_len is {validation.seq_len}; it must be from 2 to training.seq_len = "
            f"{job_config.training.seq_len}, the length that the model is built for"
        )
    _check_padding("validation.seq_len", validation.seq_len, job_config.documents.pad_to_multiple_of)


def _check_tokenizer(job_config: JobConfig, args: BlockStackArgs) -> HuggingFaceTokenizer:
    folder = resolve(job_config.model.hf_assets_path, "model.hf_assets_path")
    if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        raise ValueError(
            f"model.hf_assets_path is {folder}, which has no tokenizer.json: point it at the tokenizer's folder"
        )
    tokenizer = HuggingFaceTokenizer(folder)
    if tokenizer.get_vocab_size() > args.vocab_size:
        raise ValueError(
            f"model.hf_assets_path {folder} has a tokenizer of {tokenizer.get_vocab_size()} entries, more than the "
            f'{args.vocab_size} of model.flavor "{job_config.model.flavor}": choose the flavor that fits the tokenizer'
        )
    if tokenizer.token_to_id(job_config.documents.end_of_document) is None:
        raise ValueError(
            f'documents.end_of_document is "{job_config.documents.end_of_document}", which the tokenizer in {folder} lacks'
        )
    return tokenizer


def check_teacher(job_config: JobConfig, args: BlockStackArgs, tokenizer: HuggingFaceTokenizer) -> None:
    """Refuse a teacher that does not fit the student: hidden size, vocabulary, length, tokenizer.

    Raises:
        ValueError: Naming both values.
    """
    if not job_config.teacher.path:
        return
    folder = resolve(job_config.teacher.path, "teacher.path")
    teacher = TeacherFiles(folder).args
    flavor = f'model.flavor "{job_config.model.flavor}"'
    if teacher.vocab_size != args.vocab_size:
        raise ValueError(
            f"teacher.path {folder} has a vocabulary of {teacher.vocab_size}, but {flavor} has {args.vocab_size}: both form "
            "logits over the same vocabulary; choose the flavor that fits the teacher"
        )
    if teacher.dim != args.dim:
        raise ValueError(
            f"teacher.path {folder} has hidden size {teacher.dim}, but {flavor} has {args.dim}: the student copies the "
            "teacher's embedding and head; choose the flavor that fits the teacher"
        )
    if job_config.training.seq_len > teacher.max_seq_len:
        raise ValueError(
            f"training.seq_len is {job_config.training.seq_len}, beyond the {teacher.max_seq_len} positions of the teacher "
            f"in {folder}: lower training.seq_len"
        )
    _check_same_tokenizer(job_config, folder, tokenizer)


def _check_same_tokenizer(job_config: JobConfig, folder: str, tokenizer: HuggingFaceTokenizer) -> None:
    """Equal sizes are not enough: the teacher must read the ids as the data's tokenizer wrote them."""
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path):
        raise ValueError(
            f"teacher.path {folder} has no tokenizer.json, so its tokenizer cannot be compared: add the file"
        )
    with open(path, encoding="utf-8") as file:
        theirs = json.load(file)
    ours = json.loads(tokenizer.tokenizer.to_str())
    # Whatever changes the ids of a text; truncation, padding and decoding do not.
    for part in ("normalizer", "pre_tokenizer", "model", "added_tokens"):
        if _canonical(theirs.get(part)) != _canonical(ours.get(part)):
            raise ValueError(
                f"teacher.path {folder} has another tokenizer than model.hf_assets_path {tokenizer.tokenizer_path} "
                f"(tokenizer.json differs in its {part}): the teacher would read other words; point model.hf_assets_path "
                "at the teacher's folder"
            )


def _canonical(part: Any) -> Any:
    """Merges are written as "a b" or as ["a", "b"], depending on the version of ``tokenizers``."""
    if isinstance(part, dict) and "merges" in part:
        merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in part["merges"]]
        return {**part, "merges": merges}
    return part
