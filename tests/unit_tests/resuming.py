"""Runs that are interrupted and resumed at toy size, and what they are compared with.

A ``Case`` is a kind of job with its undisturbed run, which serves many resumptions. A run is interrupted in two ways: its
student raises in the middle of a job (``Case.interrupt``), or a copy of the finished run's folder loses its later
checkpoints while the metrics go on (``Case.as_of``), which is what a machine that dies leaves.
"""

import contextlib
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from blockgrow_titan.checkpoint_files import saved_steps
from blockgrow_titan.events import METRICS_FILE, read_events
from blockgrow_titan.metrics import SUMMARY_FILE
from blockgrow_titan.trainer import GrowthTrainer
from tests.unit_tests.jobs import arguments, losses, run_job, validations
from tests.unit_tests.models import read_json
from tests.unit_tests.rank_pool import RankPool

TIMEOUT = 240.0
# Seven steps that grow after the third: checkpoints inside each phase, at both boundaries, and right after growth.
COMMON = {"growth__phase_steps": [3, 4], "training__steps": 7, "validation__freq": 2, "training__local_batch_size": 4}
SAVED = [2, 3, 4, 6, 7]
KEEP, CONTINUE = {"growth__optimizer_at_growth": "keep"}, {"growth__lr_at_growth": "continue"}
REWIND = {"growth__data_at_growth": "rewind"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, overrides
    "colocated": (1, {"teacher__prefetch": 0, "metrics__enable_tensorboard": True}),
    "colocated, all policies": (1, {"teacher__prefetch": 3} | KEEP | CONTINUE | REWIND),
    "separate": (2, {"teacher__ranks": 1, "teacher__prefetch": 3} | REWIND),
    "separate, pre": (2, {"teacher__ranks": 1, "teacher__prefetch": 0, "block_stack__placement": "pre"} | KEEP),
    "two students": (2, {"teacher__prefetch": 3} | CONTINUE | REWIND),
    "two students and a teacher": (
        3,
        {"teacher__ranks": 1, "teacher__prefetch": 3, "growth__freeze": "completed_blocks"} | KEEP | REWIND,
    ),
}
# Fields of an event that a clock or the machine decides.
MEASURED = ("step_s", "seconds", "tokens_per_s", "teacher_wait_s", "memory_gib", "mfu_percent")


class Interrupted(Exception):
    """Stands for whatever ends a job."""


@contextlib.contextmanager
def forked_loader_workers() -> Iterator[None]:
    """As under torchrun: a spawned process, which the pool's ranks are, would spawn them too, each with its imports."""
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)


def completed(rank: int, world_size: int, store: dist.Store, args: list[str]) -> list[dict[str, Any]]:
    """A pool function: a whole job; its events."""
    with forked_loader_workers():
        return run_job(rank, world_size, store, args)


def interrupted(rank: int, world_size: int, store: dist.Store, args: list[str], step: int, after: bool) -> str:
    """A pool function: a job whose students raise before or after training ``step``; the text that ended this rank."""
    original = GrowthTrainer.train_step

    def train_step(self: GrowthTrainer, data_iterator: Any) -> None:
        if self.step != step or after:
            original(self, data_iterator)
        if self.step == step:
            raise Interrupted(f"pulled the plug at step {step}")

    GrowthTrainer.train_step = train_step  # type: ignore[method-assign]
    try:
        completed(rank, world_size, store, args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        GrowthTrainer.train_step = original  # type: ignore[method-assign]
    return "completed"


class Case:
    """A kind of job, its undisturbed run, and copies of that run as of a checkpoint."""

    def __init__(self, name: str, workspace: Path, folder: Path, rank_pool: RankPool) -> None:
        self.world_size, self.overrides = CASES[name]
        self.workspace, self.folder, self.rank_pool = workspace, folder, rank_pool
        self.resume(folder)

    def args(self, folder: Path, **overrides: Any) -> list[str]:
        return arguments(self.workspace, folder, **(COMMON | self.overrides | overrides))

    def resume(self, folder: Path, world_size: int | None = None, **overrides: Any) -> list[dict[str, Any]]:
        """Run the job in ``folder`` to its end; its events."""
        args = self.args(folder, **overrides)
        return self.rank_pool.run(completed, world_size or self.world_size, timeout=TIMEOUT, args=args)[0]

    def interrupt(
        self, folder: Path, step: int, after: bool = True, world_size: int | None = None, **overrides: Any
    ) -> list[str]:
        """Run the job in ``folder`` until ``step``; what ended each rank."""
        args, ranks = self.args(folder, **overrides), world_size or self.world_size
        return self.rank_pool.run(interrupted, ranks, timeout=TIMEOUT, args=args, step=step, after=after)

    def as_of(self, step: int, folder: Path) -> Path:
        """A copy of the undisturbed run without the checkpoints after ``step``; its metrics go on to the end."""
        shutil.copytree(self.folder, folder)
        for later in [s for s in SAVED if s > step]:
            shutil.rmtree(folder / "checkpoint" / f"step-{later}")
        return folder


def undisturbed_runs(workspace: Path, rank_pool: RankPool, folder: Path) -> Callable[[str], Case]:
    """``get(name)`` gives a case with its undisturbed run, made on first use."""
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            made[name] = Case(name, workspace, folder / f"run{len(made)}", rank_pool)
        return made[name]

    return get


def checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / "checkpoint" / f"step-{step}"


def contents(checkpoint: Path) -> dict[str, Any]:
    """Everything that a checkpoint holds, whole, by key."""
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.items()
    }
    dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    return state


def assert_same_checkpoint(folder: Path, expected: Path, step: int) -> None:
    """Weights, moments, learning-rate schedule and counts are bit for bit the same."""
    theirs = contents(checkpoint_folder(expected, step))
    ours = contents(checkpoint_folder(folder, step))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        same = torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value
        assert same, key


def undated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events but for resumptions and what a clock decides."""
    return [{k: v for k, v in e.items() if k not in MEASURED} for e in events if e["event"] != "resume"]


def lines(events: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(e["event"], e["step"], e["phase"]) for e in events]


def resumptions(folder: Path) -> list[int]:
    return [e["step"] for e in read_events(str(folder / METRICS_FILE)) if e["event"] == "resume"]


def assert_as_undisturbed(folder: Path, undisturbed: Path) -> None:
    """Losses, validations, every line of the metrics, the summary and the last checkpoint are the same bit for bit."""
    ours, theirs = (read_events(str(f / METRICS_FILE)) for f in (folder, undisturbed))
    assert losses(ours) == losses(theirs)
    assert validations(ours) == validations(theirs)
    assert lines(undated(ours)) == lines(undated(theirs))  # none lost, none doubled
    assert undated(ours) == undated(theirs)
    rows = [[row | {"seconds": 0} for row in read_json(f / SUMMARY_FILE)["phases"]] for f in (folder, undisturbed)]
    assert rows[0] == rows[1]
    assert saved_steps(str(folder / "checkpoint")) == SAVED
    assert_same_checkpoint(folder, undisturbed, SAVED[-1])
