"""Footprints: what tensors without data say about memory and FLOPs, against real runs and formulas."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from blockgrow_titan.growth.schedule import schedule_of
from blockgrow_titan.infra.footprint import (
    TensorBytes,
    fake_world,
    student_flops,
    student_footprint,
    teacher_flops,
    teacher_footprint,
)
from blockgrow_titan.infra.parallelize import data_parallel_dims
from blockgrow_titan.model.args import FLAVORS, BlockStackArgs
from blockgrow_titan.parse import parse_config
from blockgrow_titan.paths import resolve
from blockgrow_titan.teacher.files import open_teacher
from blockgrow_titan.teacher.model import build_teacher
from tests.unit_tests.jobs import open_trainer
from tests.unit_tests.models import DIMS, small_args
from tests.unit_tests.rank_pool import RankPool

CONFIGS = Path(__file__).parents[2] / "train_configs"
SEQ_LEN = 48


def job(config: str = "grow_post.toml", *overrides: str) -> list[str]:
    """A shipped job whose documents nearly all fill the length."""
    lengths = ("--training.seq_len", str(SEQ_LEN), "--validation.seq_len", str(SEQ_LEN))
    return ["--job.config_file", str(CONFIGS / config), *lengths, "--teacher.ranks", "0", *overrides]


def measured_peak(rank: int, world_size: int, store: dist.Store, args: list[str]) -> int:
    """Most bytes of tensors that are alive in a real job's steps of its first phase, but for the first step."""
    with TensorBytes() as memory:
        trainer = open_trainer(rank, world_size, store, args)
        batches = trainer.batch_generator(trainer.dataloader)
        trainer.step = 1
        trainer.metrics_processor.start(trainer.schedule, trainer.phase, 0)
        trainer.train_step(batches)
        memory.reset_peak()
        for trainer.step in (2, 3):
            trainer.train_step(batches)
        trainer.close()
        trainer.world.close()
        return memory.peak


def planned_peak(rank: int, world_size: int, store: dist.Store, args: list[str], size: int) -> int:
    """The same from tensors without data; the colocated teacher's weights are there throughout."""
    job_config = parse_config(args)
    model_args = FLAVORS[job_config.model.flavor]
    model_args.update_from_config(job_config)
    teacher = open_teacher(resolve(job_config.teacher.path)).args
    with fake_world(0, size):
        first = model_args.for_phase(schedule_of(job_config).phases[0], job_config)
        student = student_footprint(job_config, first, data_parallel_dims(job_config, size), device_type="cpu")
        return student.peak + teacher_footprint(job_config, teacher, size).weights


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ()),
        (1, ("--activation_checkpoint.mode", "full")),
        (2, ("--training.local_batch_size", "8", "--distill.chunk_tokens", "64")),
        (1, ("--growth.active_blocks", "3", "3", "3", "--training.local_batch_size", "8")),
        (1, ("--documents.micro_batching", "count")),
    ],
)
def test_memory_is_that_of_a_real_run(
    rank_pool: RankPool, tmp_path: Path, ranks: int, overrides: tuple[str, ...]
) -> None:
    args = job("grow_post.toml", "--job.dump_folder", str(tmp_path), *overrides)
    real = rank_pool.run(measured_peak, ranks, args=args)
    planned = rank_pool.run(planned_peak, 1, args=args, size=ranks)[0]
    assert max(real) == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize("kind", ["packed", "balanced"])
def test_teacher_memory_is_that_of_a_real_forward(rank_pool: RankPool, kind: str) -> None:
    args = job("grow_post.toml", "--documents.micro_batching", kind)
    job_config = parse_config(args)
    files = open_teacher(resolve(job_config.teacher.path))
    rows = job_config.validation.local_batch_size  # the larger of the two
    with TensorBytes() as memory:
        teacher = build_teacher(
            files, dtype=torch.float32, device=torch.device("cpu"), max_seq_len=SEQ_LEN, packed=kind == "packed"
        )
        weights = memory.live
        memory.reset_peak()
        teacher.hidden_states(torch.zeros(rows * SEQ_LEN, dtype=torch.int64), torch.full((rows,), SEQ_LEN))
        peak = memory.peak
    planned = rank_pool.run(_planned_teacher, 1, args=args)[0]
    assert planned[0] == pytest.approx(weights, rel=0.01)
    assert planned[1] == pytest.approx(peak, rel=0.1)


def _planned_teacher(rank: int, world_size: int, store: dist.Store, args: list[str]) -> tuple[int, int]:
    job_config = parse_config(args)
    with fake_world(0, 1):
        footprint = teacher_footprint(job_config, open_teacher(resolve(job_config.teacher.path)).args, 1)
    return footprint.weights, footprint.peak


def test_tensor_bytes_follows_storages() -> None:
    with TensorBytes() as memory:
        a = torch.empty(1000, dtype=torch.float32)
        view = a[10:20]
        assert memory.live == 4000
        b = a + 1
        del a, b
        assert (memory.live, memory.peak) == (4000, 8000)  # the view keeps the first storage
        view.untyped_storage().resize_(400)
        assert memory.live == 400
        del view
        assert memory.live == 0
        meta = torch.empty(1000, device="meta")
        del meta
        memory.reset_peak()
        assert memory.peak == 0


def products(args: BlockStackArgs, tokens: int) -> tuple[int, int]:
    """Multiply-adds of one layer's and of one head's matrices for so many tokens."""
    width = args.head_dim * (2 * args.n_heads + 2 * args.n_kv_heads)
    return tokens * args.dim * (width + 3 * args.hidden_dim), tokens * args.dim * args.vocab_size


def attention(args: BlockStackArgs, documents: int, length: int) -> int:
    """Multiply-adds of one layer's two attention products."""
    return 2 * documents * length * length * args.n_heads * args.head_dim


@pytest.mark.parametrize("frozen", [0, 1])
def test_student_flops_are_those_of_the_formula(frozen: int) -> None:
    job_config: Any = parse_config(job())
    args = small_args("post", blocks=2, frozen_blocks=frozen, train_boundary=True)
    documents, length, valid = 3, 16, 40
    layer, _ = products(args, documents * length)
    _, head = products(args, valid)
    score = attention(args, documents, length)
    # forward; backward twice the forward, or nothing for a frozen block; three products for the student's head, one for
    # the teacher's
    passes = 3 * 2 - 2 * frozen
    expected = 2 * (passes * (layer + score) + (3 + 1) * head)
    found = student_flops(job_config, args, documents, length, valid_tokens=valid)
    # the boundary norm in front of the frozen block has a gradient, for which the frozen block's input gradient is formed
    extra = 2 * frozen * (layer + 2 * score)
    assert found == expected + extra
    forward = student_flops(job_config, args, documents, length, valid_tokens=valid, train=False)
    assert forward == 2 * (2 * (layer + score) + 2 * head)


def test_teacher_flops_are_those_of_the_formula() -> None:
    args = small_args(blocks=2)
    layer, _ = products(args, 2 * 16)
    assert teacher_flops(args, 2, 16) == 2 * 2 * (layer + attention(args, 2, 16))
    assert DIMS["vocab_size"] == args.vocab_size  # the head is not counted
