"""Whole training steps: one loss for one batch (invariant 3), padding (7), the objective on every path (10)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from blockgrow_titan.documents.dealing import MICRO_BATCHING
from blockgrow_titan.events import METRICS_FILE, read_events
from blockgrow_titan.model.init import named_parameters, write_full
from tests.unit_tests.jobs import arguments, losses, run_job, train_events, without_teacher
from tests.unit_tests.rank_pool import RankPool
from tests.unit_tests.steps import (
    COUNTS,
    PlainStep,
    assert_same_gradients,
    assert_step_is,
    opened,
    plain_step,
    run_steps,
    step_arguments,
    take_steps,
    write_teacher,
    write_texts,
)

BOTH = pytest.mark.parametrize("placement", ["pre", "post"])
# One student with the teacher on its rank; two students with a teacher of their own; two that hold one each.
EACH_LAYOUT = pytest.mark.parametrize(("world_size", "teacher_ranks"), [(1, 0), (3, 1), (2, 0)])
MAIN_LAYOUTS = pytest.mark.parametrize(("world_size", "teacher_ranks"), [(1, 0), (3, 1)])


class Bench:
    """One global batch of uneven documents, a teacher, and the pool to take steps on them."""

    def __init__(self, rank_pool: RankPool, workspace: Path, teacher: Path, folder: Path) -> None:
        self.rank_pool, self.workspace, self.teacher, self.folder = rank_pool, workspace, teacher, folder
        self.write(COUNTS)

    def write(self, counts: list[int]) -> None:
        """Make these the documents, by their numbers of words."""
        self.texts = write_texts(self.folder / "texts.jsonl", counts)

    def arguments(self, **overrides: Any) -> list[str]:
        own = {"teacher__path": self.teacher, "training__dataset_path": self.folder / "texts.jsonl"}
        return step_arguments(self.workspace, self.folder, **(own | overrides))

    def take(self, world_size: int, options: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
        """``take_steps`` as the first student rank sees it."""
        return self.run(take_steps, world_size, args=self.arguments(**overrides), **(options or {}))

    def run(self, fn: Callable[..., Any], world_size: int, **kwargs: Any) -> Any:
        """The result of a pool function on the first student rank."""
        return self.rank_pool.run(fn, world_size, timeout=300, **kwargs)[0]

    def plain(self, placement: str = "post", **changes: Any) -> PlainStep:
        """What the first step over all documents must give."""
        return plain_step(self.workspace, self.teacher, self.texts, placement, **changes)


@pytest.fixture(scope="module")
def teacher(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(workspace, tmp_path_factory.mktemp("teacher"))


@pytest.fixture
def bench(rank_pool: RankPool, workspace: Path, teacher: Path, tmp_path: Path) -> Bench:
    return Bench(rank_pool, workspace, teacher, tmp_path)


# ---- invariant 3


# world size, teacher ranks, local batch size, micro-batches: 8 documents, one empty, do not divide by 3 ranks
SPLITS = {
    "count": [(1, 0, 8, 1), (1, 0, 1, 8), (2, 0, 1, 4), (3, 0, 8, 1), (3, 0, 1, 3), (2, 1, 3, 3)],
    "packed": [(1, 0, 8, 1), (1, 0, 1, 3), (2, 0, 8, 1), (2, 0, 1, 2), (3, 0, 1, 1), (2, 1, 1, 3), (3, 1, 1, 2)],
    "balanced": [(1, 0, 1, 4), (2, 0, 2, 2), (3, 1, 1, 2)],
}


@BOTH
@pytest.mark.parametrize("kind", MICRO_BATCHING)
def test_one_batch_has_one_loss_however_it_is_split(bench: Bench, placement: str, kind: str) -> None:
    expected = bench.plain(placement)
    assert len(set(expected.lengths)) > 5 and 0 in expected.lengths
    first: dict[str, Any] = {}
    for world_size, teacher_ranks, local_batch_size, micro_batches in SPLITS[kind]:
        result = bench.take(
            world_size,
            block_stack__placement=placement,
            teacher__ranks=teacher_ranks,
            documents__micro_batching=kind,
            training__local_batch_size=local_batch_size,
        )
        assert result["micro_batches"] == micro_batches
        assert_step_is(result, expected)
        first = first or result
        assert result["reports"][0]["loss"] == pytest.approx(first["reports"][0]["loss"], rel=1e-6)
        assert_same_gradients(result["gradients"], first["gradients"])


@BOTH
@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_teacher_the_step_is_plain_pretraining(bench: Bench, placement: str, world_size: int) -> None:
    expected = plain_step(bench.workspace, None, bench.texts, placement, kd_weight=0.0, ce_weight=1.0)
    assert "tok_embeddings.weight" in expected.gradients
    overrides = without_teacher(block_stack__placement=placement, training__local_batch_size=2)
    result = bench.take(world_size, **overrides)
    assert result["reports"][0]["kl"] is None and result["reports"][0]["kd"] is None
    assert_step_is(result, expected)


@BOTH
@EACH_LAYOUT
def test_evaluating_a_training_batch_gives_its_training_loss(
    bench: Bench, placement: str, world_size: int, teacher_ranks: int
) -> None:
    """Every step trains on the same eight documents, which are the validation set too; a phase changes in between."""
    args = bench.arguments(
        steps=3,
        block_stack__placement=placement,
        growth__phase_steps=[2, 1],
        growth__active_blocks=[1, 2],
        teacher__ranks=teacher_ranks,
        training__local_batch_size=2,
        validation__enable=True,
        validation__dataset_path=bench.folder / "texts.jsonl",
        validation__local_batch_size=3,
        validation__freq=1,
    )
    events = bench.run(run_job, world_size, args=args)
    validated = {(e["step"], e["phase"]): e for e in events if e["event"] == "validation"}
    trained = train_events(events)
    assert [e["phase"] for e in trained] == [0, 0, 1]
    for event in trained:  # the weights of a step's forward are those that the validation before it saw
        validation = validated[event["step"] - 1, event["phase"]]
        for name in ("loss", "ce", "kl", "kd"):
            assert validation[name] == pytest.approx(event[name], rel=1e-6), (event["step"], name)
    assert len({e["loss"] for e in trained}) == 3  # and they move


@BOTH
@MAIN_LAYOUTS
def test_chunk_size_changes_nothing(bench: Bench, placement: str, world_size: int, teacher_ranks: int) -> None:
    expected = bench.plain(placement)
    for chunk_tokens in (1, 5, 1000):
        result = bench.take(
            world_size,
            block_stack__placement=placement,
            teacher__ranks=teacher_ranks,
            training__local_batch_size=3,
            distill__chunk_tokens=chunk_tokens,
        )
        assert_step_is(result, expected)


def train_and_count(
    rank: int, world_size: int, store: dist.Store, args: list[str]
) -> tuple[list[dict[str, Any]], int] | None:
    """A pool function: the whole job; its events, and how many layers of the last model are checkpointed."""
    with opened(rank, world_size, store, args) as trainer:
        if trainer is None:
            return None
        trainer.train()
        (model,) = trainer.model_parts
        wrapped = sum(isinstance(module, CheckpointWrapper) for module in model.modules())
        return read_events(f"{trainer.job_config.job.dump_folder}/{METRICS_FILE}"), wrapped


@BOTH
@MAIN_LAYOUTS
def test_activation_checkpointing_changes_nothing(
    bench: Bench, placement: str, world_size: int, teacher_ranks: int
) -> None:
    """Two layers grow to four. Every second one: the first, the third."""
    results = []
    for mode, option, layers in (("none", "op", 0), ("selective", "op", 4), ("selective", "2", 2), ("full", "op", 4)):
        args = arguments(
            bench.workspace,
            bench.folder / f"{mode}_{option}",
            block_stack__placement=placement,
            block_stack__layers_per_block=2,
            growth__phase_steps=[1, 2],
            growth__active_blocks=[1, 2],
            training__steps=3,
            training__local_batch_size=2,
            teacher__path=bench.teacher,
            teacher__ranks=teacher_ranks,
            activation_checkpoint__mode=mode,
            activation_checkpoint__selective_ac_option=option,
            checkpoint__enable=False,
            validation__enable=False,
        )
        events, wrapped = bench.run(train_and_count, world_size, args=args)
        assert wrapped == layers, (mode, option)
        results.append(losses(events))
    assert len(results[0]) == 3
    for result in results[1:]:
        for step, plain in zip(result, results[0], strict=True):
            assert step == pytest.approx(plain, rel=1e-6)


# ---- invariant 10


@pytest.mark.parametrize(("placement", "temperature"), [("post", 1.0), ("pre", 2.0), ("post", 4.0)])
@pytest.mark.parametrize(("world_size", "teacher_ranks"), [(1, 0), (2, 1)])
@pytest.mark.parametrize(("kd_weight", "ce_weight"), [(1.0, 0.0), (0.0, 1.0), (0.7, 0.3)])
def test_objective_is_what_its_weights_say(
    bench: Bench,
    kd_weight: float,
    ce_weight: float,
    world_size: int,
    teacher_ranks: int,
    placement: str,
    temperature: float,
) -> None:
    objective = {"kd_weight": kd_weight, "ce_weight": ce_weight, "temperature": temperature}
    result = bench.take(
        world_size,
        block_stack__placement=placement,
        teacher__ranks=teacher_ranks,
        **{f"distill__{name}": value for name, value in objective.items()},
    )
    assert_step_is(result, bench.plain(placement, **objective))
    (report,) = result["reports"]
    pure = {(1.0, 0.0): temperature**2 * report["kl"], (0.0, 1.0): report["ce"]}
    if (kd_weight, ce_weight) in pure:
        assert report["loss"] == pytest.approx(pure[kd_weight, ce_weight], rel=1e-6)


def test_objective_is_pure_kl_under_compile(bench: Bench) -> None:
    objective = {"kd_weight": 1.0, "ce_weight": 0.0, "temperature": 2.0}
    result = bench.take(
        1,
        blocks=1,
        teacher__ranks=0,
        compile__enable=True,
        compile__components=["model"],
        **{f"distill__{name}": value for name, value in objective.items()},
    )
    assert result["compiled_layers"] == 1
    assert_step_is(result, bench.plain(blocks=1, **objective))
    assert result["reports"][0]["loss"] == pytest.approx(4 * result["reports"][0]["kl"], rel=1e-6)


def step_as_teacher(
    rank: int, world_size: int, store: dist.Store, args: list[str], folder: str
) -> list[dict[str, Any]] | None:
    """A pool function: one step of a student that has been given every weight of the teacher."""
    from safetensors.torch import load_file

    with opened(rank, world_size, store, args) as trainer:
        if trainer is None:
            return None
        adapter = trainer.train_spec.state_dict_adapter(trainer.model_args, None)
        weights = adapter.from_hf(load_file(f"{folder}/model.safetensors"))
        parameters = dict(named_parameters(trainer.model_parts[0]))
        assert parameters.keys() == weights.keys()
        for fqn, param in parameters.items():
            write_full(param, weights[fqn])
        return run_steps(trainer)


@EACH_LAYOUT
def test_kl_vanishes_where_student_and_teacher_agree(bench: Bench, world_size: int, teacher_ranks: int) -> None:
    args = bench.arguments(
        block_stack__placement="pre",
        teacher__ranks=teacher_ranks,
        training__local_batch_size=2,
        distill__kd_weight=1.0,
        distill__ce_weight=0.0,
    )
    before = bench.run(take_steps, world_size, args=args)["reports"][0]
    assert before["kl"] > 1 and before["grad_norm"] > 0.1
    (after,) = bench.run(step_as_teacher, world_size, args=args, folder=str(bench.teacher))
    assert abs(after["kl"]) < 1e-6 and abs(after["loss"]) < 1e-6 and after["grad_norm"] < 1e-5
    assert after["kd"] > 1  # the teacher's entropy


# ---- invariant 7


@BOTH
@MAIN_LAYOUTS
@pytest.mark.parametrize("kind", ["packed", "count"])
def test_padding_changes_nothing(bench: Bench, placement: str, world_size: int, teacher_ranks: int, kind: str) -> None:
    common = {
        "block_stack__placement": placement,
        "teacher__ranks": teacher_ranks,
        "training__local_batch_size": 3,
        "documents__micro_batching": kind,
    }
    expected = bench.plain(placement)
    plain = bench.take(world_size, **common)
    assert_step_is(plain, expected)
    longer = bench.take(world_size, **common, documents__pad_to_multiple_of=24)
    assert longer["reports"][0]["processed_tokens"] > plain["reports"][0]["processed_tokens"]
    assert_step_is(longer, expected)
    for options in ({"pad_id": 5}, {"noise_seed": 1}):  # the same shapes: bit for bit
        other = bench.take(world_size, options, **common, documents__pad_to_multiple_of=24)
        for name in ("loss", "ce", "kl", "kd", "grad_norm"):
            assert other["reports"][0][name] == longer["reports"][0][name], (options, name)
        assert_same_gradients(other["gradients"], longer["gradients"], rel=0)


def test_padding_gives_a_trained_embedding_no_gradient(bench: Bench) -> None:
    unseen = 299
    overrides = without_teacher(training__local_batch_size=3, documents__pad_to_multiple_of=24)
    plain = bench.take(2, **overrides)
    other = bench.take(2, {"pad_id": unseen}, **overrides)
    assert not plain["gradients"]["tok_embeddings.weight"][unseen].any()
    assert_same_gradients(other["gradients"], plain["gradients"], rel=0)


@BOTH
@pytest.mark.parametrize(("world_size", "teacher_ranks", "counts"), [(3, 0, [4, 9]), (3, 1, [6]), (2, 0, [6])])
def test_a_rank_without_labels_gives_zero_gradients(
    bench: Bench, placement: str, world_size: int, teacher_ranks: int, counts: list[int]
) -> None:
    bench.write(counts)
    expected = bench.plain(placement)
    result = bench.take(
        world_size,
        block_stack__placement=placement,
        teacher__ranks=teacher_ranks,
        training__global_batch_size=len(counts),
    )
    assert_step_is(result, expected)


@BOTH
@EACH_LAYOUT
def test_a_batch_without_labels_moves_nothing(
    bench: Bench, placement: str, world_size: int, teacher_ranks: int
) -> None:
    bench.write([0] * 8 + COUNTS)
    result = bench.take(
        world_size,
        {"steps": 2},
        steps=2,
        block_stack__placement=placement,
        teacher__ranks=teacher_ranks,
        training__local_batch_size=3,
        lr_scheduler__warmup_steps=0,
    )
    empty, full = result["reports"]
    assert empty["valid_tokens"] == 0 and full["valid_tokens"] > 0
    assert [empty[name] for name in ("loss", "ce", "kl", "kd", "grad_norm")] == [0.0] * 5
    before, after_empty, after_full = result["parameters"]
    for fqn, value in before.items():
        assert np.array_equal(after_empty[fqn], value), fqn
        assert np.isfinite(after_full[fqn]).all(), fqn
        assert np.array_equal(after_full[fqn], value) == (fqn == "tok_embeddings.weight"), fqn
    expected = bench.plain(placement)  # empty documents count for nothing
    assert full["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert_same_gradients(result["gradients"], expected.gradients)
