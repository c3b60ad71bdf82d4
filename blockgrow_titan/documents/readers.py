"""Where record i of a dataset is, and how to read it.

There is one reader for each kind of dataset, registered in ``RECORD_READERS`` under the name that ``training.dataset``
and ``validation.dataset`` take. A new kind is a new ``TextReader``, or ``RecordReader`` for token ids, and a
line there.

Footgun: a forked loader worker shares its parent's file offsets, and a spawned one cannot take an open file along, so
files are opened anew in each process (``_OpenPerProcess``).
"""

import json
import os
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.paths import PACKAGE_PREFIX, resolve


class BadDocumentError(ValueError):
    """A record that cannot be turned into a document; the text names its file and line or row, and the reason."""


@dataclass(frozen=True)
class ReaderConfig:
    """What a record reader is built from."""

    path: str
    """File, folder, ``package:...`` or, for some kinds, a name on the hub."""
    field: str
    """Config field that holds ``path``, for errors."""
    text_column: str
    """Field of a record that holds its text."""
    split: str
    """Split of datasets that have several."""
    max_documents: int
    """Documents that will be asked for at most, -1: all. A reader need not look for more."""


class RecordReader(ABC):
    """The records of one dataset by index, readable from any process."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of records, or any number from ``ReaderConfig.max_documents`` up if there are more."""

    @abstractmethod
    def where(self, i: int) -> str:
        """Return where record i stands: file and line, or file and row."""

    @abstractmethod
    def ids(self, i: int, tokenizer: HuggingFaceTokenizer) -> list[int]:
        """Return the token ids of record i, without the end of the document; may raise ``BadDocumentError``."""


