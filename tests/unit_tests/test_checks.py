"""Every mistake in a config is refused before anything is built, in words that name field, value and remedy."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchtitan.tools.utils import device_type

from blockgrow_titan import stopping, unsupported
from blockgrow_titan.checks import check_config
from blockgrow_titan.growth.hooks import load_hooks
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import FLAVORS
from blockgrow_titan.parse import parse_config
from blockgrow_titan.teacher.files import AbsentFiles
from blockgrow_titan.train import ConfigError, launch, refuse
from tests.unit_tests.jobs import JOB_VOCAB, arguments, without_teacher
from tests.unit_tests.models import save_hf_teacher
from tests.unit_tests.rank_pool import RankPool


@pytest.fixture(scope="module")
def base(workspace: Path) -> JobConfig:
    """A config that passes; never change it."""
    job_config = parse_config(arguments(workspace, workspace / "never_made"))
    check_config(job_config)
    return job_config


def changed(base: JobConfig, **changes: Any) -> JobConfig:
    """A copy with other values, given as ``section__field``, as TOML would hand them through."""
    job_config = copy.deepcopy(base)
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        target: Any = job_config
        for part in section.split("__"):
            target = getattr(target, part)
        assert hasattr(target, field), name
        setattr(target, field, value)
    return job_config


def refusal(job_config: JobConfig, kind: type[Exception] = ValueError) -> str:
    """The one-line text with which a config is refused."""
    with pytest.raises(kind) as error:
        check_config(job_config)
    assert type(error.value) is kind, error.value
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_names(text: str, *words: str) -> None:
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"


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


# Teachers and tokenizers that do not fit.


def write_fake_teacher(folder: Path, workspace: Path, flavor: str, **config: int) -> Path:
    """A one-layer Qwen3 folder of a flavor's dimensions whose weights are a hole in a file: only headers are true."""
    args = FLAVORS[flavor]
    sizes = {
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.hidden_dim,
        "num_hidden_layers": 1,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "max_position_embeddings": 40960,
    } | config
    width, mlp = sizes["hidden_size"], sizes["intermediate_size"]
    heads, kv = sizes["num_attention_heads"] * args.head_dim, sizes["num_key_value_heads"] * args.head_dim
    shapes = {f"self_attn.{n}_proj": [rows, width] for n, rows in (("q", heads), ("k", kv), ("v", kv))}
    shapes |= {
        "self_attn.o_proj": [width, heads],
        "self_attn.q_norm": [args.head_dim],
        "self_attn.k_norm": [args.head_dim],
    }
    shapes |= {"mlp.gate_proj": [mlp, width], "mlp.up_proj": [mlp, width], "mlp.down_proj": [width, mlp]}
    shapes |= {"input_layernorm": [width], "post_attention_layernorm": [width]}
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    shapes |= {"model.embed_tokens.weight": [sizes["vocab_size"], width], "model.norm.weight": [width]}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    folder.mkdir()
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    other = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(sizes | other))
    shutil.copy(workspace / "tokenizer" / "tokenizer.json", folder)
    return folder


def test_vocabulary_of_another_size(base: JobConfig, workspace: Path, tmp_path: Path) -> None:
    folder = write_fake_teacher(tmp_path / "teacher", workspace, "0.6B", vocab_size=152064)
    text = refusal(changed(base, model__flavor="0.6B", teacher__path=str(folder)))
    assert_names(text, f"teacher.path {folder}", "152064", 'model.flavor "0.6B"', "151936", "choose the flavor")
    right = write_fake_teacher(tmp_path / "right", workspace, "0.6B")
    check_config(changed(base, model__flavor="0.6B", teacher__path=str(right)))


