"""Invariants 5 and 9: what a growth step carries, resets, freezes and lets go."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from blockgrow_titan.growth.hooks import PhaseHook, load_hooks
from blockgrow_titan.infra.footprint import TensorBytes
from blockgrow_titan.model.init import full_init, named_parameters
from tests.unit_tests.jobs import arguments, full, full_parameters, open_trainer, run_job, validations
from tests.unit_tests.rank_pool import RankError, RankPool

SEED = 7


class RecordingHook(PhaseHook):
    """A user's hook: notes what it sees."""

    seen: list[tuple[str, int, int, int]] = []

    def before_phase(self, trainer: Any, old: Any, new: Any) -> None:
        self.seen.append(("before", old.index, new.index, len(trainer.model_parts[0].layers)))

    def after_phase(self, trainer: Any, old: Any, new: Any) -> None:
        self.seen.append(("after", old.index, new.index, len(trainer.model_parts[0].layers)))


class FailingHook(PhaseHook):
    def after_phase(self, trainer: Any, old: Any, new: Any) -> None:
        raise RuntimeError("no room for another block")


def moments(trainer: Any) -> dict[str, Any]:
    """First moments by FQN, whole."""
    (optimizer,) = trainer.optimizers.optimizers
    return {
        fqn: full(optimizer.state[param]["exp_avg"])
        for fqn, param in named_parameters(trainer.model_parts[0])
        if param in optimizer.state
    }


def addresses(trainer: Any) -> dict[str, int]:
    """Where this rank's shards are, by FQN."""
    return {fqn: param.to_local().data_ptr() for fqn, param in named_parameters(trainer.model_parts[0])}


def learning_rate(trainer: Any) -> float:
    return trainer.lr_schedulers.schedulers[0].get_last_lr()[0]


def grow_twice(rank: int, world_size: int, store: dist.Store, args: list[str], train: bool) -> list[dict[str, Any]]:
    """Enter phase 1 and phase 2, with two steps before each if ``train``; what was there before and after each."""
    trainer = open_trainer(rank, world_size, store, args)
    trainer.metrics_processor.start(trainer.schedule, trainer.phase, 0)
    data_iterator = trainer.batch_generator(trainer.dataloader)
    results = []
    for phase in trainer.schedule.phases[1:]:
        trainer.step = phase.first_step - 1
        for _ in range(2 if train else 0):
            trainer.train_step(data_iterator)
        old_model = weakref.ref(trainer.model_parts[0])
        old_optimizer = weakref.ref(trainer.optimizers)
        before = full_parameters(trainer.model_parts[0])
        moments_before = moments(trainer)
        addresses_before = addresses(trainer)
        trainer.step = phase.first_step
        trainer.grow(phase)
        model = trainer.model_parts[0]
        results.append(
            {
                "before": before,
                "after": full_parameters(model),
                "moments_before": moments_before,
                "moments_after": moments(trainer),
                "moved": [fqn for fqn, place in addresses_before.items() if addresses(trainer)[fqn] != place],
                "gradients": [fqn for fqn, param in named_parameters(model) if param.grad is not None],
                "collected": old_model() is None and old_optimizer() is None,
                "all_dtensors": all(isinstance(p, DTensor) for p in model.parameters()),
                "mesh_sizes": {p.device_mesh.size() for p in model.parameters()},
                "trainable": [fqn for fqn, p in named_parameters(model) if p.requires_grad],
                "lr": learning_rate(trainer),
                "checkpointed": sorted(trainer.checkpointer.states["model"].state_dict()),
                "flops": trainer.metrics_processor.num_flops_per_token,
            }
        )
        del model  # it is the next phase's old model
    trainer.teacher.close()
    trainer.close()
    return results


THREE_PHASES = {"growth__phase_steps": [3, 3, 3], "growth__active_blocks": [1, 2, 3], "training__steps": 9}


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_growth_step(rank_pool: RankPool, workspace: Path, tmp_path: Path, placement: str, world_size: int) -> None:
    args = arguments(
        workspace, tmp_path, **THREE_PHASES, block_stack__placement=placement, validation__enable=False,
        training__local_batch_size=4, lr_scheduler__warmup_steps=2,
    )  # fmt: skip
    ranks = rank_pool.run(grow_twice, world_size, args=args, train=True)
    for result in ranks:
        flops = []
        for phase, grown in enumerate(result, start=1):
            new_layer = f"layers.{phase}."
            for fqn, value in grown["after"].items():
                if fqn.startswith(new_layer):
                    expected = full_init(fqn, torch.Size(value.shape), SEED).numpy()
                else:
                    expected = grown["before"][fqn]
                assert np.array_equal(value, expected), fqn
            assert set(grown["after"]) - set(grown["before"]) == {f for f in grown["after"] if f.startswith(new_layer)}
            assert grown["moments_before"] and not grown["moments_after"]  # reset
            assert grown["lr"] == pytest.approx(3e-3 / 2)  # the first of two warmup steps
            assert grown["collected"]
            assert not grown["moved"] and not grown["gradients"]  # the old model's memory, without a copy
            assert grown["all_dtensors"] and grown["mesh_sizes"] == {world_size}
            assert grown["checkpointed"] == sorted(grown["after"])
            flops.append(grown["flops"])
        assert flops[0] < flops[1]
    for first, other in zip(ranks[0], ranks[-1], strict=True):
        assert all(np.array_equal(first["after"][fqn], other["after"][fqn]) for fqn in first["after"])


