"""What document i is.

    record i of the dataset  ->  its text  ->  token ids, tokenised alone  ->  + end of document  ->  first seq_len ids

A reader (``readers.py``) finds record i; ``DocumentSource`` makes ids of it. Both are pure functions of i, so ``batches.py`` may
ask any loader worker for any document in any order. Documents are never packed together and never shuffled.

Footgun: a tokenizer's file may carry a truncation or padding setting, which would change documents silently. Both are
switched off here, as in ``transformers``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, get_worker_info
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.tools.logging import logger

from blockgrow_titan.documents.readers import RECORD_READERS, BadDocumentError, ReaderConfig, RecordReader
from blockgrow_titan.documents.records import result_or_error
from blockgrow_titan.job_config import ConfigError, JobConfig

ON_BAD_DOCUMENT = ("stop", "skip")

# Under on_bad_document = "skip", so many documents may be bad at the start before the dataset itself is refused: a
# wrong text_column would otherwise train on nothing but empty documents.
PROBED_DOCUMENTS = 16


class DocumentSource(Dataset[list[int]]):
    """Document i as token ids: ``source[i]`` is a list of 1 to ``seq_len`` ints, the last of which is only a label.

    Args:
        reader: Where the records come from.
        tokenizer: torchtitan's tokenizer. Its truncation and padding are switched off.
        end_of_document_id: Ends every document that is shorter than ``seq_len``.
        seq_len: Token ids of a document at most.
        num_documents: Documents of the shard: the first of the reader.
        skip_bad: Whether a bad document counts as an empty one (the end-of-document token alone: no predictions)
            instead of raising ``BadDocumentError``.
    """

    def __init__(
        self,
        reader: RecordReader,
        tokenizer: HuggingFaceTokenizer,
        *,
        end_of_document_id: int,
        seq_len: int,
        num_documents: int,
        skip_bad: bool,
    ) -> None:
        tokenizer.tokenizer.no_truncation()
        tokenizer.tokenizer.no_padding()
        self.reader = reader
        self.tokenizer = tokenizer
        self.end_of_document_id = end_of_document_id
        self.seq_len = seq_len
        self._num_documents = num_documents
        # One byte a document, shared with the loader workers: a document is logged and counted once, whoever meets it.
        self._bad = torch.zeros(num_documents, dtype=torch.uint8).share_memory_() if skip_bad else None

    def __len__(self) -> int:
        return self._num_documents

    @property
    def bad_documents(self) -> int:
        """Distinct bad documents met so far by this process and its loader workers."""
        return 0 if self._bad is None else int(self._bad.sum())

    def agreed_bad_documents(self, device: torch.device) -> int:
        """Distinct bad documents that any rank has met so far; collective, over the default group.

        Args:
            device: Where the group's collectives run.
        """
        if self._bad is None:
            return 0
        met = self._bad.to(device, copy=True)  # [documents], 1 for a bad one
        dist.all_reduce(met, dist.ReduceOp.MAX)
        return int(met.sum())

    def __getitem__(self, i: int) -> list[int]:
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        return self._document(i, result_or_error(self.reader.ids, i, self.tokenizer))

    def read(self, documents: Sequence[int]) -> list[list[int]]:
        """Return ``self[i]`` of several documents, whose texts are tokenised together, on several cores.

        In a loader worker one by one: the workers are the parallelism there, and the tokenizer's threads, if the process
        that was forked has used them, are not theirs and would be waited for forever.
        """
        if get_worker_info() is not None:
            return [self[i] for i in documents]
        found = self.reader.ids_of(documents, self.tokenizer)
        return [self._document(i, ids) for i, ids in zip(documents, found, strict=True)]

    def _document(self, i: int, ids: list[int] | BadDocumentError) -> list[int]:
        """The ids of document i from what its record gave."""
        if isinstance(ids, BadDocumentError):
            if self._bad is None:
                raise BadDocumentError(
                    f'{ids}. Mend the record, or set documents.on_bad_document = "skip" to count it as empty'
                ) from ids
            if not self._bad[i]:
                self._bad[i] = 1
                logger.warning(f"{ids}. Counted as an empty document")
            ids = []
        return [*ids, self.end_of_document_id][: self.seq_len]

    def length(self, i: int) -> int | None:
        """Return the length of ``self[i]`` if the reader knows it without making the ids, else None."""
        ids = self.reader.length(i)
        return None if ids is None else min(ids + 1, self.seq_len)

    def identity(self) -> dict[str, int | str]:
        """Return ``{"documents", "digest"}``: how many documents these are, and which (``RecordReader.digest``)."""
        return {"documents": len(self), "digest": self.reader.digest(len(self), self.tokenizer)}

    def check_first_documents(self) -> None:
        """Read the first documents, so that a wrong path, kind or text column ends the job before it takes memory.

        Raises:
            BadDocumentError: If the first document is bad; where bad ones are skipped, if the first few all are.
        """
        if self._bad is None:
            self[0]
            return
        errors = []
        for i in range(min(PROBED_DOCUMENTS, len(self))):
            try:
                self.reader.ids(i, self.tokenizer)
                return
            except BadDocumentError as error:
                errors.append(error)
        raise BadDocumentError(f"all of the first {len(errors)} documents are bad. {errors[0]}")


def source_of(job_config: JobConfig, tokenizer: HuggingFaceTokenizer, split: str) -> DocumentSource:
    """The documents of a job's config.

    Args:
        job_config: The job's config.
        tokenizer: torchtitan's tokenizer.
        split: "train" for ``[training]`` and ``documents.shard_documents``, "validation" for all of ``[validation]``.

    Raises:
        ConfigError: For every reason of ``build_source``.
    """
    documents = job_config.documents
    name, section = ("training", job_config.training) if split == "train" else ("validation", job_config.validation)
    try:
        return build_source(
            section.dataset,
            section.dataset_path,
            tokenizer,
            text_column=documents.text_column,
            end_of_document=documents.end_of_document,
            seq_len=section.seq_len,
            shard_documents=documents.shard_documents if split == "train" else -1,
            held_out_documents=documents.held_out_documents,
            on_bad_document=documents.on_bad_document,
            split=split,
            field=f"{name}.dataset_path",
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def build_source(
    kind: str,
    path: str | None,
    tokenizer: HuggingFaceTokenizer,
    *,
    text_column: str,
    end_of_document: str,
    seq_len: int,
    shard_documents: int = -1,
    held_out_documents: int = 0,
    on_bad_document: str = "stop",
    split: str = "train",
    field: str = "training.dataset_path",
) -> DocumentSource:
    """Build the documents of a training or validation set and read the first one.

    Args:
        kind: Name in ``RECORD_READERS``: ``training.dataset`` or ``validation.dataset``.
        path: ``training.dataset_path`` or ``validation.dataset_path``; None is as good as empty.
        tokenizer: torchtitan's tokenizer.
        text_column, end_of_document, shard_documents, held_out_documents, on_bad_document: As in the config's ``[documents]``.
        seq_len: Token ids of a document at most.
        split: "train" or "validation", for kinds that hold both.
        field: Config field that holds ``path``, for errors.

    Raises:
        ValueError: If a setting is wrong, nothing is at ``path``, it holds no documents or fewer than
            ``shard_documents``, or the first document is bad. The text names the field, its value and what it must be.
    """
    kind_field = field.removesuffix("_path")
    if kind not in RECORD_READERS:
        raise ValueError(f'{kind_field} = "{kind}" must be one of: {", ".join(RECORD_READERS)}')
    if on_bad_document not in ON_BAD_DOCUMENT:
        raise ValueError(
            f'documents.on_bad_document = "{on_bad_document}" must be one of: {", ".join(ON_BAD_DOCUMENT)}'
        )
    if seq_len < 2:
        raise ValueError(
            f"{kind_field.split('.')[0]}.seq_len = {seq_len} must be at least 2: one token and the next one"
        )
    if shard_documents == 0 or shard_documents < -1:
        raise ValueError(f"documents.shard_documents = {shard_documents} must be at least 1, or -1 for all documents")
    end_of_document_id = tokenizer.token_to_id(end_of_document)
    if end_of_document_id is None:
        raise ValueError(
            f'documents.end_of_document = "{end_of_document}" must be a token of the tokenizer in '
            f"{tokenizer.tokenizer_path}; set it to the token that ends a document there"
        )

    reader = RECORD_READERS[kind](
        ReaderConfig(
            path=path or "",
            field=field,
            text_column=text_column,
            split=split,
            max_documents=shard_documents,
            held_out_documents=held_out_documents,
            seq_len=seq_len,
            tokenizer=tokenizer,
        )
    )
    if len(reader) == 0:
        raise ValueError(f'{field} = "{path}" holds no documents; it must hold at least one')
    if shard_documents > len(reader):
        raise ValueError(
            f'documents.shard_documents = {shard_documents}, but {field} = "{path}" holds {len(reader)} documents; '
            f"set it to {len(reader)} at most, or to -1 for all of them"
        )
    source = DocumentSource(
        reader,
        tokenizer,
        end_of_document_id=end_of_document_id,
        seq_len=seq_len,
        num_documents=shard_documents if shard_documents > 0 else len(reader),
        skip_bad=on_bad_document == "skip",
    )
    source.check_first_documents()
    logger.info(f"{field}: {len(source)} documents of {path or kind} ({kind})")
    return source


def report_bad_documents(sources: Mapping[str, Any], device: torch.device) -> None:
    """Say how many documents of each set counted as empty: whoever met one has said so, perhaps on no console.

    Collective, over the default group.

    Args:
        sources: By the name of the set; anything but a ``DocumentSource`` is passed over.
        device: Where the group's collectives run.
    """
    for name, source in sources.items():
        if isinstance(source, DocumentSource) and (bad := source.agreed_bad_documents(device)):
            documents = "1 document" if bad == 1 else f"{bad:,} documents"
            logger.warning(
                f"{name}: {documents} of {len(source):,} could not be read and counted as empty "
                '(documents.on_bad_document = "skip")'
            )
