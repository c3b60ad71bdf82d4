"""Ways to run the same job: HSDP, bf16 mixed precision."""

from pathlib import Path

import pytest

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