def test_back_to_back_growth_carries_bit_identically(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    args = arguments(workspace, tmp_path, **THREE_PHASES, validation__enable=False)
    first, second = rank_pool.run(grow_twice, 2, args=args, train=False)[0]
    for fqn, value in first["before"].items():
        assert np.array_equal(value, first["after"][fqn])
        assert np.array_equal(value, second["after"][fqn])


@pytest.mark.parametrize("world_size", [1, 2])
def test_kept_moments_survive(rank_pool: RankPool, workspace: Path, tmp_path: Path, world_size: int) -> None:
    args = arguments(
        workspace, tmp_path, **THREE_PHASES, validation__enable=False, growth__optimizer_at_growth="keep",
        growth__lr_at_growth="continue", lr_scheduler__warmup_steps=2, training__local_batch_size=4,
    )  # fmt: skip
    for grown in rank_pool.run(grow_twice, world_size, args=args, train=True)[0]:
        assert set(grown["moments_after"]) == set(grown["moments_before"])
        for fqn, value in grown["moments_before"].items():
            assert np.any(value != 0) and np.array_equal(value, grown["moments_after"][fqn]), fqn


def memory_of_growth(rank: int, world_size: int, store: dist.Store, args: list[str]) -> tuple[int, int, int]:
    """Bytes that a growth takes at most, and those of the new block's shards and of its largest matrix."""
    trainer = open_trainer(rank, world_size, store, args)
    trainer.metrics_processor.start(trainer.schedule, trainer.phase, 0)
    phase = trainer.schedule.phases[1]
    trainer.step = phase.first_step
    with TensorBytes() as memory:
        memory.add(*trainer.model_parts[0].parameters(), *trainer.model_parts[0].buffers())
        before = memory.live
        memory.reset_peak()
        trainer.grow(phase)
        taken = memory.peak - before
    block = [p for fqn, p in named_parameters(trainer.model_parts[0]) if fqn.startswith("layers.1.")]
    trainer.teacher.close()
    trainer.close()
    return taken, sum(p.to_local().nbytes for p in block), max(p.nbytes for p in block)


@pytest.mark.parametrize("world_size", [1, 2])
def test_growth_takes_memory_for_the_new_block_only(
    rank_pool: RankPool, workspace: Path, tmp_path: Path, world_size: int
) -> None:
    args = arguments(workspace, tmp_path, **THREE_PHASES, validation__enable=False, training__local_batch_size=4)
    for taken, block, matrix in rank_pool.run(memory_of_growth, world_size, args=args):
        rotary_table = 24 * 2 * 16 * 4  # [seq_len, 2 * head_dim], fp32
        assert block <= taken <= block + 2 * matrix + 2 * rotary_table  # matrices start whole, one by one, and are cut


def continued_rates(rank: int, world_size: int, store: dist.Store, args: list[str]) -> list[float]:
    return [event["lr"] for event in run_job(rank, world_size, store, args) if event["event"] == "train"]


def test_continued_learning_rate_equals_that_of_one_phase(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    common = {"validation__enable": False, "training__steps": 9, "checkpoint__enable": False}
    grown = arguments(
        workspace, tmp_path / "grown", **common, growth__phase_steps=[3, 3, 3], growth__active_blocks=[1, 2, 3],
        growth__lr_at_growth="continue",
    )  # fmt: skip
    joint = arguments(workspace, tmp_path / "joint", **common, growth__phase_steps=[9], growth__active_blocks=[3])
    assert rank_pool.run(continued_rates, 1, args=grown)[0] == rank_pool.run(continued_rates, 1, args=joint)[0]


def frozen_job(rank: int, world_size: int, store: dist.Store, args: list[str]) -> list[dict[str, Any]]:
    """Parameters at the start and at the end of each phase of a freezing job, with what was trainable."""
    trainer = open_trainer(rank, world_size, store, args)
    trainer.metrics_processor.start(trainer.schedule, trainer.phase, 0)
    data_iterator = trainer.batch_generator(trainer.dataloader)
    results = []
    for phase in trainer.schedule.phases:
        trainer.step = phase.first_step
        if phase.index:
            trainer.grow(phase)
        start = full_parameters(trainer.model_parts[0])
        for _ in range(phase.steps):
            trainer.train_step(data_iterator)
        (optimizer,) = trainer.optimizers.optimizers
        results.append(
            {
                "start": start,
                "end": full_parameters(trainer.model_parts[0]),
                "trainable": {f for f, p in named_parameters(trainer.model_parts[0]) if p.requires_grad},
                "optimized": {f for f, p in named_parameters(trainer.model_parts[0]) if p in optimizer.state},
                "manifest": set(trainer.manifest["phases"][phase.index]["trainable"]),
            }
        )
    trainer.teacher.close()
    trainer.close()
    return results


@pytest.mark.parametrize(("placement", "boundary"), [("pre", True), ("post", True), ("post", False)])
def test_frozen_parameters_stay_bit_identical(
    rank_pool: RankPool, workspace: Path, tmp_path: Path, placement: str, boundary: bool
) -> None:
    args = arguments(
        workspace, tmp_path, **THREE_PHASES, validation__enable=False, growth__freeze="completed_blocks",
        growth__train_boundary=boundary, block_stack__placement=placement, training__local_batch_size=4,
    )  # fmt: skip
    phases = rank_pool.run(frozen_job, 2, args=args)[0]
    for index, phase in enumerate(phases):
        boundary_names = {"output.weight", "norm.weight"} if boundary or index == 0 else set()
        expected = {f for f in phase["end"] if f.startswith(f"layers.{index}.")} | boundary_names
        assert phase["trainable"] == phase["optimized"] == phase["manifest"] == expected
        for fqn, value in phase["end"].items():
            assert np.array_equal(value, phase["start"][fqn]) == (fqn not in expected), fqn
    embedding = "tok_embeddings.weight"
    assert all(np.array_equal(phase["end"][embedding], phases[0]["start"][embedding]) for phase in phases)


def test_restarts_at_fixed_depth_keep_the_model_object(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    args = arguments(
        workspace, tmp_path, growth__phase_steps=[2, 2, 2], growth__active_blocks=[2, 2, 2], lr_scheduler__warmup_steps=2,
        growth__hooks="tests.unit_tests.test_growth:RecordingHook",
    )  # fmt: skip
    assert rank_pool.run(model_objects, 1, args=args)[0] == 1
    events = rank_pool.run(run_job, 1, args=args)[0]
    rates = [event["lr"] for event in events if event["event"] == "train"]
    assert rates == [1.5e-3, 3e-3] * 3  # the same warmup in each phase
    assert [v[:2] for v in validations(events)] == [(0, 0), (2, 0), (2, 1), (4, 1), (4, 2), (6, 2)]


def model_objects(rank: int, world_size: int, store: dist.Store, args: list[str]) -> int:
    """How many model objects a job without a change of depth has had."""
    trainer = open_trainer(rank, world_size, store, args)
    trainer.metrics_processor.start(trainer.schedule, trainer.phase, 0)
    objects = [trainer.model_parts[0]]
    for phase in trainer.schedule.phases[1:]:
        trainer.step = phase.first_step
        trainer.grow(phase)
        objects.append(trainer.model_parts[0])
    trainer.teacher.close()
    trainer.close()
    return len({id(model) for model in objects})


def run_with_hooks(rank: int, world_size: int, store: dist.Store, args: list[str]) -> list[Any]:
    RecordingHook.seen = []
    run_job(rank, world_size, store, args)
    return RecordingHook.seen


def test_user_hooks_run_after_the_specs_own(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    args = arguments(workspace, tmp_path, growth__hooks="tests.unit_tests.test_growth:RecordingHook")
    assert rank_pool.run(run_with_hooks, 1, args=args)[0] == [("before", 0, 1, 1), ("after", 0, 1, 2)]


def test_a_failing_hook_stops_the_job_with_its_name(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    args = arguments(workspace, tmp_path, growth__hooks="tests.unit_tests.test_growth:FailingHook")
    with pytest.raises(RankError, match="no room for another block") as failure:
        rank_pool.run(run_job, 1, args=args)
    assert "FailingHook.after_phase" in str(failure.value)


@pytest.mark.parametrize("entry", ["no_such_module:Hook", "tests.unit_tests.test_growth:Missing", "json:dumps", "json"])
def test_bad_hooks_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=f'growth.hooks has "{entry}"'):
        load_hooks((), [entry])
