"""A folder that appears whole or not at all."""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan.tools.logging import logger

from blockgrow_titan.checkpoint_files import sync


def check_output(out: str | Path, source: str | Path | None = None) -> Path:
    """The real path of a folder to be written.

    Args:
        out: Its name.
        source: The folder that is read, which must not come to hold it.

    Raises:
        ValueError: If something is there that would be overwritten, or the folder cannot be made.
    """
    path = Path(os.path.realpath(os.path.expanduser(out)))
    if source is not None and Path(os.path.realpath(os.path.expanduser(source))) in path.parents:
        raise ValueError(f"{path} is inside {source}, which is read: give a folder elsewhere")
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        what = "is not empty" if path.is_dir() else "is not a folder"
        raise ValueError(f"{path} exists and {what}: give a new folder, or remove it")
    if path.is_dir() and (path == Path.cwd() or os.path.ismount(path)):
        what = "the current folder" if path == Path.cwd() else "a mount point"
        raise ValueError(f"{path} is {what}, which a finished folder cannot replace: give a new folder in it")
    parent = existing_parent(path)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        what = "cannot be written" if parent.is_dir() else "is not a folder"
        raise ValueError(f"{path} cannot be made: {parent} {what}; give a folder elsewhere")
    return path


def check_space(out: Path, needed: int) -> None:
    """Refuse a disk that is too small for so many bytes, before anything is written.

    Raises:
        ValueError: Naming both numbers.
    """
    parent = existing_parent(out)
    if (free := shutil.disk_usage(parent).free) < needed:
        raise ValueError(
            f"{out} needs {needed:,} bytes, but {parent} has {free:,} free: make room, or give another disk"
        )


def existing_parent(path: Path) -> Path:
    """The nearest parent that is there."""
    return next(parent for parent in path.parents if os.path.lexists(parent))


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A new folder beside ``out`` that takes its name at the end; on any error, or Ctrl-C, it is removed.

    Files must be synced by whoever writes them. What a killed run has left of the same ``out`` is removed first; a living
    one holds a lock on its folder.

    Raises:
        ValueError: If ``out`` is not empty, cannot be made or written, or is being written.
    """
    path = check_output(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.iterdir():
            if left.is_dir() and re.fullmatch(rf"{re.escape(path.name)}\.partial-[a-z0-9_]{{8}}", left.name):
                with _locked(left):
                    shutil.rmtree(left)
        folder = Path(tempfile.mkdtemp(prefix=f"{path.name}.partial-", dir=path.parent))
        try:
            with _locked(folder):
                yield folder
                folder.chmod(0o777 & ~_umask())  # mkdtemp's are private
                sync(folder)
                os.rename(folder, path)  # also onto an empty folder
                sync(path.parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise ValueError(f"{path} could not be written ({error}): make room, or give another folder") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{folder} is being written by another conversion: wait for it, or give another folder"
            ) from error
        except OSError:  # a file system without locks
            logger.warning(f"{folder} cannot be locked: do not convert to it twice at a time")
        yield
    finally:
        os.close(descriptor)


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
