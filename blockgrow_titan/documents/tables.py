"""Documents as rows of a table: Parquet files, Hugging Face datasets.

A table may have a column ``id``, of strings or integers; its rows are then identified by it, and only that column is
read to tell whether the data is the same.
"""

import os
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.documents.records import (
    BadDocumentError,
    OpenPerProcess,
    ReaderConfig,
    TextReader,
    files_of,
    require_text_column,
)
from blockgrow_titan.paths import PACKAGE_PREFIX, resolve

if TYPE_CHECKING:  # loaded by the readers below, for runs on tables only
    import pyarrow

ID_COLUMN = "id"
_ROWS_AT_A_TIME = 65_536


class TableReader(TextReader):
    """Rows with a text column and maybe an ``id``; rows without are identified as the base class does."""

    @abstractmethod
    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
        """Yield rows ``first`` to ``last`` - 1 in pieces (start, stop, whether they have ids) that are read at once."""

    @abstractmethod
    def record_ids(self, start: int, stop: int) -> "pyarrow.Array":
        """Return the ``id`` of the rows of one piece, as strings; reads no other column."""

    def keys(self, first: int, last: int, tokenizer: HuggingFaceTokenizer) -> Iterator[bytes]:
        """Yield each row's ``id`` and a newline: a text that changes under the same id goes unnoticed."""
        for start, stop, has_ids in self.pieces(first, last):
            if has_ids:
                for record_id in self.record_ids(start, stop).to_pylist():
                    yield f"{record_id}\n".encode()
            else:
                yield from super().keys(start, stop, tokenizer)

    @staticmethod
    def _check_columns(schema: "pyarrow.Schema", config: ReaderConfig, where: str, needs_ids: bool) -> bool:
        """Return whether a table has an ``id``, after checking that it has what it must have.

        Raises:
            BadDocumentError: If it lacks the text column, or the ``id`` that ``needs_ids`` asks for.
        """
        import pyarrow

        require_text_column(schema.names, config.text_column, where)
        kind = schema.field(ID_COLUMN).type if ID_COLUMN in schema.names else None
        usable = kind is not None and (pyarrow.types.is_integer(kind) or _is_string(kind))
        if needs_ids and not usable:
            found = f'"{ID_COLUMN}" is of type {kind}' if kind else f'there is no "{ID_COLUMN}"'
            raise BadDocumentError(
                f"{where}: {found}, but each document of this kind must have one, a string or an integer, to be told apart; "
                f"there are: {', '.join(schema.names)}"
            )
        return usable


def _is_string(kind: "pyarrow.DataType") -> bool:
    import pyarrow

    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)


def _as_strings(column: "pyarrow.ChunkedArray") -> "pyarrow.Array":
    import pyarrow

    column = column.cast(pyarrow.large_string()).combine_chunks()
    return column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column


class ParquetReader(TableReader):
    """Rows of a Parquet file or of a folder's ``*.parquet`` in order of their names; rows count from 0 in each file.

    Only the column that is asked for is read, one row group at a time, and the last row group of each column is kept:
    ranks and loader workers that stride over the rows in order decode every row group once. A row group that cannot be
    decoded ends the job whatever ``documents.on_bad_document`` says: it is many documents, not one.
    """

    def __init__(self, config: ReaderConfig, needs_ids: bool = False) -> None:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        self._errors = (OSError, ValueError, pyarrow.ArrowException)  # that a damaged file raises
        self._text_column = config.text_column
        # file, row group in it, row of the file that it starts with, whether it has ids
        self._groups: list[tuple[str, int, int, bool]] = []
        self._ends: list[int] = []  # documents up to the end of each row group
        for file in files_of(config, ".parquet"):
            if 0 <= config.max_documents <= len(self):
                break
            try:
                with ParquetFile(file) as parquet:
                    schema, metadata = parquet.schema_arrow, parquet.metadata
            except self._errors as error:
                raise ValueError(f'{config.field} = "{config.path}": {file} is not a Parquet file ({error})') from error
            has_ids = self._check_columns(schema, config, file, needs_ids)
            first_row = 0
            for group in range(metadata.num_row_groups):
                num_rows = metadata.row_group(group).num_rows
                self._groups.append((file, group, first_row, has_ids))
                self._ends.append(len(self) + num_rows)
                first_row += num_rows
        self._open = OpenPerProcess(ParquetFile)
        self._cached: dict[str, tuple[int, Any]] = {}  # column: row group, its values

    def _column(self, group: int, name: str) -> "pyarrow.ChunkedArray":
        cached_group, column = self._cached.get(name, (-1, None))
        if group != cached_group:
            file, group_of_file, *_ = self._groups[group]
            try:
                column = self._open(file).read_row_group(group_of_file, columns=[name], use_threads=False)[name]
            except self._errors as error:
                raise ValueError(f"{file}: row group {group_of_file} cannot be read ({error})") from error
            self._cached[name] = (group, column)
        return column

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _group_and_row(self, i: int) -> tuple[int, int]:
        group = bisect_right(self._ends, i)
        return group, i - (self._ends[group - 1] if group else 0)

    def where(self, i: int) -> str:
        group, row = self._group_and_row(i)
        file, _, first_row, _ = self._groups[group]
        return f"{file}, row {first_row + row}"

    def text(self, i: int) -> Any:
        group, row = self._group_and_row(i)
        return self._column(group, self._text_column)[row].as_py()

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
        while first < last:
            group, _ = self._group_and_row(first)
            stop = min(last, self._ends[group])
            yield first, stop, self._groups[group][-1]
            first = stop

    def record_ids(self, start: int, stop: int) -> "pyarrow.Array":
        group, row = self._group_and_row(start)
        return _as_strings(self._column(group, ID_COLUMN).slice(row, stop - start))


class DatasetsReader(TableReader):
    """Rows of a Hugging Face dataset: a ``save_to_disk`` folder, or whatever ``datasets.load_dataset`` takes."""

    def __init__(self, config: ReaderConfig, needs_ids: bool = False) -> None:
        data, self._name = self._load(config)
        has_ids = self._check_columns(data.features.arrow_schema, config, self._name, needs_ids)
        self._text_column = config.text_column
        self._data = data.select_columns([config.text_column])
        self._ids = data.select_columns([ID_COLUMN]).with_format("arrow") if has_ids else None

    @classmethod
    def check_path(cls, path: str, field: str) -> None:
        """Only that ``path`` is not empty: it may be a name on the hub."""
        if not path:
            raise ValueError(f"{field} is empty; set it to a dataset's folder, or to its name on the hub")

    def _load(self, config: ReaderConfig) -> tuple[Any, str]:
        """Return the dataset and how errors name it."""
        import datasets

        path = config.path
        self.check_path(path, config.field)
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
        except Exception as error:  # of a damaged folder or a network that fails: each library below has its own kinds
            raise ValueError(f'{config.field} = "{config.path}" cannot be loaded from {path}: {error}') from error
        return data, f"{path}, split {config.split}"

    def __len__(self) -> int:
        return len(self._data)

    def where(self, i: int) -> str:
        return f"{self._name}, row {i}"

    def text(self, i: int) -> Any:
        return self._data[i][self._text_column]

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
        for start in range(first, last, _ROWS_AT_A_TIME):
            yield start, min(last, start + _ROWS_AT_A_TIME), self._ids is not None

    def record_ids(self, start: int, stop: int) -> "pyarrow.Array":
        assert self._ids is not None
        return _as_strings(self._ids[start:stop][ID_COLUMN])
