"""A run that is asked to stop saves its step and ends well; a step whose numbers are not finite changes nothing."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from blockgrow_titan.checkpoint import saved_steps
from blockgrow_titan.events import METRICS_FILE, read_events
from blockgrow_titan.metrics import SUMMARY_FILE
from blockgrow_titan.teacher.worlds import World
from blockgrow_titan.trainer import GrowthTrainer
from tests.unit_tests.jobs import arguments, full_parameters, losses, run_job, without_teacher
from tests.unit_tests.models import read_json
from tests.unit_tests.rank_pool import RankPool
from tests.unit_tests.resuming import assert_same_checkpoint, completed, undated


def stopped(rank: int, world_size: int, store: dist.Store, args: list[str], asked: int, at: int) -> None:
    """A pool function: a job in which global rank ``asked`` is asked to stop while step ``at`` is trained."""
    original, trained = World.stop_requested, GrowthTrainer.forward_backward_step
    now: list[int] = []

    def forward_backward_step(self: GrowthTrainer, **kwargs: Any) -> Any:
        now[:] = [self.step]
        return trained(self, **kwargs)

    World.stop_requested = lambda self: self.global_rank == asked and now == [at]  # type: ignore[method-assign]
    GrowthTrainer.forward_backward_step = forward_backward_step  # type: ignore[method-assign]
    try:
        completed(rank, world_size, store, args)
    finally:
        World.stop_requested = original  # type: ignore[method-assign]
        GrowthTrainer.forward_backward_step = trained  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("ranks", "overrides", "at"),
    [
        (3, {"teacher__ranks": 1, "teacher__prefetch": 3, "training__local_batch_size": 2}, 3),  # a phase's last step
        (2, {"checkpoint__async_mode": "async", "training__dataloader__num_workers": 1}, 5),
    ],
)
def test_a_stopped_run_saves_and_goes_on_as_if_nothing_had_been(
    workspace: Path, rank_pool: RankPool, tmp_path: Path, ranks: int, overrides: dict[str, Any], at: int
) -> None:
    args = {name: arguments(workspace, tmp_path / name, **overrides) for name in ("stopped", "undisturbed")}
    rank_pool.run(stopped, ranks, args=args["stopped"], asked=ranks - 1 - bool(overrides.get("teacher__ranks")), at=at)
    events = read_events(str(tmp_path / "stopped" / METRICS_FILE))
    assert [e["step"] for e in events if e["event"] == "train"] == list(range(1, at + 1))
    assert saved_steps(str(tmp_path / "stopped/checkpoint"))[-1] == at
    assert not (tmp_path / "stopped" / SUMMARY_FILE).exists()
    for name in args:
        rank_pool.run(completed, ranks, args=args[name])
    ours, theirs = (undated(read_events(str(tmp_path / name / METRICS_FILE))) for name in args)
    assert [e for e in ours if e["event"] != "checkpoint"] == [e for e in theirs if e["event"] != "checkpoint"]
    assert_same_checkpoint(tmp_path / "stopped", tmp_path / "undisturbed", 6)


def test_a_request_at_the_last_step_changes_nothing(workspace: Path, rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(stopped, 1, args=arguments(workspace, tmp_path), asked=0, at=6)
    assert len(read_json(tmp_path / SUMMARY_FILE)["phases"]) == 2


def poisoned(rank: int, world_size: int, store: dist.Store, args: list[str], bad: dict[int, str]) -> Any:
    """A pool function: at these steps the last student rank's loss, or one value of its gradient alone, is not finite.

    Returns the parameters after each step, and the error that ended the job, if any.
    """
    original, train_step = GrowthTrainer.forward_backward_step, GrowthTrainer.train_step
    parameters = {}

    def forward_backward_step(self: GrowthTrainer, **kwargs: Any) -> Any:
        here = bad.get(self.step) if self.world.role_rank == self.world.role_size - 1 else None
        if here == "loss":
            kwargs["global_valid_tokens"] = torch.tensor(math.nan)
        sums = original(self, **kwargs)
        if here == "gradient":
            gradient: Any = next(p.grad for p in self.model_parts[0].parameters() if p.grad is not None)
            gradient.to_local().view(-1)[-1] = math.inf
        return sums

    def whole_step(self: GrowthTrainer, data_iterator: Any) -> None:
        train_step(self, data_iterator)
        parameters[self.step] = full_parameters(self.model_parts[0])

    GrowthTrainer.forward_backward_step = forward_backward_step  # type: ignore[method-assign]
    GrowthTrainer.train_step = whole_step  # type: ignore[method-assign]
    error = ""
    try:
        run_job(rank, world_size, store, args)
    except RuntimeError as raised:
        error = str(raised)
    finally:
        GrowthTrainer.forward_backward_step = original  # type: ignore[method-assign]
        GrowthTrainer.train_step = train_step  # type: ignore[method-assign]
    return parameters, error


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_no_weight_on_any_rank(
    workspace: Path, rank_pool: RankPool, tmp_path: Path, ranks: int, where: str
) -> None:
    args = arguments(workspace, tmp_path, **without_teacher(training__local_batch_size=4, checkpoint__interval=1))
    results = rank_pool.run(poisoned, ranks, args=args, bad={2: where, 5: where})
    for parameters, error in results:
        assert not error
        for step in range(2, 7):
            same = {
                fqn: (value == parameters[step - 1][fqn]).all()
                for fqn, value in parameters[step].items()
                if fqn in parameters[step - 1]
            }
            assert all(same.values()) == (step in (2, 5)), (step, same)
    events = read_events(str(tmp_path / METRICS_FILE))
    skipped = [e for e in events if e["event"] == "skipped"]
    assert [(e["step"], e["documents"], e["skipped_in_a_row"]) for e in skipped] == [(2, [8, 16], 1), (5, [32, 40], 1)]
    assert [e["step"] for e in events if e["event"] == "train"] == [1, 3, 4, 6]
    assert saved_steps(str(tmp_path / "checkpoint")) == [1, 3, 4, 6]  # put off while steps are skipped
    assert [(row["steps"], row["skipped_steps"]) for row in read_json(tmp_path / SUMMARY_FILE)["phases"]] == [
        (3, 1)
    ] * 2
    learning_rates = {e["step"]: e["lr"] for e in events if e["event"] == "train"}
    assert learning_rates[3] < learning_rates[1] and learning_rates[4] > learning_rates[3]  # by step, not by update


def test_too_many_in_a_row_end_the_run_and_keep_the_last_good_checkpoint(
    workspace: Path, rank_pool: RankPool, tmp_path: Path
) -> None:
    overrides = without_teacher(training__max_skipped_steps=2, checkpoint__interval=1, training__local_batch_size=4)
    args = arguments(workspace, tmp_path, growth__phase_steps=[9, 3], training__steps=12, **overrides)
    results = rank_pool.run(poisoned, 2, args=args, bad=dict.fromkeys((3, 5, 6, 7, 8), "loss"))
    for _, error in results:
        assert "not been finite for 3 steps in a row" in error and "training.max_skipped_steps allows 2" in error
        assert "at step 7, documents 48 to 55" in error
    assert saved_steps(str(tmp_path / "checkpoint")) == [1, 2, 4]
    good = rank_pool.run(poisoned, 2, args=args, bad={})[0]
    events = read_events(str(tmp_path / METRICS_FILE))
    assert not good[1] and [e["step"] for e in events if e["event"] == "skipped"] == [3]
    assert len(losses(events)) == 11
