"""What a run that was disturbed has lost, doubled or left behind, against the same run undisturbed."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from blockgrow_titan.checkpoint import saved_steps
from blockgrow_titan.events import METRICS_FILE
from blockgrow_titan.metrics import SUMMARY_FILE
from tests.unit_tests.models import read_json
from tests.unit_tests.resuming import MEASURED, checkpoint_folder, contents, undated


def differences(folder: Path, undisturbed: Path) -> list[str]:
    """Everything in which a run's folder differs from the undisturbed run's, but for times; empty if nothing was lost."""
    parts: tuple[Callable[[Path, Path], list[str]], ...] = (metrics, summary, checkpoints, tensorboard, files)
    found = []
    for part in parts:
        try:
            found += part(folder, undisturbed)
        except Exception as error:  # what cannot be read is a finding, not the end of the comparison
            found.append(f"{part.__name__}: {type(error).__name__}: {error}")
    return found


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of one JSON object a line; unlike the package's reader, this one takes no cut line."""
    text = path.read_text()
    if text and not text.endswith("\n"):
        raise ValueError(f"the last line of {path.name} is cut")
    return [json.loads(line) for line in text.splitlines()]


def metrics(folder: Path, undisturbed: Path) -> list[str]:
    """Every line: none lost, doubled or cut, all values but the measured ones the same bit for bit."""
    ours, theirs = (undated(complete_lines(run / METRICS_FILE)) for run in (folder, undisturbed))
    if ours == theirs:
        return []
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    line, expected = (lines[place] if place < len(lines) else None for lines in (ours, theirs))
    return [f"metrics.jsonl has {len(ours)} lines of {len(theirs)}; line {place} is {line}, not {expected}"]


def summary(folder: Path, undisturbed: Path) -> list[str]:
    """The same but for times, and the commit that was checked out."""
    ours, theirs = (read_json(run / SUMMARY_FILE) for run in (folder, undisturbed))
    for each in (ours, theirs):
        each["manifest"].pop("commit", None)
        for row in each["phases"]:
            row["seconds"] = 0
    return [] if ours == theirs else [f"summary.json is {ours}, not {theirs}"]


def checkpoints(folder: Path, undisturbed: Path) -> list[str]:
    """The same checkpoints, with weights, moments, learning-rate schedule and counts the same bit for bit."""
    ours, theirs = (saved_steps(str(run / "checkpoint")) for run in (folder, undisturbed))
    found = [] if ours == theirs else [f"there are checkpoints of steps {ours}, not {theirs}"]
    for step in sorted(set(ours) & set(theirs)):
        mine, other = (checkpoint_folder(run, step) for run in (folder, undisturbed))
        if _fingerprint(mine) != _fingerprint(other):  # equal objects may be pickled otherwise
            if different := _different_entries(contents(mine), contents(other)):
                found.append(f"the checkpoint of step {step} differs in {', '.join(different[:3])}")
    return found


def _fingerprint(checkpoint: Path) -> Any:
    """Every byte of the data, and what lies where in it. The metadata file itself has its folder's name and a random id."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    data = {path.name: path.read_bytes() for path in checkpoint.glob("*.distcp")}
    return data, metadata.state_dict_metadata, metadata.storage_data


def _different_entries(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)

    return [key for key in {**ours, **theirs} if not same(ours.get(key), theirs.get(key))]


def tensorboard(folder: Path, undisturbed: Path) -> list[str]:
    """One folder, and under each tag every step once, in order, with the undisturbed run's value."""
    found = []
    ours, theirs = (_scalars(run) for run in (folder, undisturbed))
    for tag in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(tag, []), theirs.get(tag, [])
        if [step for step, _ in mine] != [step for step, _ in other]:
            found.append(f"TensorBoard has {tag} of steps {[s for s, _ in mine]}, not {[s for s, _ in other]}")
        elif tag.rpartition("/")[2] not in MEASURED and mine != other:
            found.append(f"TensorBoard has other values of {tag}")
    return found


def _scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every tag, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns when it leaves out what a restart has replaced
    folders = {path.parent for path in run.rglob("events.out.tfevents.*")}
    if len(folders) != 1:
        raise ValueError(f"{len(folders)} folders with TensorBoard files")
    events = EventAccumulator(str(folders.pop()), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def files(folder: Path, undisturbed: Path) -> list[str]:
    """The same files and folders: nothing half-written or temporary is left, nothing is missing."""
    ours, theirs = (_files(run) for run in (folder, undisturbed))
    found = [f"left behind: {', '.join(sorted(ours - theirs))}"] if ours - theirs else []
    return found + ([f"missing: {', '.join(sorted(theirs - ours))}"] if theirs - ours else [])


def _files(run: Path) -> set[str]:
    names = {str(path.relative_to(run)) for path in run.rglob("*")}
    return {name for name in names if not re.search(r"events\.out\.tfevents|comm_traces", name)}
