"""Documents that were tokenised ahead of time (``tools/prepare_data.py``), read through memory maps.

    folder/dataset.json      what the documents are: source, tokenizer, longest document, shards, bad documents
    folder/00000.ids         the shard's token ids, one document after the other, uint16 or uint32
    folder/00000.offsets     int64 [documents + 1]: document j of the shard is ids[offsets[j] : offsets[j + 1]]
    folder/00000.digests     32 bytes [documents]: the source's ``digest`` up to and including each document

The ids carry no end of document and are cut to the longest document that was asked for; the source adds and cuts as it
does for text, so a run on these files trains on the same batches as one that tokenises on the fly.
"""

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.documents.records import (
    BadDocumentError,
    OpenPerProcess,
    ReaderConfig,
    RecordReader,
    tokenizer_parts,
)
from blockgrow_titan.paths import read_json_object, resolve

FORMAT = 1
INDEX_FILE = "dataset.json"
ID_TYPES = ("uint16", "uint32")
MEND = "copy the folder again, or prepare the data again"
DIGEST_BYTES = hashlib.sha256().digest_size


def tokenizer_fingerprint(tokenizer: HuggingFaceTokenizer) -> str:
    """Return SHA-256 over ``tokenizer_parts``."""
    return hashlib.sha256(json.dumps(tokenizer_parts(tokenizer), sort_keys=True).encode()).hexdigest()


def id_type(tokenizer: HuggingFaceTokenizer) -> str:
    """Return the smallest of "uint16" and "uint32" that holds every id of a tokenizer."""
    return "uint16" if max(tokenizer.get_vocab().values()) <= np.iinfo(np.uint16).max else "uint32"


@dataclass(frozen=True)
class Shard:
    """One shard of a folder: its files and how long they are."""

    folder: str
    number: int
    documents: int
    tokens: int
    id_type: str

    def file(self, what: str) -> str:
        """Return the path of "ids", "offsets" or "digests"."""
        return os.path.join(self.folder, f"{self.number:05d}.{what}")

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {
            "ids": self.tokens * np.dtype(self.id_type).itemsize,
            "offsets": (self.documents + 1) * np.dtype(np.int64).itemsize,
            "digests": self.documents * DIGEST_BYTES,
        }

    def check_files(self) -> None:
        """Raise ``ValueError`` if a file is missing or has another size than it was written with."""
        for what, size in self.sizes.items():
            path = self.file(what)
            found = os.path.getsize(path) if os.path.isfile(path) else None
            if found != size:
                problem = "is missing" if found is None else f"has {found} bytes, not the {size} it was written with"
                raise ValueError(f"{path} {problem}: {MEND}")

    def open(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the maps of ids [tokens] and offsets [documents + 1]."""
        offsets = np.memmap(self.file("offsets"), dtype=np.int64, mode="r")
        if not self.tokens:  # an empty file cannot be mapped
            return np.zeros(0, dtype=self.id_type), offsets
        return np.memmap(self.file("ids"), dtype=self.id_type, mode="r"), offsets

    def digest(self, j: int) -> bytes:
        """Return the source's digest up to and including document j of the shard."""
        with open(self.file("digests"), "rb") as stream:
            stream.seek(j * DIGEST_BYTES)
            return stream.read(DIGEST_BYTES)


def read_index(folder: str) -> dict[str, Any]:
    """Return a folder's ``dataset.json``.

    Raises:
        ValueError: If there is none, it is not JSON, it has another format, or a field of it is not what it must be.
    """
    path = os.path.join(folder, INDEX_FILE)
    remedy = "prepare the data again (tools/prepare_data.py makes such folders, OUT/train and OUT/validation)"
    index = read_json_object(path, remedy)
    if index.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}: prepare the data again with this version")
    for name, holds in _INDEX_FIELDS.items():
        if not holds(index.get(name)):
            raise ValueError(f"{path} has a wrong {name}: {MEND}")
    return index


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_source(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(value.get(name), str) for name in ("kind", "path", "split")):
        return False
    held_out = value.get("held_out_documents", "absent")
    return held_out is None or _is_count(held_out)


_INDEX_FIELDS: dict[str, Callable[[Any], bool]] = {
    "tokenizer": lambda value: isinstance(value, str),
    "digest": lambda value: isinstance(value, str),
    "id_type": lambda value: value in ID_TYPES,
    "max_length": _is_count,
    "source": _is_source,
    "shards": lambda value: (
        isinstance(value, list)
        and all(isinstance(shard, list) and len(shard) == 2 and all(map(_is_count, shard)) for shard in value)
    ),
    "bad_documents": lambda value: (
        isinstance(value, dict)
        and all(re.fullmatch(r"\d{1,18}", i) and isinstance(text, str) for i, text in value.items())
    ),
}


