"""What the numbers of a config may be, one line a field; fields that depend on each other are in ``checks.py``.

A user who adds a field to a section of this plugin adds its line here.
"""

import operator
from collections.abc import Callable
from typing import Any

from blockgrow_titan.job_config import JobConfig

Rule = tuple[str, Callable[[float], bool]]
"""What a number must be, in words and as a test."""

MAX_SECONDS = 2_000_000  # gloo waits in milliseconds, counted in 31 bits


def at_least(least: int, most: int | None = None) -> Rule:
    """A whole number from ``least`` up, or up to ``most``."""
    if most is None:
        return f"at least {least:,}", lambda value: value >= least
    return f"at least {least:,} and at most {most:,}", lambda value: least <= value <= most


def or_minus_one(rule: Rule, meaning: str) -> Rule:
    """What a rule allows, and -1, which means something else."""
    words, holds = rule
    return f"{words}, or -1 {meaning}", lambda value: value == -1 or holds(value)


ABOVE_0: Rule = ("above 0", lambda value: value > 0)
FRACTION: Rule = ("from 0 to 1", lambda value: 0 <= value <= 1)
BELOW_1: Rule = ("at least 0 and below 1", lambda value: 0 <= value < 1)

RANGES: dict[str, Rule] = {
    "block_stack.num_blocks": at_least(1),
    "block_stack.layers_per_block": at_least(1),
    "distill.kd_weight": at_least(0),
    "distill.ce_weight": at_least(0),
    "distill.temperature": ABOVE_0,
    "distill.chunk_tokens": at_least(1),
    "teacher.ranks": at_least(-1),
    "teacher.shard_degree": at_least(1),
    "teacher.prefetch": at_least(0),
    "teacher.timeout_seconds": at_least(1, MAX_SECONDS),
    "documents.shard_documents": or_minus_one(at_least(1), "for all"),
    "documents.held_out_documents": at_least(0),
    "documents.pad_to_multiple_of": or_minus_one(at_least(1), "to choose"),
    "diagnostics.tokens": or_minus_one(at_least(1), "for twice validation.seq_len"),
    "training.steps": at_least(1),
    "training.seq_len": at_least(2),
    "training.local_batch_size": at_least(1),
    "training.global_batch_size": or_minus_one(at_least(1, 2**24), "for one micro-batch a rank"),
    "training.max_norm": ABOVE_0,
    "training.max_skipped_steps": at_least(0),
    "training.gc_freq": at_least(1),
    "training.dataloader.num_workers": at_least(0, 1024),
    "training.dataloader.prefetch_factor": at_least(1),
    "validation.seq_len": at_least(2),
    "validation.local_batch_size": at_least(1),
    "validation.freq": at_least(1),
    "validation.dataloader.num_workers": at_least(0, 1024),
    "validation.dataloader.prefetch_factor": at_least(1),
    "optimizer.lr": at_least(0),
    "optimizer.beta1": BELOW_1,
    "optimizer.beta2": BELOW_1,
    "optimizer.eps": at_least(0),
    "optimizer.weight_decay": at_least(0),
    "lr_scheduler.warmup_steps": at_least(0),
    "lr_scheduler.total_steps": at_least(1),
    "lr_scheduler.decay_ratio": FRACTION,
    "lr_scheduler.min_lr_factor": FRACTION,
    "parallelism.data_parallel_replicate_degree": at_least(1),
    "parallelism.data_parallel_shard_degree": or_minus_one(at_least(1), "for whatever is left"),
    "checkpoint.interval": at_least(1),
    "checkpoint.keep_latest_k": ("at least 2 (one may be half-written), or 0 for all", lambda k: k == 0 or k >= 2),
    "checkpoint.load_step": or_minus_one(at_least(0), "for the newest"),
    "activation_checkpoint.memory_budget": FRACTION,
    "metrics.log_freq": at_least(1),
    "profiling.profile_freq": at_least(1),
    "profiling.profiler_active": at_least(1),
    "profiling.profiler_warmup": at_least(0),
    "comm.heartbeat_timeout_seconds": at_least(5, MAX_SECONDS),  # heartbeats come once a second
    "comm.init_timeout_seconds": at_least(1, MAX_SECONDS),
    "comm.train_timeout_seconds": at_least(1, MAX_SECONDS),
    "comm.trace_buf_size": at_least(0),
    "debug.seed": at_least(0, 2**62),
}


def check_ranges(job_config: JobConfig) -> None:
    """Refuse a number that is out of its field's range; a field of None is as good as absent.

    Raises:
        ValueError: Naming the field, its value and what it must be.
    """
    for name, (words, holds) in RANGES.items():
        value: Any = operator.attrgetter(name)(job_config)
        if value is not None and not holds(value):
            raise ValueError(f"{name} is {value}; it must be {words}")
