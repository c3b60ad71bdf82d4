"""torch's distributed checkpoint (DCP) with checksums, and without trust in pickles.

torch's own writer and reader do the work; here they get what they lack:

- ``ChecksumWriter``: each rank hashes the files that it wrote, the coordinator writes ``checksums.json``, and only then
  does ``.metadata`` get its name (``checkpoint_files.py`` says why).
- ``load_checkpoint``: ``.metadata`` is a pickle, and so is every value that is no tensor. Both are read by unpicklers that
  know the few harmless classes of a checkpoint and refuse any other by name.
- ``failures_named``: what stopped a save, as one line.
"""

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from blockgrow_titan.checkpoint_files import METADATA, FileRecord, record_of, sync, write_checksums

# What the .metadata of a checkpoint names; torch.float32 and other data types besides.
_METADATA_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # in Python 3.13
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; its text is one line that names step, file and cause."""


class _Files(FileSystem):
    """torch's access to files, but errors name the file, and ``.metadata`` comes after ``checksums.json``."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except (OSError, RuntimeError) as error:
            cause = hidden_cause(error)
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror, str(path)) from None
            raise cause from None

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        folder = os.path.dirname(new_path)
        write_checksums(folder, self.records | {os.path.basename(new_path): record_of(path)})
        super().rename(path, new_path)
        sync(folder)


class ChecksumWriter(FileSystemWriter):
    """``FileSystemWriter`` whose folder ends with checksums of all its files."""

    fs: _Files

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.fs = _Files()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files and hash them; their records travel to the coordinator beside torch's results."""
        results = list(super().write_data(plan, planner).value())
        for path in sorted(Path(self.path).glob(f"{plan.storage_data.prefix}*")):
            record = record_of(path)
            results.append(WriteResult(MetadataIndex(path.name), record["bytes"], record))
        sync(self.path)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [(result, isinstance(result.storage_data, dict)) for of_rank in results for result in of_rank]
        self.fs.records = {result.index.fqn: result.storage_data for result, is_record in written if is_record}
        super().finish(metadata, [[result for result, is_record in written if not is_record]])


def _enum_member(enum: Any, name: str) -> Any:
    """``getattr`` for a member of the one enum in a ``.metadata``: Python 3.11.0 to 3.11.3 pickle it as that call."""
    if enum is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it takes {name!r} of {enum!r}, which the {METADATA} of a checkpoint never does")
    return enum[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _METADATA_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which the {METADATA} of a checkpoint never does")


class CheckpointReader(FileSystemReader):
    """``FileSystemReader`` that builds nothing from ``.metadata`` but what a checkpoint is made of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``.

        Raises:
            ValueError: If it is damaged, or is no checkpoint's; the text names it and what it holds.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        with open(path, "rb") as file:
            try:
                metadata = _MetadataUnpickler(file).load()
            except Exception as error:  # a damaged pickle raises almost anything
                raise ValueError(f"{path} cannot be read ({one_line(error)})") from error
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{path} cannot be read (it holds {type(metadata).__name__}, not a checkpoint's metadata)")
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()  # as torch does
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _ValuesPlanner(DefaultLoadPlanner):
    """torch's planner, but what is no tensor is loaded with ``weights_only``: numbers, texts, lists and the like."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        fqn = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            named = re.search(r"GLOBAL (\S+)", str(error))  # in the middle of torch's advice
            what = f"it names {named[1]}" if named else one_line(error)
            raise ValueError(f"its entry {fqn} is not of numbers, texts and lists of them: {what}") from error
        set_element(self.original_state_dict, self.mappings[fqn], loaded)


def load_checkpoint(state: dict[str, Any], folder: str | Path, *, no_dist: bool = False) -> None:
    """``dcp.load`` without trust in the files; see there.

    Raises:
        ValueError: On every rank, whatever stopped it on any; one line that names the folder.
    """
    try:
        dcp.load(state, storage_reader=CheckpointReader(folder), planner=_ValuesPlanner(), no_dist=no_dist)
    except (Exception, CheckpointException) as error:
        cause, _ = cause_of(error)
        if not isinstance(cause, Exception):  # Ctrl-C, which torch wraps too
            raise cause from None
        advice = "a file of it may be absent, cut off or damaged; copy it again or use another checkpoint"
        raise ValueError(
            f"{folder} cannot be read ({one_line(cause)}){'' if isinstance(cause, ValueError) else f': {advice}'}"
        ) from error


def hidden_cause(error: BaseException) -> BaseException:
    """What stopped torch's zip writer, a full disk or Ctrl-C: it hides that behind an error of its own."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt | OSError):
        seen = seen.__cause__ or seen.__context__
    return seen or error


def cause_of(error: BaseException) -> tuple[BaseException, int | None]:
    """The error that a rank met, and which rank; None if torch did not gather it from the ranks."""
    if not isinstance(error, CheckpointException):
        return error, None
    rank = min(error.failures, key=lambda rank: (not isinstance(error.failures[rank][0], OSError), rank))
    return error.failures[rank][0], rank


def one_line(error: BaseException) -> str:
    """The essence of an error, which may be torch's and run over many lines."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


@contextmanager
def failures_named(what: str) -> Iterator[None]:
    """Turn whatever stops a save into a ``CheckpointError`` of one line; torch's is no ``Exception``.

    Args:
        what: What could not be done, to begin the line with.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        if isinstance(error, CheckpointError):
            raise
        cause, rank = cause_of(error)
        if not isinstance(cause, Exception):  # Ctrl-C, which torch wraps too
            raise cause from None
        where = "" if rank is None else f" (student rank {rank})"
        expected = isinstance(cause, OSError)  # then its traceback says nothing more
        raise CheckpointError(f"{what}: {one_line(cause)}{where}") from (None if expected else error)
