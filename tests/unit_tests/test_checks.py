"""Every mistake in a config is refused before anything is built, in words that name field, value and remedy."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchtitan.tools.utils import device_type

from blockgrow_titan import stopping, unsupported
from blockgrow_titan.checks import check_config
from blockgrow_titan.growth.hooks import load_hooks
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.parse import parse_config
from blockgrow_titan.train import ConfigError, launch, refuse
from tests.unit_tests.jobs import arguments, without_teacher
from tests.unit_tests.rank_pool import RankPool
from tests.unit_tests.refusals import assert_names, base_config, changed, refusal


@pytest.fixture(scope="module")
def base(workspace: Path) -> JobConfig:
    return base_config(workspace)


PHASES = {"growth__phase_steps": [2, 2, 2], "growth__active_blocks": [1, 2, 3]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # phases
        ({"training__steps": 7}, ("growth.phase_steps [3, 3] sum to 6", "training.steps is 7", "training.steps = 6")),
        (PHASES | {"growth__active_blocks": [1, 3, 2]}, ("growth.active_blocks is [1, 3, 2]", "may never fall")),
        (PHASES | {"growth__active_blocks": [0, 1, 2]}, ("growth.active_blocks is [0, 1, 2]", "from 1 to", "= 3")),
        (PHASES | {"growth__active_blocks": [1, 2, 4]}, ("[1, 2, 4]", "block_stack.num_blocks = 3")),
        (PHASES | {"growth__active_blocks": [1, 2]}, ("growth.phase_steps has 3 entries", "active_blocks has 2 [1, 2]")),
        ({"growth__phase_steps": [6]}, ("growth.phase_steps has 1 entries [6]", "growth.active_blocks has 2 [1, 2]")),
        ({"growth__phase_steps": [6, 0]}, ("growth.phase_steps is [6, 0]", "at least 1 step")),
        ({"growth__active_blocks": [2, 2], "growth__freeze": "completed_blocks"}, ("no trainable block in phase 1",)),
        ({"growth__start_phase": 1}, ("growth.start_phase is not a setting", "remove it")),
        ({"lr_scheduler__total_steps": 6}, ("lr_scheduler.total_steps is 6", '"restart"', 'lr_at_growth = "continue"')),
        # names with a list
        ({"block_stack__placement": "diagonal"}, ('block_stack.placement is "diagonal"', "pre", "post")),
        ({"model__flavor": "9B"}, ('model.flavor is "9B"', "tiny", "0.6B", "1.7B", "4B", "8B", "14B", "32B")),
        ({"growth__freeze": "all"}, ('growth.freeze is "all"', "none, completed_blocks")),
        ({"growth__optimizer_at_growth": "drop"}, ('growth.optimizer_at_growth is "drop"', "reset, keep")),
        ({"growth__lr_at_growth": "x"}, ('growth.lr_at_growth is "x"', "restart, continue")),
        ({"growth__data_at_growth": "x"}, ('growth.data_at_growth is "x"', "continue, rewind")),
        ({"growth__new_block_init": "copy"}, ('growth.new_block_init is "copy"', "one of random")),
        ({"teacher__dtype": "fp32"}, ('teacher.dtype is "fp32"', "bfloat16, float32")),
        ({"documents__on_bad_document": "ignore"}, ('documents.on_bad_document is "ignore"', "stop, skip")),
        ({"training__dataset": "csv"}, ('training.dataset is "csv"', "jsonl", "parquet", "datasets")),
        ({"validation__dataset": "csv"}, ('validation.dataset is "csv"', "jsonl", "parquet", "datasets")),
        # ranges
        ({"block_stack__num_blocks": 0}, ("block_stack.num_blocks is 0", "at least 1")),
        ({"block_stack__layers_per_block": 0}, ("block_stack.layers_per_block is 0", "at least 1")),
        ({"training__steps": 0}, ("training.steps is 0", "at least 1")),
        ({"training__seq_len": 1}, ("training.seq_len is 1", "at least 2")),
        ({"training__local_batch_size": 0}, ("training.local_batch_size is 0", "at least 1")),
        ({"training__global_batch_size": 0}, ("training.global_batch_size is 0", "at least 1")),
        ({"distill__kd_weight": -0.1}, ("distill.kd_weight is -0.1", "at least 0")),
        ({"distill__ce_weight": -1}, ("distill.ce_weight is -1", "at least 0")),
        ({"distill__temperature": 0}, ("distill.temperature is 0", "above 0")),
        ({"distill__chunk_tokens": 0}, ("distill.chunk_tokens is 0", "at least 1")),
        ({"distill__kd_weight": 0, "distill__ce_weight": 0}, ("kd_weight and distill.ce_weight are both 0",)),
        ({"teacher__ranks": -2}, ("teacher.ranks is -2", "at least -1")),
        ({"teacher__shard_degree": 0}, ("teacher.shard_degree is 0", "at least 1")),
        ({"teacher__prefetch": -1}, ("teacher.prefetch is -1", "at least 0")),
        ({"teacher__timeout_seconds": 0}, ("teacher.timeout_seconds is 0", "at least 1")),
        ({"documents__shard_documents": 0}, ("documents.shard_documents", "is 0", "at least 1", "-1 for all")),
        ({"documents__shard_documents": -2}, ("documents.shard_documents", "is -2", "at least 1", "-1 for all")),
        ({"documents__pad_to_multiple_of": 0}, ("documents.pad_to_multiple_of is 0", "at least 1, or -1 to choose")),
        ({"documents__micro_batching": "pack"}, ('documents.micro_batching is "pack"', "packed, balanced, count")),
        ({"documents__pad_to_multiple_of": 7}, ("documents.pad_to_multiple_of is 7", "training.seq_len = 24", "divisor")),
        (
            {"checkpoint__last_save_in_hf": True, "block_stack__placement": "pre"},
            ("checkpoint.last_save_in_hf is true", "checkpoint.last_save_model_only = true"),
        ),
        ({"metrics__log_freq": 0}, ("metrics.log_freq is 0", "at least 1")),
        ({"checkpoint__interval": 0}, ("checkpoint.interval is 0", "at least 1")),
        ({"checkpoint__keep_latest_k": -1}, ("checkpoint.keep_latest_k is -1", "at least 2", "or 0 for all")),
        ({"checkpoint__keep_latest_k": 1}, ("checkpoint.keep_latest_k is 1", "at least 2", "0 for all")),
        ({"training__local_batch_size": 2**30, "training__seq_len": 64}, ("training.local_batch_size 1073741824 times training.seq_len 64", "at most")),
        ({"block_stack__num_blocks": 10**9}, ("block_stack.num_blocks 1000000000", "1,000,000,000 layers", "10,000 at most")),
        ({"optimizer__beta1": 1.0}, ("optimizer.beta1 is 1.0", "at least 0 and below 1")),
        ({"lr_scheduler__decay_ratio": 1.5}, ("lr_scheduler.decay_ratio is 1.5", "from 0 to 1")),
        ({"lr_scheduler__total_steps": 5, "growth__lr_at_growth": "continue"}, ("lr_scheduler.total_steps is 5", "at least training.steps")),
        ({"training__max_norm": float("nan")}, ("training.max_norm is nan", "finite")),
        ({"training__max_norm": 0}, ("training.max_norm is 0", "above 0")),
        ({"teacher__timeout_seconds": 10**9}, ("teacher.timeout_seconds is 1000000000", "at most 2,000,000")),
        ({"job__dump_folder": ""}, ("job.dump_folder is empty",)),
        # torchtitan's own parts, which would fail later or ignore it
        ({"activation_checkpoint__mode": "memory_budget"}, ('activation_checkpoint.mode is "memory_budget"', "compile.enable = true")),
        ({"activation_checkpoint__selective_ac_option": "two"}, ('activation_checkpoint.selective_ac_option is "two"', '"op"')),
        ({"activation_checkpoint__determinism_check": "all"}, ('determinism_check is "all"', "default, none")),
        ({"compile__components": ["modle"]}, ('compile.components has "modle"', "model, loss")),
        ({"compile__enable": True, "compile__backend": "indcutor"}, ('compile.backend is "indcutor"', "inductor")),
        ({"model__converters": ["float9"]}, ('model.converters has "float9"', "must be one of")),
        ({"model__tokenizer_path": "x"}, ('model.tokenizer_path is "x"', "set model.hf_assets_path")),
        ({"experimental__custom_args_module": "x"}, ("experimental.custom_args_module", "job.custom_config_module")),
        # validation
        ({"validation__steps": 5}, ("validation.steps is 5", "must be -1", "every document")),
        ({"validation__freq": 0}, ("validation.freq is 0", "at least 1")),
        ({"validation__local_batch_size": 0}, ("validation.local_batch_size is 0", "at least 1")),
        ({"validation__seq_len": 25}, ("validation.seq_len is 25", "from 2 to training.seq_len = 24")),
        # teacher and tokenizer
        ({"teacher__path": ""}, ("distill.kd_weight is 0.7", "teacher.path", "distill.kd_weight = 0")),
        ({"training__seq_len": 65}, ("training.seq_len is 65", "64 positions", "lower training.seq_len")),
        ({"documents__end_of_document": "</s>"}, ('documents.end_of_document is "</s>"', "the tokenizer in")),
        ({"model__hf_assets_path": ""}, ("model.hf_assets_path is empty",)),
        # not of the annotated type
        ({"growth__phase_steps": ["3", 3]}, ("growth.phase_steps is ['3', 3]", "list[int]")),
        ({"growth__phase_steps": [1.5, 4.5]}, ("growth.phase_steps is [1.5, 4.5]", "list[int]")),
        ({"growth__active_blocks": [True, 2]}, ("growth.active_blocks is [True, 2]", "list[int]")),
        ({"growth__active_blocks": 2}, ("growth.active_blocks is 2", "list[int]")),
        ({"training__steps": True}, ("training.steps is True", "bool", "must be int")),
        ({"training__steps": 6.0}, ("training.steps is 6.0", "float", "must be int")),
        ({"checkpoint__enable": 1}, ("checkpoint.enable is 1", "must be bool")),
        ({"distill__kd_weight": "0.7"}, ("distill.kd_weight is '0.7'", "must be float")),
        ({"distill__kd_weight": True}, ("distill.kd_weight is True", "must be float")),
        ({"debug__seed": "7"}, ("debug.seed is '7'", "int | None")),
        ({"training__dataloader__num_workers": "2"}, ("training.dataloader.num_workers is '2'", "must be int")),
        ({"lr_scheduler__decay_type": "cos"}, ("lr_scheduler.decay_type is 'cos'", "linear", "sqrt", "cosine")),
        ({"activation_checkpoint__mode": "some"}, ("activation_checkpoint.mode is 'some'", "selective", "full", "none")),
        ({"optimizer__name": "Adamm"}, ("optimizer.name", "Adamm", "Adam", "AdamW")),
    ],
)  # fmt: skip
def test_bad_values(base: JobConfig, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    assert_names(refusal(changed(base, **changes)), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallelism__tensor_parallel_degree": 2}, ("parallelism.tensor_parallel_degree is 2", "only 1")),
        ({"parallelism__context_parallel_degree": 4}, ("parallelism.context_parallel_degree is 4", "only 1")),
        ({"parallelism__pipeline_parallel_degree": 2}, ("parallelism.pipeline_parallel_degree is 2", "only 1")),
        ({"parallelism__expert_parallel_degree": 2}, ("parallelism.expert_parallel_degree is 2", "only 1")),
        ({"parallelism__tensor_parallel_degree": 0}, ("parallelism.tensor_parallel_degree is 0", "only 1")),
        ({"fault_tolerance__enable": True}, ("fault_tolerance.enable is true", "set it to false")),
        ({"memory_estimation__enable": True}, ("memory_estimation.enable is true", "set it to false")),
        ({"optimizer__early_step_in_backward": True}, ("optimizer.early_step_in_backward is true", "to false")),
        ({"checkpoint__create_seed_checkpoint": True}, ("checkpoint.create_seed_checkpoint is true", "to false")),
        (
            {"checkpoint__initial_load_path": "x", "checkpoint__initial_load_model_only": False},
            ("initial_load_model_only is false",),
        ),
        ({"checkpoint__last_save_in_hf": True}, ("checkpoint.last_save_in_hf is true", '"post"', "set it to false")),
        ({"comm__mode": "local_tensor"}, ('comm.mode is "local_tensor"', "COMM_MODE")),
    ],
)
def test_unsupported_combinations(base: JobConfig, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    assert_names(refusal(changed(base, **changes), NotImplementedError), *words)


def test_fp32_packed_rows_are_not_compiled_on_cuda(base: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "device_type", "cuda")
    job_config = changed(base, compile__enable=True, training__mixed_precision_param="float32")
    assert_names(refusal(job_config, NotImplementedError), 'micro_batching is "packed"', "bfloat16", "balanced")
    job_config.documents.micro_batching = "balanced"
    check_config(job_config)


@pytest.mark.skipif(device_type != "cpu", reason="an accelerator can do these")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training__enable_cpu_offload": True}, ("training.enable_cpu_offload is true", "set it to false on a CPU")),
        ({"profiling__enable_profiling": True}, ("profiling.enable_profiling is true", "accelerator")),
        ({"profiling__enable_memory_snapshot": True}, ("profiling.enable_memory_snapshot is true", "accelerator")),
        ({"checkpoint__async_mode": "async_with_pinned_mem"}, ("checkpoint.async_mode", '"async" on a CPU')),
    ],
)
def test_what_needs_an_accelerator(base: JobConfig, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    assert_names(refusal(changed(base, **changes), NotImplementedError), *words)


def test_what_is_allowed(base: JobConfig) -> None:
    """The neighbours of what is refused."""
    for changes in (
        {"growth__active_blocks": [1, 1]},
        {"growth__phase_steps": [6], "growth__active_blocks": [1]},
        {"growth__phase_steps": [], "growth__active_blocks": []},
        {"growth__lr_at_growth": "continue", "lr_scheduler__total_steps": 6},
        {"training__seq_len": 64},
        {"checkpoint__keep_latest_k": 2},
        {
            "checkpoint__last_save_in_hf": True,
            "checkpoint__last_save_model_only": True,
            "block_stack__placement": "pre",
        },
        {"distill__kd_weight": 1, "distill__ce_weight": 0},
        {"validation__enable": False, "validation__steps": 5},
        {"documents__pad_to_multiple_of": 8},
        {"training__max_norm": float("inf")},
        without_teacher(),
    ):
        check_config(changed(base, **changes))


class Stubborn:
    def __init__(self) -> None:
        raise RuntimeError("not today")


class HalfHook:
    """Lacks ``after_phase``."""

    def before_phase(self, trainer: Any, old: Any, new: Any) -> None: ...


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("no_such_module:Hook", ('must be "module:Class"', "no_such_module")),
        ("tests.unit_tests.test_checks:Stubborn", ('must be "module:Class"', "RuntimeError: not today")),
        ("tests.unit_tests.test_checks:Absent", ('must be "module:Class"', "Absent")),
        ("tests.unit_tests.test_checks.HalfHook", ('must be "module:Class"',)),
        ("tests.unit_tests.test_checks:HalfHook", ("lacks before_phase or after_phase", "PhaseHook")),
    ],
)
def test_bad_hooks(entry: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        load_hooks((), [entry])
    assert_names(str(error.value), f'growth.hooks has "{entry}"', *words)


# Ranks against the world size: `launch` refuses before it makes anything.


@pytest.mark.parametrize(
    ("world_size", "changes", "words"),
    [
        (1, {"teacher__ranks": -1}, ("teacher.ranks = -1", "NGPU = 1", "NGPU=2", "--teacher.ranks 0")),
        (2, {"teacher__ranks": 2}, ("teacher.ranks = 2", "2 rank(s)", "NGPU to at least 3", "at most 1")),
        (4, {"teacher__ranks": 2, "teacher__shard_degree": 4}, ("teacher.shard_degree = 4", "2 rank(s)")),
        (2, {"growth__active_blocks": [2, 1]}, ("growth.active_blocks is [2, 1]", "may never fall")),
        (2, {"parallelism__tensor_parallel_degree": 2}, ("parallelism.tensor_parallel_degree is 2",)),
    ],
)
def test_launch_refuses(base: JobConfig, world_size: int, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        launch(changed(base, **changes), dist.HashStore(), world_size - 1, world_size)
    assert_names(str(error.value), *words)
    assert not os.path.exists(base.job.dump_folder) and not dist.is_initialized()


def refused_launch(rank: int, world_size: int, store: dist.Store, args: list[str]) -> tuple[str, bool]:
    """What a rank says to a bad config, and whether it has made a process group."""
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(world_size)
    with pytest.raises(ConfigError) as error:
        launch(parse_config(args), store, rank, world_size)
    return str(error.value), dist.is_initialized()


def test_every_rank_refuses_and_nothing_is_built(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    args = arguments(workspace, tmp_path / "dump", teacher__ranks=1, block_stack__num_blocks=1)
    answers = rank_pool.run(refused_launch, 2, args=args)
    assert answers[0] == answers[1]
    text, initialized = answers[0]
    assert_names(text, "growth.active_blocks is [1, 2]", "block_stack.num_blocks = 1")
    assert not initialized and not (tmp_path / "dump").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_line_on_the_console(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, rank: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv(stopping.LAUNCH_FOLDER, str(tmp_path))
    with pytest.raises(SystemExit) as end:
        refuse(ConfigError("training.steps is 0;\n it must be at least 1"))
    line = "Config error: training.steps is 0; it must be at least 1\n" if rank == "0" else ""
    assert end.value.code == 2 and capsys.readouterr().err == line
    written = "Config error: training.steps is 0; it must be at least 1\n"
    assert (tmp_path / "config_error").read_text() == written  # the launcher prints it, whichever rank met it
    monkeypatch.delenv(stopping.LAUNCH_FOLDER)  # a dry run that shows another rank has no launcher
    with pytest.raises(SystemExit):
        refuse(ConfigError("training.steps is 0"))
    assert capsys.readouterr().err == "Config error: training.steps is 0\n"