def test_hidden_size_of_another_flavor(base: JobConfig, workspace: Path, tmp_path: Path) -> None:
    folder = write_fake_teacher(tmp_path / "teacher", workspace, "1.7B")
    text = refusal(changed(base, model__flavor="0.6B", teacher__path=str(folder)))
    assert_names(text, "hidden size 2048", 'model.flavor "0.6B" has 1024', "choose the flavor")
    save_hf_teacher(tmp_path / "small", vocab_size=JOB_VOCAB, hidden_size=48)
    assert_names(refusal(changed(base, teacher__path=str(tmp_path / "small"))), "hidden size 48", '"toy" has 32')


def test_absent_teacher(base: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = refusal(changed(base, teacher__path="no/where"), AbsentFiles)
    assert_names(text, 'teacher.path = "no/where"', f"{tmp_path}/no/where")
    text = refusal(changed(base, teacher__path="package:blockgrow_titan/assets/none"), AbsentFiles)
    assert_names(
        text, 'teacher.path = "package:blockgrow_titan/assets/none"', os.path.join("blockgrow_titan", "assets", "none")
    )


def swapped_entries(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def other_merges(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["merges"].reverse()


def prefix_space(tokenizer: dict[str, Any]) -> None:
    tokenizer["pre_tokenizer"]["add_prefix_space"] = True


def renamed_token(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"][0]["content"] = "<|end|>"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (swapped_entries, "model"),
        (other_merges, "model"),
        (prefix_space, "pre_tokenizer"),
        (renamed_token, "added_tokens"),
        (lambda tokenizer: tokenizer.update(normalizer={"type": "NFC"}), "normalizer"),
    ],
)
def test_another_tokenizer_of_the_same_size(
    base: JobConfig, workspace: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], part: str
) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(workspace / "teacher", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_config(changed(base, teacher__path=str(folder)))  # truncation changes no id
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = refusal(changed(base, teacher__path=str(folder)))
    assert_names(text, f"teacher.path {folder}", "model.hf_assets_path", f"differs in its {part}")
    os.remove(folder / "tokenizer.json")
    assert_names(refusal(changed(base, teacher__path=str(folder))), f"teacher.path {folder} has no tokenizer.json")


def test_data_tokenizer(base: JobConfig, tmp_path: Path) -> None:
    assert_names(refusal(changed(base, model__hf_assets_path=str(tmp_path))), str(tmp_path), "no tokenizer.json")
    text = refusal(changed(base, model__hf_assets_path=str(tmp_path / "none")))
    assert_names(text, "model.hf_assets_path", str(tmp_path / "none"), "hf download")
    text = refusal(changed(base, model__hf_assets_path="package:blockgrow_titan/assets/tokenizer"))
    assert_names(text, "tokenizer of 4096 entries", "ids up to 4095", "320", 'model.flavor "toy"', "choose the flavor")


def test_ids_beyond_the_vocabulary(base: JobConfig, workspace: Path, tmp_path: Path) -> None:
    """A tokenizer of few entries may still have large ids."""
    folder = Path(shutil.copytree(workspace / "tokenizer", tmp_path / "tokenizer"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = 320
    (folder / "tokenizer.json").write_text(json.dumps(content))
    text = refusal(changed(base, model__hf_assets_path=str(folder)))
    assert_names(
        text, f"model.hf_assets_path {folder}", "ids up to 320, beyond the vocabulary of 320", "choose the flavor"
    )


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{", "Exception: "),
        ("tokenizer.json", "", "Exception: "),
        ("tokenizer.json", '{"model": 3}', "Exception: "),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds no JSON object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": 3}', "AttributeError: "),
    ],
)
def test_damaged_tokenizers(
    base: JobConfig, workspace: Path, tmp_path: Path, file: str, content: str, words: str
) -> None:
    folder = Path(shutil.copytree(workspace / "tokenizer", tmp_path / "tokenizer"))
    (folder / file).write_text(content)
    text = refusal(changed(base, model__hf_assets_path=str(folder)))
    assert_names(text, f"model.hf_assets_path is {folder}, whose tokenizer cannot be read", words, "download")
