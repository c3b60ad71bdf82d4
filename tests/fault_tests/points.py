"""Points of a job at which a rank can be killed, without any hook in the package.

A point is a function of the package, of torchtitan or of torch that a rank calls. ``install`` puts a wrapper around it
that counts the calls and, just before or just after the chosen one, sends SIGKILL to its own process: nothing runs after
that, no exception handler and no buffer's flush, as if the machine had gone. A point may first do the half of what the
function does (``half``): half a line, half a file.
"""

import functools
import importlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockgrow_titan.teacher.bridge import HEADER_TAG, PAYLOAD_TAG

DIED = "kills itself at"


@dataclass(frozen=True)
class Kill:
    """A fault: SIGKILL to a rank, before or after its n-th call of a point's function."""

    point: str
    rank: int
    call: int
    """Counted from 1."""
    after: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} {'after' if self.after else 'before'} call {self.call} of '{self.point}'"


@dataclass(frozen=True)
class Point:
    """Where a rank can be killed."""

    during: str
    """What of a run it belongs to, for the report."""
    target: str
    """``module:name`` or ``module:Class.name`` of the function."""
    when: Callable[..., bool] = lambda *args, **kwargs: True
    """Called with the function's arguments: whether this call counts."""
    half: Callable[..., None] | None = None
    """Called with the function's arguments, and the function before them, just before a kill "before"."""


def _tag(tag: int) -> Callable[..., bool]:
    return lambda group, tensors, peer, its_tag: its_tag == tag