class PretokenizedReader(RecordReader):
    """Documents of a folder that ``tools/prepare_data.py`` made.

    Raises:
        ValueError: If the folder is not whole, or was made with another tokenizer, for shorter documents, or of another
            division into training and held-out documents than the config says.
    """

    def __init__(self, config: ReaderConfig) -> None:
        self._folder = resolve(config.path, config.field)
        index = read_index(self._folder)
        self._check_fits(index, config)
        self._shards = [
            Shard(self._folder, number, documents, tokens, index["id_type"])
            for number, (documents, tokens) in enumerate(index["shards"])
        ]
        for shard in self._shards:
            shard.check_files()
        self._ends = np.cumsum([shard.documents for shard in self._shards]).tolist()
        self._bad_documents = {int(i): text for i, text in index["bad_documents"].items()}
        self._seq_len, self._max_length = config.seq_len, index["max_length"]
        self._vocab_size = max(config.tokenizer.get_vocab().values()) + 1
        self._open = OpenPerProcess(Shard.open)

    @classmethod
    def divided_path(cls, path: str) -> str | None:
        source = read_index(resolve(path))["source"]
        return None if source["held_out_documents"] is None else source["path"]

    @staticmethod
    def _check_fits(index: dict[str, Any], config: ReaderConfig) -> None:
        made = f'{config.field} = "{config.path}" was prepared'
        section = config.field.removesuffix(".dataset_path")
        if index["tokenizer"] != tokenizer_fingerprint(config.tokenizer):
            raise ValueError(
                f"{made} with another tokenizer than that of model.hf_assets_path, {config.tokenizer.tokenizer_path}: the ids "
                "would mean other words; prepare the data again, or set model.hf_assets_path to that tokenizer"
            )
        if config.seq_len > index["max_length"]:
            raise ValueError(
                f"{section}.seq_len = {config.seq_len}, but {made} for documents of {index['max_length']} tokens at most: "
                f"lower {section}.seq_len, or prepare the data again"
            )
        source = index["source"]
        if source["held_out_documents"] not in (None, config.held_out_documents):
            raise ValueError(
                f"documents.held_out_documents = {config.held_out_documents}, but {made} with "
                f"{source['held_out_documents']}: training and held-out documents could overlap; set the same number"
            )
        if source["held_out_documents"] is not None and source["split"] != config.split:
            raise ValueError(
                f"{made} as the {source['split']} set of {source['kind']}: the {section} section needs the other one"
            )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def where(self, i: int) -> str:
        return f"{self._folder}, document {i}"

    def _shard_and_place(self, i: int) -> tuple[Shard, int]:
        number = bisect_right(self._ends, i)
        return self._shards[number], i - (self._ends[number - 1] if number else 0)

    def ids(self, i: int, tokenizer: HuggingFaceTokenizer) -> list[int]:
        if (text := self._bad_documents.get(i)) is not None:
            raise BadDocumentError(text)
        file, ids = self._stored_ids(i)
        ids = ids[: self._seq_len]
        if len(ids) and (largest := int(ids.max())) >= self._vocab_size:
            raise ValueError(
                f"{file} is damaged: document {i} has the id {largest}, the tokenizer's end at {self._vocab_size - 1}; {MEND}"
            )
        return ids.tolist()

    def length(self, i: int) -> int:
        return min(len(self._stored_ids(i)[1]), self._seq_len)

    def _stored_ids(self, i: int) -> tuple[str, np.ndarray]:
        """The file of document i and its ids there; raises ``ValueError`` if the offsets cannot be true."""
        shard, place = self._shard_and_place(i)
        ids, offsets = self._open(shard)
        start, stop = int(offsets[place]), int(offsets[place + 1])
        if not 0 <= start <= stop <= len(ids) or stop - start > self._max_length:
            raise ValueError(
                f"{shard.file('offsets')} is damaged: document {i} would be ids {start} to {stop} of {len(ids)}; {MEND}"
            )
        return shard.file("ids"), ids[start:stop]

    def digest(self, num_documents: int, tokenizer: HuggingFaceTokenizer) -> str:
        """Return what the reader that these documents were made with returns for as many of them."""
        shard, place = self._shard_and_place(num_documents - 1)
        return shard.digest(place).hex()
