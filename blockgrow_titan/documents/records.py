"""What a reader of records is: the records of one dataset by index, whatever kind it is.

    ReaderConfig -> RecordReader: how many records, where record i stands, its token ids, what tells the data apart

A kind that stores text is a ``TextReader`` and says what the text of record i is. ``readers.py`` lists the kinds.

Footgun: a forked loader worker shares its parent's file offsets, and a spawned one cannot take an open file along, so
files are opened anew in each process (``OpenPerProcess``).
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.paths import read_json_object, resolve

SAMPLED_DOCUMENTS = 16


def open_tokenizer(folder: str, field: str) -> HuggingFaceTokenizer:
    """torchtitan's tokenizer of a folder with ``tokenizer.json``.

    Args:
        folder: The folder.
        field: The config field that names it, for errors.

    Raises:
        ValueError: If a file of it is damaged; the text names field and folder.
    """
    config = os.path.join(folder, "tokenizer_config.json")
    try:
        if os.path.exists(config):
            read_json_object(config, "download it again")
        return HuggingFaceTokenizer(folder)
    except Exception as error:  # the tokenizers library raises plain exceptions, torchtitan's reading of its config any
        raise ValueError(
            f"{field} is {folder}, whose tokenizer cannot be read ({type(error).__name__}: {error}): download "
            "tokenizer.json and tokenizer_config.json again"
        ) from error


def tokenizer_parts(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    """Return whatever of a tokenizer decides the ids of a text; truncation, padding and decoding do not.

    As the library writes it: files of different versions of it differ without any difference in meaning.
    """
    parts = json.loads(tokenizer.tokenizer.to_str())
    return {
        name: parts.get(name) for name in ("normalizer", "pre_tokenizer", "model", "post_processor", "added_tokens")
    }


class BadDocumentError(ValueError):
    """A record that cannot be turned into a document; the text names its file and line or row, and the reason."""


@dataclass(frozen=True)
class ReaderConfig:
    """What a record reader is built from."""

    path: str
    """File, folder, ``package:...`` or, for some kinds, a name on the hub."""
    field: str
    """Config field that holds ``path``, for errors: ``training.dataset_path`` or ``validation.dataset_path``."""
    text_column: str
    """Field of a record that holds its text."""
    split: str
    """"train" or "validation": the split of datasets that have several."""
    max_documents: int
    """Documents that will be asked for at most, -1: all. A reader need not look for more."""
    held_out_documents: int
    """``documents.held_out_documents``, for kinds that make both sets of one path."""
    seq_len: int
    """Token ids of a document that will be used at most."""
    tokenizer: HuggingFaceTokenizer
    """The data's tokenizer, for kinds that store ids."""


class RecordReader(ABC):
    """The records of one dataset by index, readable from any process."""

    @abstractmethod
    def __init__(self, config: ReaderConfig) -> None:
        """Find the records. Raises ``ValueError``, naming the field, its value and what it must be."""

    @classmethod
    def check_path(cls, path: str, field: str) -> None:
        """Raise ``ValueError`` unless something is at ``path``; kinds that take a name on the hub override this."""
        resolve(path, field)

    @classmethod
    def divided_path(cls, path: str) -> str | None:
        """Return the path that both sets are parts of, if training and validation documents are divided from one; or None."""
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of records, or any number from ``ReaderConfig.max_documents`` up if there are more."""

    @abstractmethod
    def where(self, i: int) -> str:
        """Return where record i stands: file and line, or file and row."""

    @abstractmethod
    def ids(self, i: int, tokenizer: HuggingFaceTokenizer) -> list[int]:
        """Return the token ids of record i, without the end of the document; may raise ``BadDocumentError``."""

    def length(self, i: int) -> int | None:
        """Return how many ids record i has, 0 for a bad one, if the reader knows it without making them; else None."""
        return None

    def ids_of(self, records: Sequence[int], tokenizer: HuggingFaceTokenizer) -> list[list[int] | BadDocumentError]:
        """Return ``ids`` of several records at once; a bad record's error stands in its place."""
        return [result_or_error(self.ids, i, tokenizer) for i in records]

    def keys(self, first: int, last: int, tokenizer: HuggingFaceTokenizer) -> Iterator[bytes]:
        """Yield what identifies each of the records ``first`` to ``last`` - 1, one after the other.

        By default that is the token ids of the first ``SAMPLED_DOCUMENTS`` and of every record whose index is a power of
        two, and nothing of the others: cheap, but an edit elsewhere goes unnoticed. Kinds that know better override it.
        """
        for i in range(first, last):
            if i < SAMPLED_DOCUMENTS or i & (i - 1) == 0:
                ids = result_or_error(self.ids, i, tokenizer)
                yield b"bad\n" if isinstance(ids, BadDocumentError) else f"{ids}\n".encode()
            else:
                yield b""

    def digest(self, num_documents: int, tokenizer: HuggingFaceTokenizer) -> str:
        """Return the identity of the first ``num_documents`` records: SHA-256 over their ``keys``, in hexadecimal."""
        digest = hashlib.sha256()
        for key in self.keys(0, num_documents, tokenizer):
            digest.update(key)
        return digest.hexdigest()


def result_or_error(call: Callable[..., Any], *arguments: Any) -> Any:
    """What the call returns, or the ``BadDocumentError`` that it raises."""
    try:
        return call(*arguments)
    except BadDocumentError as error:
        return error


class TextReader(RecordReader):
    """Records with a text column."""

    @abstractmethod
    def text(self, i: int) -> Any:
        """Return the text column of record i as it is stored.

        Raises:
            BadDocumentError, UnicodeDecodeError: If it cannot be read.
        """

    def checked_text(self, i: int) -> str:
        """Return the text of record i, which any tokenizer takes; raises ``BadDocumentError``."""
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
        return text

    def ids(self, i: int, tokenizer: HuggingFaceTokenizer) -> list[int]:
        return tokenizer.encode(self.checked_text(i), add_bos=False, add_eos=False)

    def ids_of(self, records: Sequence[int], tokenizer: HuggingFaceTokenizer) -> list[list[int] | BadDocumentError]:
        """As the base class says, with all texts tokenised in one call, on ``RAYON_NUM_THREADS`` cores."""
        if type(tokenizer).encode is not HuggingFaceTokenizer.encode or type(self).ids is not TextReader.ids:
            return super().ids_of(records, tokenizer)  # somebody's own way to make ids
        texts = [result_or_error(self.checked_text, i) for i in records]
        encodings = iter(tokenizer.tokenizer.encode_batch_fast([text for text in texts if isinstance(text, str)]))
        return [next(encodings).ids if isinstance(text, str) else text for text in texts]


def require_text_column(columns: list[str], text_column: str, where: str) -> None:
    """Raise ``BadDocumentError`` unless a record or table has the text column."""
    if text_column not in columns:
        raise BadDocumentError(
            f'{where}: there is no "{text_column}", which documents.text_column names; '
            f"there are: {', '.join(columns) or 'none'}"
        )


def files_of(config: ReaderConfig, suffix: str) -> list[str]:
    """Return the one file, or the folder's files with this suffix sorted by name."""
    path = resolve(config.path, config.field)
    if os.path.isfile(path):
        return [path]
    try:
        names = sorted(name for name in os.listdir(path) if name.endswith(suffix))
    except OSError as error:
        raise ValueError(f'{config.field} = "{config.path}": {path} cannot be read ({error.strerror})') from error
    if not names:
        raise ValueError(f'{config.field} = "{config.path}": the folder {path} has no *{suffix} file')
    return [os.path.join(path, name) for name in names]


class OpenPerProcess:
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