def _half_line(write: Callable[..., None], events: Any, event: dict[str, Any]) -> None:
    """The line is cut in its middle."""
    size = os.path.getsize(events.path)
    write(events, event)
    os.truncate(events.path, (size + os.path.getsize(events.path)) // 2)


def _half_item(write_item: Callable[..., Any], transforms: Any, stream: Any, *args: Any) -> None:
    """The file of a checkpoint ends in the middle of a tensor."""
    begin = stream.tell()
    write_item(transforms, stream, *args)
    stream.flush()
    os.ftruncate(stream.fileno(), (begin + stream.tell()) // 2)


def _half_removed(rmtree: Callable[..., None], folder: str, *args: Any, **kwargs: Any) -> None:
    """Of a checkpoint only the file that says it is complete is left."""
    for path in Path(folder).glob("*"):
        if path.name != ".metadata":
            path.unlink()


def _of_a_checkpoint(folder: Any, *args: Any, **kwargs: Any) -> bool:
    return Path(folder).name.startswith("step-")


def _to(name: str) -> Callable[..., bool]:
    return lambda source, target, **kwargs: os.path.basename(target) == name


_TRAINER = "blockgrow_titan.trainer:GrowthTrainer"
_METRICS = "blockgrow_titan.metrics:GrowthMetricsProcessor"
_GLOO = "torch.distributed:ProcessGroupGloo"
_FILES = "torch.distributed.checkpoint.filesystem"
_HOOKS = "blockgrow_titan.growth.hooks"

STEP, LOOK_AHEAD, TEACHER, MESSAGE = "a step", "the look-ahead", "the teacher's forward", "a message"
SAVE, COMMIT, REMOVAL = "a checkpoint's save", "a checkpoint's files and its metadata", "an old checkpoint's removal"
RECORD, GROWTH, VALIDATION = "a line of metrics.jsonl", "growth", "validation"
START, LOAD, END = "the start", "loading", "the end"

POINTS: dict[str, Point] = {
    "step": Point(STEP, f"{_TRAINER}.train_step"),
    "micro-batch": Point(STEP, f"{_TRAINER}.forward_backward_step"),
    "gradient clipping": Point(STEP, "torchtitan.distributed.utils:clip_grad_norm_"),
    "optimizer step": Point(STEP, "torchtitan.components.optimizer:OptimizersContainer.step"),
    "learning-rate step": Point(STEP, "torchtitan.components.lr_scheduler:LRSchedulersContainer.step"),
    "all-reduce": Point(STEP, "torch.distributed:all_reduce"),
    "report of a step": Point(STEP, f"{_METRICS}.log_step"),
    "micro-batch asked ahead": Point(LOOK_AHEAD, "blockgrow_titan.teacher.client:TeacherClient.submit"),
    "documents of a step": Point(LOOK_AHEAD, "blockgrow_titan.documents.batches:StepDocuments.__getitem__"),
    "teacher's forward": Point(TEACHER, "blockgrow_titan.teacher.model:TeacherModel.hidden_states"),
    "teacher's answer taken": Point(TEACHER, "blockgrow_titan.teacher.client:TeacherClient.result"),
    "header of a message": Point(MESSAGE, f"{_GLOO}.send", when=_tag(HEADER_TAG)),
    "payload of a message": Point(MESSAGE, f"{_GLOO}.send", when=_tag(PAYLOAD_TAG)),
    "message taken": Point(MESSAGE, "blockgrow_titan.teacher.bridge:Inbox.put"),
    "save": Point(SAVE, "blockgrow_titan.checkpoint:GrowthCheckpointManager.save"),
    "manifest": Point(SAVE, "blockgrow_titan.checkpoint:write_manifest"),
    "checkpoint's data": Point(SAVE, f"{_FILES}:FileSystemWriter.write_data"),
    "half a file of a checkpoint": Point(SAVE, f"{_FILES}:_write_item", half=_half_item),
    "checkpoint's metadata": Point(COMMIT, f"{_FILES}:FileSystemWriter.finish"),
    "metadata's last name": Point(COMMIT, f"{_FILES}:FileSystem.rename"),
    "removal of a checkpoint": Point(REMOVAL, "shutil:rmtree", when=_of_a_checkpoint),
    "half a checkpoint removed": Point(REMOVAL, "shutil:rmtree", when=_of_a_checkpoint, half=_half_removed),
    "line": Point(RECORD, "blockgrow_titan.events:EventFile.write"),
    "half a line": Point(RECORD, "blockgrow_titan.events:EventFile.write", half=_half_line),
    "line of a checkpoint": Point(RECORD, f"{_METRICS}.log_checkpoint"),
    "phase change": Point(GROWTH, f"{_TRAINER}.grow"),
    "deeper model": Point(GROWTH, f"{_HOOKS}:RebuildModel.after_phase"),
    "parameters carried": Point(GROWTH, f"{_HOOKS}:carry_parameters"),
    "optimizer of the deeper model": Point(GROWTH, f"{_HOOKS}:RebuildOptimizers.after_phase"),
    "checkpointer of the deeper model": Point(GROWTH, f"{_HOOKS}:Rewire.after_phase"),
    "line of a growth": Point(GROWTH, f"{_METRICS}.log_growth"),
    "validation": Point(VALIDATION, "blockgrow_titan.validate:GrowthValidator.validate"),
    "line of a validation": Point(VALIDATION, f"{_METRICS}.log_validation"),
    "world": Point(START, "blockgrow_titan.train:join_world"),
    "bridge": Point(START, "blockgrow_titan.teacher.bridge:connect"),
    "metrics taken up": Point(START, f"{_METRICS}.start"),
    "metrics.jsonl replaced": Point(START, "os:replace", when=_to("metrics.jsonl")),
    "load": Point(LOAD, "blockgrow_titan.checkpoint:GrowthCheckpointManager.load"),
    "checkpoint's metadata read": Point(LOAD, f"{_FILES}:FileSystemReader.read_metadata"),
    "checkpoint's data read": Point(LOAD, f"{_FILES}:FileSystemReader.read_data"),
    "end of training": Point(END, f"{_TRAINER}._finish"),
    "summary.json": Point(END, "blockgrow_titan.trainer:write_summary"),
    "summary.json replaced": Point(END, "os:replace", when=_to("summary.json")),
    "teacher's stop": Point(END, "blockgrow_titan.teacher.bridge:Pair.stop"),
    "process group's end": Point(END, "torch.distributed:destroy_process_group"),
}
UNCONNECTED = ("world", "bridge")  # a rank that dies there has no connection yet whose end would tell the others


class Counter:
    """How often a point was reached in this process."""

    def __init__(self) -> None:
        self.number = 0
        self._next = itertools.count(1)  # a call of it is atomic: points are reached from several threads

    def next(self) -> int:
        self.number = next(self._next)
        return self.number


def install(kills: Sequence[Kill], everything: bool = False) -> dict[str, Counter]:
    """Build these faults into this process, and count the calls of their points (or of all points)."""
    counters = {}
    for name in POINTS if everything else dict.fromkeys(kill.point for kill in kills):
        counters[name] = Counter()
        _wrap(POINTS[name], [kill for kill in kills if kill.point == name], counters[name])
    return counters


def _wrap(point: Point, kills: Sequence[Kill], counter: Counter) -> None:
    module_name, _, path = point.target.partition(":")
    module = importlib.import_module(module_name)
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, module)
    original = getattr(owner, name)
    before, after = ({kill.call for kill in kills if kill.after == value} for value in (False, True))

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not point.when(*args, **kwargs):
            return original(*args, **kwargs)
        number = counter.next()
        if number in before:
            if point.half is not None:
                point.half(original, *args, **kwargs)
            die()
        result = original(*args, **kwargs)
        if number in after:
            die()
        return result

    setattr(owner, name, wrapper)
    if not owners:  # a function: modules that have imported its name hold the original
        for other in list(sys.modules.values()):
            if getattr(other, "__dict__", {}).get(name) is original:
                setattr(other, name, wrapper)


def die() -> None:
    """End this process as a power cut would, but for a word about it and the time on its standard error."""
    os.write(2, f"{DIED} {time.time():.3f}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