class TextReader(RecordReader):
    """Records with a text column."""

    @abstractmethod
    def text(self, i: int) -> Any:
        """Return the text column of record i as it is stored.

        Raises:
            BadDocumentError, UnicodeDecodeError: If it cannot be read.
        """

    def ids(self, i: int, tokenizer: HuggingFaceTokenizer) -> list[int]:
        try:
            text = self.text(i)
        except UnicodeDecodeError as error:
            raise BadDocumentError(f"{self.where(i)}: not UTF-8 ({error.reason} at byte {error.start})") from error
        if not isinstance(text, str):
            raise BadDocumentError(f"{self.where(i)}: the text is of type {type(text).__name__}, not a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair: "\ud83d"
            raise BadDocumentError(f"{self.where(i)}: the text is not valid Unicode ({error.reason})") from error
        return tokenizer.encode(text, add_bos=False, add_eos=False)


def _require_column(columns: list[str], text_column: str, where: str) -> None:
    if text_column not in columns:
        raise BadDocumentError(
            f'{where}: there is no "{text_column}", which documents.text_column names; '
            f"there are: {', '.join(columns) or 'none'}"
        )


def _files_of(config: ReaderConfig, suffix: str) -> list[str]:
    """Return the one file, or the folder's files with this suffix sorted by name."""
    path = resolve(config.path, config.field)
    if os.path.isfile(path):
        return [path]
    names = sorted(name for name in os.listdir(path) if name.endswith(suffix))
    if not names:
        raise ValueError(f'{config.field} = "{config.path}": the folder {path} has no *{suffix} file')
    return [os.path.join(path, name) for name in names]


class _OpenPerProcess:
    """Keeps the last thing opened, and opens it again in every process that asks, forked or spawned."""

    def __init__(self, open_: Callable[[Any], Any]) -> None:
        self._open = open_
        self._key: tuple[int, Any] | None = None
        self._opened: Any = None

    def __call__(self, what: Any) -> Any:
        key = (os.getpid(), what)
        if key != self._key:
            self._close()
            self._opened, self._key = self._open(what), key
        return self._opened

    def _close(self) -> None:
        opened, self._opened, self._key = self._opened, None, None
        if hasattr(opened, "close"):
            opened.close()

    def __del__(self) -> None:
        self._close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_open": self._open, "_key": None, "_opened": None}


class JsonlReader(TextReader):
    """One JSON object a line, from a file or from a folder's ``*.jsonl`` in order of their names.

    The byte offset of every line is found once, at the start; records are then read by offset. Blank lines at the end
    of a file are no records; others are bad ones.
    """

    def __init__(self, config: ReaderConfig) -> None:
        self._files = _files_of(config, ".jsonl")
        self._text_column = config.text_column
        self._ends: list[int] = []  # documents up to the end of each file
        offsets = []
        for file in self._files:
            if 0 <= config.max_documents <= len(self):
                break
            offsets.append(self._line_offsets(file, config.max_documents))
            self._ends.append(len(self) + len(offsets[-1]))
        self._offsets = np.concatenate(offsets)
        self._open = _OpenPerProcess(partial(open, mode="rb"))

    @staticmethod
    def _line_offsets(file: str, max_lines: int) -> np.ndarray:
        """Return where each line starts, int64 [lines]; the first ``max_lines`` of them unless that is negative."""
        offsets, offset, lines = array("q"), 0, 0  # lines: up to the last one that is not blank
        with open(file, "rb") as stream:
            for line in stream:
                offsets.append(offset)
                offset += len(line)
                if not line.isspace():
                    lines = len(offsets)
                if 0 <= max_lines <= lines:
                    lines = max_lines
                    break
        return np.array(offsets[:lines], dtype=np.int64)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _file_and_line(self, i: int) -> tuple[str, int]:
        file = bisect_right(self._ends, i)
        return self._files[file], i - (self._ends[file - 1] if file else 0) + 1

    def where(self, i: int) -> str:
        file, line = self._file_and_line(i)
        return f"{file}:{line}"

    def text(self, i: int) -> Any:
        stream = self._open(self._file_and_line(i)[0])
        stream.seek(int(self._offsets[i]))
        line = stream.readline().decode("utf-8").rstrip("\n")
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadDocumentError(f"{self.where(i)}: not JSON ({error.msg}: column {error.colno})") from error
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, objects too deep
            raise BadDocumentError(f"{self.where(i)}: JSON that cannot be read ({error})") from error
        if not isinstance(record, dict):
            raise BadDocumentError(f"{self.where(i)}: a JSON {type(record).__name__}, not an object")
        _require_column(list(record), self._text_column, self.where(i))
        return record[self._text_column]


class ParquetReader(TextReader):
    """Rows of a Parquet file or of a folder's ``*.parquet`` in order of their names; rows count from 0 in each file.

    Only the text column is read, one row group at a time, and the last row group is kept. A row group that cannot be
    decoded ends the job whatever ``documents.on_bad_document`` says: it is many documents, not one.
    """

    def __init__(self, config: ReaderConfig) -> None:
        from pyarrow.parquet import ParquetFile

        self._text_column = config.text_column
        self._groups: list[tuple[str, int, int]] = []  # file, row group in it, row of the file that it starts with
        self._ends: list[int] = []  # documents up to the end of each row group
        for file in _files_of(config, ".parquet"):
            if 0 <= config.max_documents <= len(self):
                break
            try:
                with ParquetFile(file) as parquet:
                    columns, metadata = parquet.schema_arrow.names, parquet.metadata
            except (OSError, ValueError) as error:
                raise ValueError(f'{config.field} = "{config.path}": {file} is not a Parquet file ({error})') from error
            _require_column(columns, config.text_column, file)
            first_row = 0
            for group in range(metadata.num_row_groups):
                num_rows = metadata.row_group(group).num_rows
                self._groups.append((file, group, first_row))
                self._ends.append(len(self) + num_rows)
                first_row += num_rows
        self._open = _OpenPerProcess(ParquetFile)
        self._cached_group = -1
        self._cached_column: Any = None

    def _read_group(self, group: int) -> Any:
        file, group_of_file, _ = self._groups[group]
        try:
            table = self._open(file).read_row_group(group_of_file, columns=[self._text_column], use_threads=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: row group {group_of_file} cannot be read ({error})") from error
        return table[self._text_column]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _group_and_row(self, i: int) -> tuple[int, int]:
        group = bisect_right(self._ends, i)
        return group, i - (self._ends[group - 1] if group else 0)

    def where(self, i: int) -> str:
        group, row = self._group_and_row(i)
        file, _, first_row = self._groups[group]
        return f"{file}, row {first_row + row}"

    def text(self, i: int) -> Any:
        group, row = self._group_and_row(i)
        if group != self._cached_group:
            self._cached_column, self._cached_group = self._read_group(group), group
        return self._cached_column[row].as_py()


class DatasetsReader(TextReader):
    """Rows of a Hugging Face dataset: a ``save_to_disk`` folder, or whatever ``datasets.load_dataset`` takes."""

    def __init__(self, config: ReaderConfig) -> None:
        import datasets

        path = config.path
        if path.startswith(PACKAGE_PREFIX) or os.path.exists(os.path.expanduser(path)):
            path = resolve(path, config.field)
        on_disk = (datasets.config.DATASET_STATE_JSON_FILENAME, datasets.config.DATASETDICT_JSON_FILENAME)
        try:
            if any(os.path.isfile(os.path.join(path, name)) for name in on_disk):
                data = datasets.load_from_disk(path)
                if isinstance(data, datasets.DatasetDict):
                    if config.split not in data:
                        raise ValueError(f'there is no split "{config.split}"; there are: {", ".join(data)}')
                    data = data[config.split]
            else:
                data = datasets.load_dataset(path, split=config.split)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(f'{config.field} = "{config.path}" cannot be loaded from {path}: {error}') from error
        self._name = f"{path}, split {config.split}"
        _require_column(data.column_names, config.text_column, self._name)
        self._text_column = config.text_column
        self._data = data.select_columns([config.text_column])

    def __len__(self) -> int:
        return len(self._data)

    def where(self, i: int) -> str:
        return f"{self._name}, row {i}"

    def text(self, i: int) -> Any:
        return self._data[i][self._text_column]


# The kinds of datasets, by the names that `training.dataset` and `validation.dataset` take. Add yours here.
RECORD_READERS: dict[str, Callable[[ReaderConfig], RecordReader]] = {
    "jsonl": JsonlReader,
    "parquet": ParquetReader,
    "datasets": DatasetsReader,
}
