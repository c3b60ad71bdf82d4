"""Whole jobs at toy size, run inside the pool's ranks through the same code that the launcher runs.

``make_workspace`` writes what a job reads (tokenizer, documents, teachers, a base config); ``arguments`` makes a command
line for it; ``run_job`` is a function for ``rank_pool.run``. Results go back as plain Python and NumPy.
"""

import copy
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from blockgrow_titan.checks import check_config
from blockgrow_titan.events import METRICS_FILE, read_events
from blockgrow_titan.model.args import FLAVORS
from blockgrow_titan.model.init import named_parameters
from blockgrow_titan.parse import parse_config
from blockgrow_titan.teacher.worlds import STUDENT, WorldLayout, join_world
from blockgrow_titan.train import launch
from tests.unit_tests.models import small_args

JOB_VOCAB = 320
# The pool's ranks import this module too, so they know the flavor.
FLAVORS["toy"] = small_args(vocab_size=JOB_VOCAB)

WORDS = "the of and to a in was I she that it not he you her be had as for with his at is on but my have all so".split()

BASE_TOML = """
[job]
custom_config_module = "blockgrow_titan.job_config"
[experimental]
custom_import = "blockgrow_titan"
[model]
name = "qwen3_block_stack"
flavor = "toy"
hf_assets_path = "{folder}/tokenizer"
[block_stack]
placement = "post"
num_blocks = 3
[growth]
phase_steps = [3, 3]
active_blocks = [1, 2]
[distill]
chunk_tokens = 16
[teacher]
path = "{folder}/teacher"
ranks = 0
dtype = "float32"
timeout_seconds = 60
[training]
dataset = "jsonl"
dataset_path = "{folder}/train.jsonl"
seq_len = 24
local_batch_size = 8
global_batch_size = 8
steps = 6
max_norm = 1.0
mixed_precision_param = "float32"
[optimizer]
lr = 3e-3
weight_decay = 0.0
implementation = "foreach"
[lr_scheduler]
warmup_steps = 1
decay_type = "cosine"
min_lr_factor = 0.01
[validation]
enable = true
dataset = "jsonl"
dataset_path = "{folder}/validation.jsonl"
local_batch_size = 4
seq_len = 24
freq = 100
[checkpoint]
enable = true
interval = 2
keep_latest_k = 0
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
[comm]
trace_buf_size = 0
[debug]
seed = 7
"""


def _write_documents(path: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 30))) for _ in range(count)]
    texts[count // 2] = ""  # an empty document has no prediction
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def make_workspace(folder: Path) -> Path:
    """Tokenizer, 40 training and 7 validation documents, an untied and a tied teacher, base config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tests.unit_tests.models import save_hf_teacher

    folder.mkdir(parents=True, exist_ok=True)
    _write_documents(folder / "train.jsonl", 40, seed=1)
    _write_documents(folder / "validation.jsonl", 7, seed=2)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(folder / "tokenizer")
    for name, tied in (("teacher", False), ("tied_teacher", True)):
        save_hf_teacher(folder / name, vocab_size=JOB_VOCAB, tie_word_embeddings=tied)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(folder / "tokenizer" / file, folder / name / file)
    (folder / "base.toml").write_text(BASE_TOML.format(folder=folder))
    return folder


def arguments(workspace: Path, dump_folder: Path, **overrides: Any) -> list[str]:
    """The command line of a job; overrides are ``section__field=value``."""
    result = ["--job.config_file", str(workspace / "base.toml"), "--job.dump_folder", str(dump_folder)]
    for name, value in overrides.items():
        field = name.replace("__", ".")
        if isinstance(value, bool):
            section, _, leaf = field.rpartition(".")
            result.append(f"--{section}.{leaf}" if value else f"--{section}.no-{leaf}")
        else:
            result += [f"--{field}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return result


def without_teacher(**overrides: Any) -> dict[str, Any]:
    """Overrides of a job that trains from scratch."""
    return {"teacher__path": "", "distill__kd_weight": 0.0, "distill__ce_weight": 1.0} | overrides


def run_job(rank: int, world_size: int, store: dist.Store, args: list[str]) -> list[dict[str, Any]]:
    """A pool function: the whole job; returns the events of its ``metrics.jsonl``."""
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(world_size)
    job_config = parse_config(args)
    launch(copy.deepcopy(job_config), store, rank, world_size)
    return read_events(f"{job_config.job.dump_folder}/{METRICS_FILE}")


def train_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "train"]


def losses(events: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    """(step, loss, ce, kl, grad_norm, lr) of every step: what a resumed run must repeat bit for bit."""
    names = ("step", "loss", "ce", "kl", "grad_norm", "lr")
    return [tuple(event.get(name, 0.0) for name in names) for event in train_events(events)]


def validations(events: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    """(step, phase, ce, kl) of every validation."""
    return [(e["step"], e["phase"], e["ce"], e.get("kl", 0.0)) for e in events if e["event"] == "validation"]


def open_trainer(rank: int, world_size: int, store: dist.Store, args: list[str]) -> Any:
    """A ``GrowthTrainer`` for tests that look inside it; on a teacher's rank, serves until the end and returns None."""
    from blockgrow_titan.teacher.server import serve
    from blockgrow_titan.trainer import GrowthTrainer

    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(world_size)
    job_config = parse_config(args)
    check_config(job_config)
    layout = WorldLayout.plan(world_size, job_config.teacher.ranks, bool(job_config.teacher.path))
    world = join_world(job_config, layout, store, rank)
    if world.role != STUDENT:
        try:
            serve(job_config, world, torch.device("cpu"))
        finally:
            world.close()
        return None
    return GrowthTrainer(job_config, world)


def full(tensor: torch.Tensor) -> Any:
    """A (sharded) tensor as a whole NumPy array; all ranks must call."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy().copy()


def full_parameters(model: torch.nn.Module) -> dict[str, Any]:
    return {fqn: full(param) for fqn, param in named_parameters(model)}


def full_gradients(model: torch.nn.Module) -> dict[str, Any]:
    return {fqn: full(param.grad) for fqn, param in named_parameters(model) if param.grad is not None}
