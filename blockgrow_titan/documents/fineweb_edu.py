"""FineWeb-Edu's sample of 10 billion tokens, split into a held-out set and training documents.

    rows of sample-10BT, in the order of its files:   0 ... H - 1        H ... H + N - 1      H + N ...
                                                      held out           training shard       fresh documents

H is ``documents.held_out_documents`` (the paper's number is 4,833) and N ``documents.shard_documents``. Validation uses
exactly the first H rows; training document i is row H + i. So the two are disjoint by construction, every N begins with
the same documents, and a run with a larger N (the paper's longer joint controls) goes on to documents that no smaller
shard holds. The ids of both sets are compared as well, in case the files hold a document twice.

The rows come from the hub, or from a folder of the same Parquet files.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.documents.records import ReaderConfig, TextReader
from blockgrow_titan.documents.tables import DatasetsReader, ParquetReader, TableReader
from blockgrow_titan.paths import resolve

HUB_NAME = "HuggingFaceFW/fineweb-edu"
SAMPLE = "sample-10BT"
SAMPLE_FOLDER = os.path.join("sample", "10BT")  # of the repository's files


def _is_on_hub(path: str) -> bool:
    return path in ("", HUB_NAME) and not os.path.exists(path)


class _HubRows(DatasetsReader):
    """The sample's rows as ``datasets`` downloads and keeps them."""

    def _load(self, config: ReaderConfig) -> tuple[Any, str]:
        import datasets

        try:
            data = datasets.load_dataset(HUB_NAME, SAMPLE, split="train")
        except Exception as error:  # each of the libraries below has its own kinds for a network that fails
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(
                f'{config.field} = "{config.path}": {HUB_NAME} cannot be loaded from the hub ({reason[0]}). Download it '
                f'with: hf download {HUB_NAME} --repo-type dataset --include "{SAMPLE_FOLDER}/*" --local-dir FOLDER, and '
                f"set {config.field} to FOLDER"
            ) from error
        return data, f"{HUB_NAME}, {SAMPLE}"


class FineWebEduReader(TextReader):
    """Documents of one of the two sets, ``ReaderConfig.split``.

    ``dataset_path`` is empty or ``HuggingFaceFW/fineweb-edu`` for the hub, or a folder: of the Parquet files themselves
    or with the repository's layout, ``sample/10BT/*.parquet``. Of their columns, ``text`` (``documents.text_column``) and
    ``id`` are required.

    Raises:
        ValueError: If a column is missing, there are too few rows, or an ``id`` is in both sets.
    """

    def __init__(self, config: ReaderConfig) -> None:
        held_out, shard = config.held_out_documents, config.max_documents
        training = config.split == "train"
        wanted = held_out if not training else held_out + shard if shard >= 0 else -1
        self._rows = self._open_rows(dataclasses.replace(config, max_documents=wanted))
        found = len(self._rows)
        holds = f'{config.field} = "{config.path}" holds {found} documents'
        if training and shard >= 0 and found < wanted:
            raise ValueError(
                f"documents.shard_documents = {shard} and documents.held_out_documents = {held_out} need {wanted} documents, "
                f"but {holds}: set documents.shard_documents to {max(0, found - held_out)} at most, or to -1 for all that "
                "are not held out"
            )
        most = found - 1 if training else found
        if held_out > most or (held_out == 0 and not training):
            raise ValueError(
                f"documents.held_out_documents = {held_out}, but {holds}: set it to a number from 1 to {most}"
            )
        self._first = held_out if training else 0
        self._len = (shard if shard >= 0 else found - held_out) if training else held_out
        if training:
            self._check_disjoint(config.field)

    @classmethod
    def check_path(cls, path: str, field: str) -> None:
        """A name on the hub, which may be left empty, or something in the file system."""
        if not _is_on_hub(path):
            resolve(path, field)

    @classmethod
    def divided_path(cls, path: str) -> str | None:
        return HUB_NAME if _is_on_hub(path) else path

    @staticmethod
    def _open_rows(config: ReaderConfig) -> TableReader:
        if _is_on_hub(config.path):
            return _HubRows(config, needs_ids=True)
        folder = os.path.join(resolve(config.path, config.field), SAMPLE_FOLDER)
        if os.path.isdir(folder):
            config = dataclasses.replace(config, path=folder)
        return ParquetReader(config, needs_ids=True)

    def _check_disjoint(self, field: str) -> None:
        """No id may be both held out and trained on."""
        import pyarrow
        import pyarrow.compute

        rows, first = self._rows, self._first
        held_out = pyarrow.concat_arrays(
            [pyarrow.array([], pyarrow.large_string()), *(rows.record_ids(a, b) for a, b, _ in rows.pieces(0, first))]
        )
        for start, stop, _ in rows.pieces(first, first + self._len):
            ids = rows.record_ids(start, stop)
            place = pyarrow.compute.index(pyarrow.compute.is_in(ids, value_set=held_out), True).as_py()
            if place >= 0:
                raise ValueError(
                    f'{field}: id "{ids[place]}" is that of a held-out document and of {rows.where(start + place)}, which '
                    "would be trained on: remove one of the two, or choose other files"
                )

    def __len__(self) -> int:
        return self._len

    def where(self, i: int) -> str:
        return self._rows.where(self._first + i)

    def text(self, i: int) -> Any:
        return self._rows.text(self._first + i)

    def keys(self, first: int, last: int, tokenizer: HuggingFaceTokenizer) -> Iterator[bytes]:
        return self._rows.keys(self._first + first, self._first + last, tokenizer)
