"""Writes documents that are tokenised ahead of time, shard by shard; ``pretokenized.py`` has the format and reads them.

    source -> batches of ids -> 00000.ids, .offsets, .digests -> 00000.json: this shard is whole -> ... -> dataset.json

A shard counts once its ``.json`` is there, which is renamed into place after everything else; it tells the next run where
to continue, and goes away when ``dataset.json`` says the same of all shards.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from torchtitan.tools.logging import logger

from blockgrow_titan.documents.pretokenized import INDEX_FILE, Shard, read_index
from blockgrow_titan.documents.source import DocumentSource
from blockgrow_titan.paths import read_json_object

DOCUMENTS_AT_A_TIME = 1024


class PretokenizedWriter:
    """Writes one set's shards into a folder, after those that are there already.

    Args:
        source: The documents.
        description: The fixed part of ``dataset.json``: format, tokenizer, id type, longest document, source, documents.
        folder: Where to write; made if it is not there.
        documents_per_shard: Documents of every shard but the last.
        skip_bad: Whether bad documents are recorded instead of ending the work.

    Raises:
        ValueError: If the documents are not those that the shards in the folder were made of, or one is bad.
    """

    def __init__(
        self,
        source: DocumentSource,
        description: dict[str, Any],
        folder: str,
        documents_per_shard: int,
        skip_bad: bool,
    ) -> None:
        self.source, self.description, self.folder = source, description, folder
        self.documents_per_shard, self.skip_bad = documents_per_shard, skip_bad
        self.index = os.path.join(folder, INDEX_FILE)
        os.makedirs(folder, exist_ok=True)
        self.shards: list[Shard] = []
        self.bad_documents: dict[int, str] = {}
        self.digest = hashlib.sha256()
        if os.path.exists(self.index):
            self._require_same(read_index(folder)["digest"] == source.identity()["digest"])
        else:
            self._find_shards()

    @property
    def done(self) -> int:
        """Documents in whole shards."""
        return sum(shard.documents for shard in self.shards)

    def _record(self, number: int) -> str:
        return os.path.join(self.folder, f"{number:05d}.json")

    def _shard(self, documents: int, tokens: int) -> Shard:
        return Shard(self.folder, len(self.shards), documents, tokens, self.description["id_type"])

    def _find_shards(self) -> None:
        """Take over the whole shards of an interrupted run, if the documents are still the same."""
        while os.path.exists(record := self._record(len(self.shards))):
            try:
                saved = read_json_object(record, "the shard counts as absent")
                shard = self._shard(saved["documents"], saved["tokens"])
                bad_documents = {int(i): text for i, text in saved["bad_documents"].items()}
                shard.check_files()
            except (ValueError, KeyError, TypeError, AttributeError) as error:  # the machine went down in between
                logger.warning(f"Written again: {record} or its files are not whole ({error})")
                break
            self.shards.append(shard)
            self.bad_documents |= bad_documents
        for key in self.source.reader.keys(0, self.done, self.source.tokenizer):
            self.digest.update(key)
        if self.shards:
            last = self.shards[-1]
            self._require_same(last.digest(last.documents - 1) == self.digest.digest())

    def _require_same(self, same: bool) -> None:
        if not same:
            raise ValueError(
                f"{self.folder} was begun with other documents: they have changed since. Delete "
                f"{os.path.dirname(self.folder)} to start over"
            )

    def write(self) -> Iterator[tuple[int, int]]:
        """Write the shards that are missing and then ``dataset.json``; yields (documents, tokens) of every batch."""
        if not os.path.exists(self.index):
            while self.done < len(self.source):
                yield from self._write_shard()
            index = self.description | {
                "digest": self.digest.hexdigest(),
                "tokens": sum(shard.tokens for shard in self.shards),
                "shards": [[shard.documents, shard.tokens] for shard in self.shards],
                "bad_documents": self.bad_documents,
            }
            write_json(self.index, index)
        for name in os.listdir(self.folder):
            if name.endswith(".json") and name != INDEX_FILE:
                os.remove(os.path.join(self.folder, name))

    def _write_shard(self) -> Iterator[tuple[int, int]]:
        first = self.done
        last = min(first + self.documents_per_shard, len(self.source))
        offsets, digests, bad = [0], [], {}
        keys = self.source.reader.keys(first, last, self.source.tokenizer)
        with open(self._shard(0, 0).file("ids"), "wb") as file:
            for start in range(first, last, DOCUMENTS_AT_A_TIME):
                records = range(start, min(start + DOCUMENTS_AT_A_TIME, last))
                tokens = -offsets[-1]
                for i, ids in zip(records, self.source.reader.ids_of(records, self.source.tokenizer), strict=True):
                    if isinstance(ids, ValueError):
                        bad[i] = self._met_bad(ids)
                        ids = []
                    kept = ids[: self.source.seq_len]
                    file.write(np.array(kept, dtype=self.description["id_type"]).tobytes())
                    offsets.append(offsets[-1] + len(kept))
                    self.digest.update(next(keys))
                    digests.append(self.digest.digest())
                yield len(records), tokens + offsets[-1]
        shard = self._shard(last - first, offsets[-1])
        with open(shard.file("offsets"), "wb") as file:
            file.write(np.array(offsets, dtype=np.int64).tobytes())
        with open(shard.file("digests"), "wb") as file:
            file.write(b"".join(digests))
        write_json(
            self._record(shard.number), {"documents": shard.documents, "tokens": shard.tokens, "bad_documents": bad}
        )
        self.shards.append(shard)
        self.bad_documents |= bad

    def _met_bad(self, error: ValueError) -> str:
        if not self.skip_bad:
            raise ValueError(f'{error}. Mend the record, or set documents.on_bad_document = "skip" to record it as bad')
        logger.warning(f"{error}. Recorded as a bad document")
        return str(error)


def write_json(path: str, value: Any) -> None:
    """Write a file whole or not at all."""
    with open(f"{path}.tmp", "w") as file:
        json.dump(value, file, indent=1)
    os.replace(f"{path}.tmp", path)
