"""Any config is refused with a message that names a field of it, or passes the dry run and trains its two steps.

Hypothesis draws the configs: a few, always the same, or with ``BLOCKGROW_EXAMPLES=200`` so many, each time others.
"""

import copy
import itertools
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from blockgrow_titan.checks import check_config
from blockgrow_titan.events import METRICS_FILE, read_events
from blockgrow_titan.job_config import ConfigError
from blockgrow_titan.model.placement import PLACEMENTS
from blockgrow_titan.parse import parse_config
from blockgrow_titan.ranges import RANGES
from blockgrow_titan.train import launch
from tests.unit_tests import jobs  # noqa: F401  (the ranks must know the flavor "toy")
from tests.unit_tests.rank_pool import RankPool

EXAMPLES = int(os.environ.get("BLOCKGROW_EXAMPLES", "0"))
STEPS = 2
Overrides = dict[str, Any]
"""``{"section.field": value}``."""


def drawn(examples: int) -> Any:
    """Settings of a test, without a time limit for an example."""
    return settings(
        derandomize=not EXAMPLES,
        database=None,
        max_examples=EXAMPLES or examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


# Values that a field may have; in combination they may still be refused.
GOOD: dict[str, list[Any]] = {
    "block_stack.placement": list(PLACEMENTS),
    "block_stack.num_blocks": [1, 2, 3, 5],
    "block_stack.layers_per_block": [1, 2],
    "growth.freeze": ["none", "completed_blocks"],
    "growth.train_boundary": [True, False],
    "growth.optimizer_at_growth": ["reset", "keep"],
    "growth.lr_at_growth": ["restart", "continue"],
    "growth.data_at_growth": ["continue", "rewind"],
    "distill.kd_weight": [0, 0.7, 1, 1e30],
    "distill.ce_weight": [0.0, 0.3, 1],
    "distill.temperature": [1.0, 4, 0.01, 1e-30, 1e30],
    "distill.chunk_tokens": [1, 7, 1024, 2**62],
    "teacher.path": ["{folder}/teacher", "{folder}/tied_teacher", ""],
    "teacher.ranks": [0, 0, 0, 1, -1],
    "teacher.shard_degree": [1, 1, 2],
    "teacher.dtype": ["float32", "bfloat16"],
    "teacher.prefetch": [0, 2, 100],
    "documents.shard_documents": [-1, 1, 3, 40, 41],
    "documents.pad_to_multiple_of": [-1, 1, 2, 8, 12],
    "documents.on_bad_document": ["stop", "skip"],
    "documents.micro_batching": ["packed", "balanced", "count"],
    "documents.text_column": ["text", "text", "text", "body"],
    "documents.held_out_documents": [0, 4833],
    "training.seq_len": [2, 3, 24, 64, 65],
    "training.local_batch_size": [1, 3, 8, 1000],
    "training.global_batch_size": [-1, 1, 3, 8, 90],
    "training.max_norm": [1.0, 1e-30, float("inf")],
    "training.max_skipped_steps": [0, 10],
    "training.gc_freq": [1, 50],
    "training.dtype": ["float32", "bfloat16"],
    "training.mixed_precision_param": ["float32", "bfloat16"],
    "training.dataloader.num_workers": [0, 0, 1],
    "training.dataloader.prefetch_factor": [1, 3],
    "training.dataloader.persistent_workers": [True, False],
    "validation.enable": [True, False],
    "validation.seq_len": [2, 24, 64],
    "validation.local_batch_size": [1, 4, 1000],
    "validation.freq": [1, 100],
    "checkpoint.enable": [True, False],
    "checkpoint.interval": [1, 2, 500],
    "checkpoint.keep_latest_k": [0, 2],
    "checkpoint.async_mode": ["disabled", "async", "async", "async_with_pinned_mem"],
    "checkpoint.load_step": [-1, -1, 3],
    "checkpoint.last_save_model_only": [True, False],
    "checkpoint.last_save_in_hf": [True, False, False],
    "optimizer.name": ["Adam", "AdamW"],
    "optimizer.lr": [0, 1e-3, 1e30],
    "optimizer.beta1": [0, 0.9],
    "optimizer.beta2": [0.0, 0.999],
    "optimizer.eps": [0, 1e-8],
    "optimizer.weight_decay": [0, 0.1, 1e10],
    "optimizer.implementation": ["for-loop", "foreach", "fused"],
    "lr_scheduler.warmup_steps": [0, 1, 5],
    "lr_scheduler.total_steps": [1, 2, 9],
    "lr_scheduler.decay_ratio": [0, 0.5, 1],
    "lr_scheduler.decay_type": ["linear", "sqrt", "cosine"],
    "lr_scheduler.min_lr_factor": [0, 0.1, 1.0],
    "activation_checkpoint.mode": ["none", "full", "selective", "selective", "memory_budget"],
    "activation_checkpoint.selective_ac_option": ["op", "1", "2", "0"],
    "activation_checkpoint.preserve_rng_state": [True, False],
    "activation_checkpoint.determinism_check": ["default", "none"],
    "activation_checkpoint.early_stop": [True, False],
    "parallelism.fsdp_reshard_after_forward": ["default", "always", "never"],
    "parallelism.data_parallel_replicate_degree": [1, 1, 2],
    "parallelism.data_parallel_shard_degree": [-1, -1, 1],
    "metrics.log_freq": [1, 5],
    "metrics.enable_tensorboard": [True, False],
    "metrics.save_for_all_ranks": [True, False],
    "diagnostics.enable": [True, False],
    "diagnostics.tokens": [-1, 1, 30],
    "comm.trace_buf_size": [0, 10],
    "debug.seed": [0, 7, 2**62],
    "debug.deterministic": [True, False],
}
# Values that a field never has.
BAD: dict[str, list[Any]] = {name: [-2, float("nan"), [1], "x", 2**70] for name in RANGES} | {
    "block_stack.placement": ["middle", "", 1],
    "growth.phase_steps": [[0, 2], [-1, 3], [1.5, 0.5], "2", [[2]], [1, 2]],
    "growth.active_blocks": [[0], [9, 9], [2, 1], [True], 3],
    "growth.freeze": ["all", True],
    "growth.optimizer_at_growth": ["drop"],
    "growth.lr_at_growth": [""],
    "growth.data_at_growth": ["shuffle"],
    "growth.new_block_init": ["copy"],
    "growth.hooks": [["json"], ["json:dumps"], [":"], [""], "x:y", [3]],
    "growth.start_phase": [1, -1],
    "teacher.dtype": ["float16"],
    "teacher.path": ["no/such/folder", "package:", "package:.x/y", "package:json/nothing"],
    "documents.micro_batching": ["pack"],
    "documents.on_bad_document": ["ignore"],
    "documents.end_of_document": ["", "no such token"],
    "training.dataset": ["c4", ""],
    "training.dataset_path": ["no/such/file", "", "package:x"],
    "validation.dataset_path": ["no/such/file"],
    "validation.steps": [0, 5],
    "checkpoint.async_mode": ["sync"],
    "optimizer.name": ["SGD"],
    "optimizer.implementation": ["slow"],
    "lr_scheduler.decay_type": ["exponential"],
    "activation_checkpoint.mode": ["some"],
    "activation_checkpoint.selective_ac_option": ["two", "-1", "1.5"],
    "activation_checkpoint.determinism_check": ["all"],
    "compile.components": [["modle"]],
    "model.name": ["qwen3", "none"],
    "model.flavor": ["9B"],
    "model.converters": [["float9"]],
    "model.hf_assets_path": ["", "no/such/folder"],
    "experimental.custom_import": ["no_such_module", "."],
    "job.dump_folder": ["", "a\0b"],
    "parallelism.tensor_parallel_degree": [0, 2],
    "parallelism.context_parallel_load_balancer": [""],
}  # fmt: skip


@st.composite
def good_configs(draw: Any) -> Overrides:
    """Some fields, each with a value that it may have, and phases that fit ``training.steps`` unless blocks are too few."""
    names = draw(st.sets(st.sampled_from(sorted(GOOD)), max_size=25))
    overrides = {name: draw(st.sampled_from(GOOD[name])) for name in sorted(names)}
    if overrides.get("teacher.path") == "":
        overrides["distill.kd_weight"] = 0
    if "lr_scheduler.total_steps" in overrides:
        overrides["growth.lr_at_growth"] = "continue"
    steps, blocks = draw(st.sampled_from([([2], [1]), ([1, 1], [1, 2]), ([1, 1], [2, 2]), ([], []), ([1, 1], [])]))
    return overrides | {"growth.phase_steps": steps, "growth.active_blocks": blocks, "training.steps": STEPS}


@st.composite
def bad_configs(draw: Any) -> tuple[str, Overrides]:
    """A config with a value in it that its field never has, and that field's name."""
    name = draw(st.sampled_from(sorted(BAD)))
    overrides = draw(good_configs())
    return name, {"validation.enable": True} | overrides | {name: draw(st.sampled_from(BAD[name]))}


def write_config(workspace: Path, folder: Path, overrides: Overrides) -> Path:
    """The base config with these values in their fields; its own dump folder lies beside it."""
    values = tomllib.loads((workspace / "base.toml").read_text())
    for name, value in {"job.dump_folder": str(folder / "dump"), **overrides}.items():
        *sections, leaf = name.split(".")
        table = values
        for section in sections:
            table = table.setdefault(section, {})
        table[leaf] = value.replace("{folder}", str(workspace)) if isinstance(value, str) else value
    folder.mkdir()
    (folder / "config.toml").write_text("".join(_toml(values)))
    return folder / "config.toml"


def _toml(table: dict[str, Any], prefix: str = "") -> list[str]:
    """TOML of nested tables; its strings, lists and finite numbers are JSON's."""
    lines = [f"{name} = {_value(value)}\n" for name, value in table.items() if not isinstance(value, dict)]
    lines = [f"[{prefix.rstrip('.')}]\n", *lines] if prefix else lines
    for name, value in table.items():
        if isinstance(value, dict):
            lines += _toml(value, f"{prefix}{name}.")
    return lines


def _value(value: Any) -> str:
    return repr(value) if isinstance(value, float) else json.dumps(value)


folders = itertools.count()


@drawn(30)
@given(case=bad_configs())
def test_a_bad_value_is_refused_with_its_fields_name(
    case: tuple[str, Overrides], workspace: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name, overrides = case
    path = write_config(workspace, tmp_path_factory.getbasetemp() / f"bad-{next(folders)}", overrides)
    with pytest.raises((ValueError, NotImplementedError)) as error:
        check_config(parse_config(["--job.config_file", str(path)]))
    text = str(error.value)
    # Another field may be refused before it; that one was drawn too.
    assert "\n" not in text and any(drawn_name in text for drawn_name in overrides), text


def try_config(rank: int, world_size: int, store: dist.Store, path: str) -> str | int:
    """Run a config, dry and then in earnest; why it was refused or ended early, or how many steps it made."""
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(world_size)
    try:
        job_config = parse_config(["--job.config_file", path])
    except ValueError as error:
        return str(error)
    dry = copy.deepcopy(job_config)
    dry.comm.mode = "fake_backend"
    try:
        launch(dry, dist.HashStore(), rank, world_size)
        launch(job_config, store, rank, world_size)
    except ConfigError as error:
        return str(error)
    except RuntimeError as error:  # numbers that are not finite, where none are allowed
        if "training.max_skipped_steps allows" not in str(error):
            raise
        return str(error)
    events = read_events(f"{job_config.job.dump_folder}/{METRICS_FILE}")
    return sum(event["event"] in ("train", "skipped") for event in events)


PHASE = {"growth.phase_steps": [STEPS], "growth.active_blocks": [1], "training.steps": STEPS}


@drawn(12)
@example(overrides=PHASE | {"optimizer.beta1": 0}, world_size=1)  # torch wanted both betas to be floats
@example(overrides=PHASE | {"distill.kd_weight": 1e30}, world_size=1)  # a closing table without a trained step
@given(overrides=good_configs(), world_size=st.sampled_from([1, 1, 1, 2]))
def test_a_config_is_refused_or_trains(
    overrides: Overrides,
    world_size: int,
    rank_pool: RankPool,
    workspace: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = write_config(workspace, tmp_path_factory.getbasetemp() / f"good-{next(folders)}", overrides)
    outcomes = rank_pool.run(try_config, world_size, path=str(path))
    assert outcomes[0] == outcomes[-1]
    if isinstance(text := outcomes[0], str):
        assert any(name in text for name in [*overrides, "NGPU"]), text
    else:
        assert text == STEPS
