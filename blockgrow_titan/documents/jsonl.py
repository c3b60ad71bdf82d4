"""Documents as lines of JSON."""

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.documents.records import (
    BadDocumentError,
    OpenPerProcess,
    ReaderConfig,
    TextReader,
    files_of,
    require_text_column,
)

COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")  # how files of gzip and zstd begin


class JsonlReader(TextReader):
    """One JSON object a line, from a file or from a folder's ``*.jsonl`` in order of their names.

    The byte offset of every line is found once, at the start; records are then read by offset. Blank lines at the end
    of a file are no records; others are bad ones. A byte order mark at the start of a file is no part of its first record.
    """

    def __init__(self, config: ReaderConfig) -> None:
        self._files = files_of(config, ".jsonl")
        self._text_column = config.text_column
        self._ends: list[int] = []  # documents up to the end of each file
        offsets = []
        for file in self._files:
            if 0 <= config.max_documents <= len(self):
                break
            try:
                offsets.append(self._line_offsets(file, config.max_documents))
            except OSError as error:
                raise ValueError(
                    f'{config.field} = "{config.path}": {file} cannot be read ({error.strerror})'
                ) from error
            self._ends.append(len(self) + len(offsets[-1]))
        self._offsets = np.concatenate(offsets)
        self._open = OpenPerProcess(partial(open, mode="rb"))

    @staticmethod
    def _line_offsets(file: str, max_lines: int) -> np.ndarray:
        """Return where each line starts, int64 [lines]; the first ``max_lines`` of them unless that is negative."""
        offsets, offset, lines = array("q"), 0, 0  # lines: up to the last one that is not blank
        with open(file, "rb") as stream:
            for line in stream:
                if offset == 0 and line.startswith(COMPRESSED):
                    raise ValueError(f"{file} is compressed: decompress it first, with gunzip or unzstd")
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

    def _line(self, i: int) -> bytes:
        stream = self._open(self._file_and_line(i)[0])
        stream.seek(int(self._offsets[i]))
        return stream.readline()

    def where(self, i: int) -> str:
        file, line = self._file_and_line(i)
        return f"{file}:{line}"

    def keys(self, first: int, last: int, tokenizer: HuggingFaceTokenizer) -> Iterator[bytes]:
        """Yield the bytes of each line: every edit shows, also one that changes no length, for one read of the file."""
        for i in range(first, last):
            line = self._line(i)
            yield line if line.endswith(b"\n") else line + b"\n"

    def text(self, i: int) -> Any:
        line = self._line(i).decode("utf-8").rstrip("\n")
        if self._offsets[i] == 0:
            line = line.removeprefix("\ufeff")
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadDocumentError(f"{self.where(i)}: not JSON ({error.msg}: column {error.colno})") from error
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, objects too deep
            raise BadDocumentError(f"{self.where(i)}: JSON that cannot be read ({error})") from error
        if not isinstance(record, dict):
            raise BadDocumentError(f"{self.where(i)}: a JSON {type(record).__name__}, not an object")
        require_text_column(list(record), self._text_column, self.where(i))
        return record[self._text_column]
