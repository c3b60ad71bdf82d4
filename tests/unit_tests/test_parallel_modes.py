"""Ways to run the same job: HSDP, bf16 mixed precision, and the dry run over fake ranks."""

import logging
from pathlib import Path

import pytest
import torch.distributed as dist

from blockgrow_titan.parse import parse_config
from blockgrow_titan.train import launch
from tests.unit_tests.jobs import arguments, losses, run_job, train_events, without_teacher
from tests.unit_tests.rank_pool import RankPool


def test_replicas_equal_shards_and_one_rank(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    """HSDP of two replicas (a mesh of 2 x 1) trains as FSDP over two ranks and as one rank do, across growth."""
    common = {"training__local_batch_size": 4, "checkpoint__enable": False, "validation__enable": False}
    runs = [
        rank_pool.run(run_job, ranks, args=arguments(workspace, tmp_path / str(i), **common, **mode))[0]
        for i, (ranks, mode) in enumerate(
            [
                (1, {}),
                (2, {}),
                (2, {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 1}),
            ]
        )
    ]
    for other in runs[1:]:
        for ours, theirs in zip(losses(runs[0]), losses(other), strict=True):
            assert theirs == pytest.approx(ours, rel=1e-5)


def test_mixed_precision_does_not_round_the_loss(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    """FSDP2 casts a module's inputs to bf16; the loss's scale, 1 / valid tokens, must not be among them."""
    args = arguments(
        workspace, tmp_path, **without_teacher(training__mixed_precision_param="bfloat16"), validation__enable=False
    )
    events = train_events(rank_pool.run(run_job, 1, args=args)[0])
    exact = rank_pool.run(
        run_job, 1, args=arguments(workspace, tmp_path / "fp32", **without_teacher(), validation__enable=False)
    )[0]
    for event, reference in zip(events, train_events(exact), strict=True):
        assert event["loss"] == pytest.approx(event["ce"], rel=1e-6)
        assert event["ce"] == pytest.approx(reference["ce"], rel=0.02)


def dry_run_lines(rank: int, world_size: int, store: dist.Store, args: list[str], pretended: int) -> list[str]:
    """What a dry run over ``pretended`` ranks says about its phases."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    from torchtitan.tools.logging import logger

    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        launch(parse_config(args), dist.HashStore(), 0, pretended)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines


def test_dry_run_sizes_every_phase(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    args = arguments(workspace, tmp_path / "dump", comm__mode="fake_backend", teacher__ranks=4)
    lines = rank_pool.run(dry_run_lines, 1, args=args, pretended=12)[0]
    assert any("12 ranks: 8 of the student's world, 4 of the teacher's" in line for line in lines)
    phases = [line for line in lines if line.startswith("phase ")]
    assert [line.split(":")[0] for line in phases] == ["phase 0", "phase 1"]
    # wq, wk, wv, wo; w1, w2, w3; two norms of the layer, two of queries and keys
    layer = 32 * (64 + 32 + 32 + 64) + 3 * 32 * 48 + 2 * 32 + 2 * 16
    rest = 2 * 320 * 32 + 32  # embedding, head and boundary norm
    assert f"{layer + rest:,} parameters, {layer + 320 * 32 + 32:,} trainable" in phases[0]
    assert f"{2 * layer + rest:,} parameters" in phases[1]
    assert not (tmp_path / "dump" / "metrics.jsonl").exists()
