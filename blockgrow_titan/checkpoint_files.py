"""A checkpoint's folder on disk: whether it is whole, what its files were when they were written, which folders go.

A save empties its step's folder, then writes in this order, each thing on disk before the next begins:

    manifest.json -> every rank's data files -> checksums.json -> .metadata

``.metadata`` gets its name last and loses it first when a checkpoint is removed, so a folder that has it is whole, wherever
a crash fell. (A last step in Hugging Face's format has no ``.metadata``: there it is ``checksums.json`` that comes last.)
``checksums.json`` has size and SHA-256 of every other file, and the SHA-256 of its own entries. Nothing here knows torch.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

METADATA = ".metadata"
CHECKSUMS = "checksums.json"
HF_INDEX = "model.safetensors.index.json"


class FileRecord(TypedDict):
    """What a file was when it was written."""

    bytes: int
    sha256: str


def is_whole(folder: str) -> bool:
    """Whether a save into this folder was finished."""
    has = {name: os.path.isfile(os.path.join(folder, name)) for name in (METADATA, HF_INDEX, CHECKSUMS)}
    return has[METADATA] or (has[HF_INDEX] and has[CHECKSUMS])


def steps_of(folder: str) -> dict[int, bool]:
    """Step -> whether its checkpoint is whole, for every ``step-N`` of a checkpoint folder, rising."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)", name))]
    return {step: is_whole(os.path.join(folder, f"step-{step}")) for step in sorted(steps)}


def saved_steps(folder: str) -> list[int]:
    """Steps of the whole checkpoints in a folder, rising."""
    return [step for step, whole in steps_of(folder).items() if whole]


def stale_steps(steps: dict[int, bool], keep: int, boundaries: Collection[int] = ()) -> list[int]:
    """Steps whose folders are to be removed.

    Args:
        steps: Step -> whether its checkpoint is whole (``steps_of``).
        keep: Whole checkpoints to keep, the newest ones; 0: all.
        boundaries: Steps whose checkpoints are kept and do not count.

    Returns:
        What falls out of ``keep``, and what is half-written and older than the newest whole checkpoint (a younger one may
        be being written). Never the newest whole one.
    """
    whole = [step for step in sorted(steps) if steps[step]]
    if not whole:
        return []
    counted = [step for step in whole if step not in boundaries]
    surplus = set(counted[:-keep] if keep else ()) - {whole[-1]}
    return [step for step in sorted(steps) if step in surplus or (not steps[step] and step < whole[-1])]


def unmark(folder: str) -> None:
    """Take from a checkpoint what says that it is whole, before anything else of it is removed."""
    for name in (METADATA, HF_INDEX):
        if os.path.lexists(path := os.path.join(folder, name)):
            os.remove(path)
            sync(folder)


def empty(folder: str) -> None:
    """Make a step's folder, without what an earlier save has left there."""
    if os.path.isdir(folder):
        unmark(folder)
        shutil.rmtree(folder)
    os.makedirs(folder)


@contextmanager
def errors_name(path: str | os.PathLike) -> Iterator[None]:
    """A full disk is met in a write or a sync, which do not know the file's name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(path: str | os.PathLike) -> None:
    """Wait until a file's content, or a folder's list of files, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with errors_name(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: str, content: object) -> None:
    """Write a JSON file, whole or not at all; on disk when this returns."""
    with errors_name(path), open(f"{path}.tmp", "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)
    sync(os.path.dirname(path))


def record_of(path: str | os.PathLike) -> FileRecord:
    """A file's size and SHA-256."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def write_checksums(folder: str, records: dict[str, FileRecord]) -> None:
    """Write ``checksums.json``.

    Args:
        folder: The checkpoint, of which everything but ``.metadata`` has its name already.
        records: File name -> record. The folder's other visible files (the manifest) are synced and recorded here.
    """
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name not in records and not name.startswith(".") and os.path.isfile(path):
            sync(path)
            records = records | {name: record_of(path)}
    write_json(os.path.join(folder, CHECKSUMS), {"files": records, "sha256": _digest(records)})


def read_checksums(folder: str) -> dict[str, FileRecord] | None:
    """File name -> record; None if the checkpoint has no ``checksums.json`` (an older version wrote it, or another tool).

    Raises:
        ValueError: If it is not as it was written.
    """
    try:
        with open(os.path.join(folder, CHECKSUMS), encoding="utf-8") as file:
            content = json.load(file)
        if content["sha256"] == _digest(content["files"]):
            return content["files"]
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(f"{CHECKSUMS} is altered")


def _digest(records: dict[str, FileRecord]) -> str:
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def find_damage(
    folder: str, part: int = 0, parts: int = 1, except_for: Collection[str] = (), sizes_only: bool = False
) -> list[str]:
    """What is wrong with the files of a checkpoint; empty if nothing is, or it has no ``checksums.json``.

    Args:
        folder: The checkpoint.
        part: Look at every ``parts``-th file, from this one on: the ranks share the work.
        parts: 1: look at all of them.
        except_for: Names of files that may differ.
        sizes_only: Do not read the data files (``*.distcp``), which may be large.
    """
    try:
        records = read_checksums(folder) or {}
    except (OSError, ValueError) as error:
        return [_text(CHECKSUMS, error)]
    problems = [
        _problem(os.path.join(folder, name), records[name], sizes_only and name.endswith(".distcp"))
        for name in sorted(records)[part::parts]
        if name not in except_for
    ]
    return [problem for problem in problems if problem]


def _problem(path: str, written: FileRecord, size_only: bool) -> str | None:
    name = os.path.basename(path)
    try:
        if (size := os.path.getsize(path)) != written["bytes"]:
            return f"{name} has {size:,} bytes instead of {written['bytes']:,}"
        if not size_only and record_of(path) != written:
            return f"{name} is altered: its SHA-256 is not the one in {CHECKSUMS}"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return _text(name, error)
    return None


def _text(name: str, error: Exception) -> str:
    return f"{name} cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)


def damaged(folder: str, problems: list[str], resumes: bool) -> ValueError:
    """The refusal of a damaged checkpoint, with the way out.

    Args:
        folder: The checkpoint.
        problems: What ``find_damage`` found.
        resumes: Whether a run was to go on from it.
    """
    way_out = "Copy it again, or use another checkpoint"
    if resumes and (match := re.fullmatch(r"step-(\d+)", os.path.basename(folder))):
        earlier = [step for step in saved_steps(os.path.dirname(folder)) if step < int(match[1])]
        then = f"goes on from step-{earlier[-1]}" if earlier else "starts from its first step"
        way_out = f"Move that folder away, and the run {then}; or put back the file as it was"
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return ValueError(f"{folder} is damaged: {'; '.join(problems[:3])}{more}. {way_out}")


def check_writable(folder: str, field: str) -> None:
    """Refuse a folder in which no file can be made. It is tried: root ignores permissions, and a mount may be read-only.

    Raises:
        ValueError: Naming the field, the folder and the cause.
    """
    path = Path(os.path.abspath(folder))
    there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        where = "" if there == path else f" ({there} is as much of it as is there)"
        raise ValueError(
            f"{field} is {folder}, where no file can be written: {error.strerror}{where}. Make it writable or make room, or "
            "give another folder"
        ) from error
