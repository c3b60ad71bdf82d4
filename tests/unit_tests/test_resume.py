"""Invariants 2 and 4: a run that was interrupted, anywhere, ends as if it had not been (``resuming.py``)."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from blockgrow_titan.checkpoint_files import saved_steps, steps_of
from blockgrow_titan.events import METRICS_FILE, read_events
from tests.unit_tests.jobs import arguments, losses, run_job, train_events, validations
from tests.unit_tests.rank_pool import RankPool
from tests.unit_tests.resuming import (
    SAVED,
    Case,
    assert_as_undisturbed,
    assert_same_checkpoint,
    checkpoint_folder,
    contents,
    lines,
    resumptions,
    undated,
    undisturbed_runs,
)


@pytest.fixture(scope="module")
def case(workspace: Path, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """``case(name)`` with its undisturbed run, which is made once."""
    return undisturbed_runs(workspace, rank_pool, tmp_path_factory.mktemp("undisturbed"))


def test_the_undisturbed_run_saves_where_it_should(case: Callable[[str], Case]) -> None:
    """Inside phases, at both boundaries; with the depth of the phase; the last one can be resumed too."""
    folder = case("colocated").folder
    assert saved_steps(str(folder / "checkpoint")) == SAVED
    events = read_events(str(folder / METRICS_FILE))
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == SAVED
    for step in SAVED:
        state = contents(checkpoint_folder(folder, step))
        layers = {key.split(".")[1] for key in state if key.startswith("layers.")}
        assert layers == ({"0"} if step <= 3 else {"0", "1"})
        assert state["train_state.step"] == step
        for count, field in (("ntokens_seen", "valid_tokens"), ("active_layer_tokens", "active_layer_tokens")):
            assert state[f"train_state.{count}"] == sum(e[field] for e in train_events(events)[:step])
        moments = {key for key in state if key.startswith("optimizer.state.") and key.endswith("exp_avg")}
        assert {key.removeprefix("optimizer.state.").removesuffix(".exp_avg") for key in moments} == {
            key
            for key in state
            if not key.startswith(("optimizer.", "lr_scheduler", "train_state.", "tok_embeddings."))
        }
        assert any(key.startswith("lr_scheduler") for key in state)
        assert not any("teacher" in key or "dataloader" in key for key in state)


INTERRUPTIONS = [(1, True), (3, True), (4, False), (5, True), (7, False)]  # resumed from nothing, 2, 3, 4 and 6


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        ("colocated", [(2, True), (4, True), (6, False)]),
        ("colocated, all policies", INTERRUPTIONS),
        ("separate", INTERRUPTIONS),
        ("separate, pre", [(4, False), (5, False)]),
        ("two students", [(3, False), (4, True)]),
        ("two students and a teacher", [(4, False), (6, True)]),
    ],
)
def test_interrupted_runs(
    case: Callable[[str], Case], tmp_path: Path, name: str, stops: list[tuple[int, bool]]
) -> None:
    this, folder = case(name), tmp_path / "run"
    for step, after in stops:
        causes = this.interrupt(folder, step, after)
        assert all(f"pulled the plug at step {step}" in cause for cause in causes), causes  # a teacher's rank names it
    this.resume(folder)
    assert_as_undisturbed(folder, this.folder)
    assert resumptions(folder) == [max(s for s in SAVED if s < step) for step, _ in stops if step > SAVED[0]]


def cut_last_line(path: Path) -> None:
    """What a crash in the middle of a write leaves."""
    text = path.read_text()
    path.write_text(text[: len(text.rstrip("\n")) - 20])


@pytest.mark.parametrize(
    ("left", "resumed_from"),
    [("2", 2), ("3", 3), ("6", 6), ("4 and a half-written one", 4), ("3, with load_step = 3", 3)],
)
def test_folders_that_a_dead_machine_leaves(
    case: Callable[[str], Case], tmp_path: Path, left: str, resumed_from: int
) -> None:
    this = case("colocated, all policies")
    folder, overrides = tmp_path / "run", {}
    if "half" in left:
        this.as_of(6, folder)
        os.remove(checkpoint_folder(folder, 6) / ".metadata")  # it is written last
        cut_last_line(folder / METRICS_FILE)
    elif "load_step" in left:
        this.as_of(3, folder)
        overrides = {"checkpoint__load_step": 3}
    else:
        this.as_of(int(left), folder)
    this.resume(folder, **overrides)
    assert resumptions(folder) == [resumed_from]
    assert_as_undisturbed(folder, this.folder)


def test_asynchronous_saves_hold_the_same(case: Callable[[str], Case], tmp_path: Path) -> None:
    """Steps that follow a save, and a growth, change nothing in it."""
    this = case("two students")
    this.resume(tmp_path, checkpoint__async_mode="async")
    for step in SAVED:
        assert_same_checkpoint(tmp_path, this.folder, step)


def test_other_ranks_and_workers(case: Callable[[str], Case], tmp_path: Path) -> None:
    """2 students without loader workers, 1 with two of them, 3 with one each; inside a phase and after a rewind."""
    this, workers = case("two students"), "training__dataloader__num_workers"
    this.interrupt(tmp_path, 3, world_size=2, **{workers: 0})
    this.interrupt(tmp_path, 5, world_size=1, **{workers: 2, "training__local_batch_size": 3, "teacher__prefetch": 0})
    events = this.resume(tmp_path, world_size=3, **{workers: 1, "training__local_batch_size": 2})
    assert resumptions(tmp_path) == [2, 4]
    undisturbed = read_events(str(this.folder / METRICS_FILE))
    assert lines(undated(events)) == lines(undated(undisturbed))
    for ours, theirs in zip(train_events(events), train_events(undisturbed), strict=True):
        for name in ("documents", "valid_tokens", "active_layer_tokens", "lr"):
            assert ours[name] == theirs[name]
    for ours, theirs in zip(losses(events), losses(undisturbed), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for ours, theirs in zip(validations(events), validations(undisturbed), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    ours, theirs = (contents(checkpoint_folder(f, 7)) for f in (tmp_path, this.folder))
    for name in ("train_state.step", "train_state.ntokens_seen", "train_state.active_layer_tokens"):
        assert ours[name] == theirs[name]


def test_documents_of_each_step(case: Callable[[str], Case]) -> None:
    """Invariant 2, as the metrics tell it: 8 documents a step, from the first one again after a rewind."""
    for name, offsets in (("colocated", range(7)), ("two students", [0, 1, 2, 0, 1, 2, 3])):
        events = train_events(read_events(str(case(name).folder / METRICS_FILE)))
        assert [e["documents"] for e in events] == [[8 * t, 8 * t + 8] for t in offsets]


@pytest.mark.parametrize(
    ("keeps_boundaries", "left", "left_at_the_end"),
    [(True, [2, 3, 4, 5], [3, 4, 5, 6, 7]), (False, [3, 4, 5], [5, 6, 7])],
)
def test_keep_latest_k(
    case: Callable[[str], Case], tmp_path: Path, keeps_boundaries: bool, left: list[int], left_at_the_end: list[int]
) -> None:
    """Half-written folders do not count; what is older than the newest whole one goes. Steps 3 and 7 end phases."""
    this = case("colocated")
    (tmp_path / "checkpoint" / "step-0").mkdir(parents=True)
    changes = {
        "checkpoint__keep_latest_k": 3,
        "checkpoint__interval": 1,
        "growth__keep_boundary_checkpoints": keeps_boundaries,
    }
    this.interrupt(tmp_path, 6, **changes)
    assert saved_steps(str(tmp_path / "checkpoint")) == left
    half = tmp_path / "checkpoint" / "step-5" / ".metadata"
    half.unlink()
    events = this.resume(tmp_path, **changes)
    assert steps_of(str(tmp_path / "checkpoint")) == dict.fromkeys(left_at_the_end, True)
    assert losses(events) == losses(read_events(str(this.folder / METRICS_FILE)))


def test_tensorboard_goes_on_in_one_folder(case: Callable[[str], Case], tmp_path: Path) -> None:
    """Each step once and in order, with the undisturbed run's values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    this, folder = case("colocated"), tmp_path / "run"
    stops = [(1, True), (3, True), (4, False), (6, True), None]  # resumed from nothing, 2, 3 and 4
    for number, stop in enumerate(stops):
        if stop:
            this.interrupt(folder, *stop)
        else:
            this.resume(folder)
        (new,) = set(folder.rglob("events.out.tfevents.*")) - set(folder.rglob("*.done"))
        # TensorBoard reads files by name, which tells starts apart by the second; these may be closer together.
        new.rename(new.with_name(f"events.out.tfevents.{number}.done"))

    def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
        (events_folder,) = {path.parent for path in run.rglob("events.out.tfevents.*")}
        accumulator = EventAccumulator(str(events_folder)).Reload()
        return [(event.step, event.value) for event in accumulator.Scalars(tag)]

    for tag in ("train/loss", "train/kl", "validation/ce"):
        assert scalars(folder, tag) == scalars(this.folder, tag)
    assert [step for step, _ in scalars(folder, "train/loss")] == [1, 2, 3, 4, 5, 6, 7]


def test_a_checkpoint_whose_line_was_lost_gets_it_on_resume(
    rank_pool: RankPool, workspace: Path, tmp_path: Path
) -> None:
    """A kill between the save and its line: the checkpoint is there, the record of it is not."""
    args = arguments(workspace, tmp_path)
    whole = rank_pool.run(run_job, 1, args=args)[0]
    for step in (3, 4, 6):
        shutil.rmtree(tmp_path / "checkpoint" / f"step-{step}")
    metrics = tmp_path / "metrics.jsonl"
    lines = [json.dumps(e) for e in whole if (e["event"], e["step"]) != ("checkpoint", 2)]
    metrics.write_text("\n".join(lines) + "\n")
    resumed = rank_pool.run(run_job, 1, args=args)[0]
    key = [(e["event"], e["step"], e["phase"]) for e in resumed if e["event"] != "resume"]
    assert key == [(e["event"], e["step"], e["phase"]) for e in whole]
