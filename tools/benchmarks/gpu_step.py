"""Steps of a student with the dimensions of Qwen3-8B on one CUDA GPU: nine layers, 8,192 tokens, BF16.

The student is that of ``train_configs/qwen3_8b/grow_post.toml`` in its last phase, parallelised as in a run (full
activation checkpointing, FSDP2 on a mesh of one rank), with random weights. The teacher's hidden states and head are
random too: its forward belongs to other ranks. A step is forward, chunked loss, backward, clipping and optimizer.

Asked for by name only: ``python -m tools.benchmarks gpu_step``.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.utils import get_peak_flops

from blockgrow_titan.distill.head import LossTargets
from blockgrow_titan.growth.schedule import schedule_of
from blockgrow_titan.infra.footprint import student_flops, student_on_meta
from blockgrow_titan.infra.parallelize import data_parallel_dims
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import FLAVORS, BlockStackArgs
from blockgrow_titan.parse import parse_config
from tools.benchmarks.jobs import synchronize
from tools.benchmarks.ranks import ROOT
from tools.benchmarks.rows import REPEATS, Row

SUBJECT = "gpu_step"
CONFIG = ROOT / "train_configs" / "qwen3_8b" / "grow_post.toml"
WARMUP_STEPS = 2


@dataclass
class Measured:
    """What ``measure`` returns."""

    seconds: list[float]
    losses: list[float]
    """The loss of every step, the warm-up's too."""
    tokens: int
    """Of one step."""
    flops: int
    """Of one step, without recomputation, attention counted whole."""
    peak_bytes: int
    """Of the allocator; 0 on a CPU."""


@contextlib.contextmanager
def world_of_one(device_type: str) -> Iterator[None]:
    """A default process group of this process alone, of real collectives."""
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(config: JobConfig, device_type: str) -> tuple[BlockStackArgs, nn.Module, OptimizersContainer]:
    """The student of a config's last phase with its initial weights, and its optimizer."""
    args = FLAVORS[config.model.flavor]
    args.update_from_config(config)
    args = args.for_phase(schedule_of(config).phases[-1], config)
    dims = data_parallel_dims(config, 1)
    model, _, _ = student_on_meta(config, args, dims)
    model.to_empty(device=device_type)
    with torch.no_grad():
        model.init_weights()  # type: ignore[operator]
    return args, model.train(), get_train_spec(config.model.name).build_optimizers_fn([model], config.optimizer, dims)


def make_batch(config: JobConfig, args: BlockStackArgs, device_type: str) -> tuple[Tensor, LossTargets]:
    """One document of ``seq_len`` valid tokens, [1, S], with a teacher's hidden states and head, all random."""
    length = config.training.seq_len
    generator = torch.Generator(device_type).manual_seed(0)
    dtype = torch.bfloat16 if config.teacher.dtype == "bfloat16" else torch.float32
    tokens = torch.randint(args.vocab_size, (1, length + 1), generator=generator, device=device_type)
    hidden, head = (
        torch.randn(rows, args.dim, generator=generator, device=device_type, dtype=dtype)
        for rows in (length, args.vocab_size)
    )
    objective = get_train_spec(config.model.name).build_loss_fn(config)
    targets = LossTargets(tokens[:, 1:], objective, 1 / length, hidden, head.mul_(args.dim**-0.5))
    return tokens[:, :-1], targets


def measure(command_line: Sequence[str], device_type: str, repeats: int = REPEATS) -> Measured:
    """Take steps on one batch.

    Args:
        command_line: Of the job whose last phase's student is built.
        device_type: Where to.
        repeats: Steps that are timed, after the warm-up.
    """
    config = parse_config(command_line)
    with world_of_one(device_type):
        args, model, optimizers = build(config, device_type)
        tokens, targets = make_batch(config, args, device_type)
        flops = student_flops(config, args, *tokens.shape)
        seconds, losses = [], []
        for _ in range(WARMUP_STEPS + repeats):
            started = time.perf_counter()
            loss = model(tokens, targets).loss
            loss.backward()
            dist_utils.clip_grad_norm_(list(model.parameters()), config.training.max_norm, foreach=True)
            optimizers.step()
            optimizers.zero_grad()
            losses.append(loss.item())
            synchronize()
            seconds.append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() if device_type == "cuda" else 0
    return Measured(seconds[WARMUP_STEPS:], losses, tokens.numel(), flops, peak)


def run() -> Iterator[Row]:
    """Step time, MFU and peak memory.

    Raises:
        RuntimeError: Without CUDA.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("gpu_step measures a CUDA GPU, and this machine has none that torch can use")
    torch.cuda.reset_peak_memory_stats()
    measured = measure(["--job.config_file", str(CONFIG)], "cuda")
    name = torch.cuda.get_device_name()
    step = median(measured.seconds)
    note = "Qwen3-8B dimensions, 9 layers, 8,192 tokens, BF16, full activation checkpointing"
    yield Row(SUBJECT, "step", step, "s", note=note)
    yield Row(SUBJECT, "tokens per second", measured.tokens / step, "", note=note)
    mfu = 100 * measured.flops / step / get_peak_flops(name)
    yield Row(SUBJECT, "MFU", mfu, "%", note="recomputation not counted, attention counted whole")
    yield Row(SUBJECT, "peak memory", measured.peak_bytes / 2**30, "GiB", note=name)
