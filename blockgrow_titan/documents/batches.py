"""The micro-batches of one rank, as tensors: collators and the loader.

    step -> its documents, dealt (``dealing.py``) -> this rank's micro-batches -> rows of ids and labels

A loader worker makes whole steps. The loader keeps no state: to resume, or to start over after growth, a new iterator
begins at the step (``DocumentDataLoader.iterate_from``); nothing is replayed.

Where the dealing looks at lengths, every rank needs those of all documents of a step. A reader that knows them
(``pretokenized``) is asked; else the step's documents are all tokenised on each rank, and ``prepare_data.py`` saves that.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config.job_config import DataLoader as DataLoaderConfig

from blockgrow_titan.documents.dealing import MicroBatching, documents_of_offset
from blockgrow_titan.documents.source import DocumentSource
from blockgrow_titan.job_config import JobConfig

COMPILED_MULTIPLE = 128  # lengths of rows that torch.compile sees are multiples of it

Batch = tuple[dict[str, Any], torch.Tensor]
"""What the model is called with, "input" first of all, and the labels [B, S] int64."""


class Collator:
    """Pads the documents of a micro-batch on the right, to the longest of them rounded up to a multiple.

    Args:
        pad_id: Fills the inputs; any token will do, its labels are ignored.
        pad_to_multiple_of: ``row_multiple``.
    """

    def __init__(self, pad_id: int, pad_to_multiple_of: int = 1) -> None:
        if pad_to_multiple_of < 1:
            raise ValueError(f"documents.pad_to_multiple_of = {pad_to_multiple_of} must be at least 1")
        self.pad_id = pad_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def _rounded(self, length: int) -> int:
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def __call__(self, documents: Sequence[list[int]]) -> Batch:
        """Return ``{"input": [B, S]}`` and labels [B, S], both int64.

        A row is a document: inputs are its ids but the last, labels its ids but the first, ``IGNORE_INDEX`` where there
        is none. One without predictions takes no row. B and S are at least 1: without any document there is one row,
        with every label ignored.
        """
        documents = [ids for ids in documents if len(ids) > 1]
        longest = max([1, *(len(ids) - 1 for ids in documents)])
        shape = (max(1, len(documents)), self._rounded(longest))
        inputs = torch.full(shape, self.pad_id, dtype=torch.int64)
        labels = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
        for row, ids in enumerate(documents):
            inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1], dtype=torch.int64)
            labels[row, : len(ids) - 1] = torch.tensor(ids[1:], dtype=torch.int64)
        return {"input": inputs}, labels


class PackedCollator(Collator):
    """Lays the documents of a micro-batch end to end in one row, padded on the right to the multiple."""

    def __call__(self, documents: Sequence[list[int]]) -> Batch:
        """Return ``{"input": [1, N], "document_lengths"}`` and labels [1, N], both int64.

        ``document_lengths`` is a tuple of ints: where each document ends, in their order. One without predictions takes
        no place. N is at least 1: without any document there is one ignored position.
        """
        documents = [ids for ids in documents if len(ids) > 1]
        lengths = tuple(len(ids) - 1 for ids in documents)
        inputs = torch.full((1, self._rounded(max(1, sum(lengths)))), self.pad_id, dtype=torch.int64)
        labels = torch.full_like(inputs, IGNORE_INDEX)
        inputs[0, : sum(lengths)] = torch.tensor([i for ids in documents for i in ids[:-1]], dtype=torch.int64)
        labels[0, : sum(lengths)] = torch.tensor([i for ids in documents for i in ids[1:]], dtype=torch.int64)
        return {"input": inputs, "document_lengths": lengths}, labels


def row_multiple(job_config: JobConfig, seq_len: int) -> int:
    """What the length of a row is a multiple of: ``documents.pad_to_multiple_of``, or the choice that -1 stands for."""
    if job_config.documents.pad_to_multiple_of != -1:
        return job_config.documents.pad_to_multiple_of
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    return math.gcd(COMPILED_MULTIPLE, seq_len) if compiled else 1


def build_collator(job_config: JobConfig, pad_id: int, seq_len: int) -> Collator:
    """The collator that goes with ``documents.micro_batching``."""
    collator_cls = PackedCollator if job_config.documents.micro_batching == "packed" else Collator
    return collator_cls(pad_id, row_multiple(job_config, seq_len))


def lengths_of(source: DocumentSource, documents: Sequence[int]) -> list[int] | None:
    """The lengths of documents in tokens with a prediction, as ``dealing`` takes them; None if they are not known."""
    lengths = [source.length(i) for i in documents]
    return None if None in lengths else [n - 1 for n in lengths if n is not None]


class StepOffsets(Sampler[int]):
    """The offsets of steps ``first_step`` to ``last_step``, one after the other."""

    def __init__(self, first_step: int, last_step: int, offset_of_step: Callable[[int], int]) -> None:
        self.steps, self.offset_of_step = range(first_step, last_step + 1), offset_of_step

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[int]:
        return map(self.offset_of_step, self.steps)


class StepDocuments(Dataset[list[Batch]]):
    """Item t is the list of one rank's micro-batches of the step with offset t.

    Args:
        source: What document i is.
        collator: Makes tensors of a micro-batch.
        micro_batching: How documents are dealt.
        global_batch_size: Documents of a step, over all ranks.
        rank, world_size: This rank among those that train.
    """

    def __init__(
        self,
        source: DocumentSource,
        collator: Collator,
        micro_batching: MicroBatching,
        global_batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        self.source, self.collator, self.micro_batching = source, collator, micro_batching
        self.global_batch_size, self.rank, self.world_size = global_batch_size, rank, world_size

    def __getitem__(self, t: int) -> list[Batch]:
        documents = documents_of_offset(t, self.global_batch_size, len(self.source))
        read: dict[int, list[int]] = {}
        lengths: list[int] | None = [0] * len(documents)
        if self.micro_batching.needs_lengths:
            lengths = lengths_of(self.source, documents)
        if lengths is None:
            distinct = list(dict.fromkeys(documents))
            read = dict(zip(distinct, self.source.read(distinct), strict=True))
            lengths = [len(read[i]) - 1 for i in documents]
        mine = self.micro_batching.deal(lengths, self.world_size)[self.rank]
        ids = lambda i: read[i] if i in read else self.source[i]  # noqa: E731
        return [self.collator([ids(documents[place]) for place in micro_batch]) for micro_batch in mine]


class DocumentDataLoader(BaseDataLoader):
    """Micro-batches of one rank, from any step on.

    Set ``first_step`` before iterating to begin elsewhere than at step 1, for example when resuming.

    Args:
        source, collator, micro_batching, global_batch_size, rank, world_size: As in ``StepDocuments``.
        offset_of_step: Maps a step to its offset in global batches, from 0: step - 1, or counted from the phase's first
            step under ``growth.data_at_growth = "rewind"``.
        last_step: The last step, counted from 1.
        config: ``training.dataloader``; a worker makes a whole step at a time.
    """

    def __init__(
        self,
        source: DocumentSource,
        collator: Collator,
        micro_batching: MicroBatching,
        *,
        offset_of_step: Callable[[int], int],
        last_step: int,
        global_batch_size: int,
        rank: int,
        world_size: int,
        config: DataLoaderConfig,
    ) -> None:
        if config.num_workers < 0:
            raise ValueError(f"training.dataloader.num_workers = {config.num_workers} must be at least 0")
        if config.prefetch_factor is not None and config.prefetch_factor < 1:
            raise ValueError(f"training.dataloader.prefetch_factor = {config.prefetch_factor} must be at least 1")
        if len(source) < 1:
            raise ValueError("the shard holds no documents; it must hold at least 1")
        self.source = source
        self.collator = collator
        self.micro_batching = micro_batching
        self.first_step = 1
        self.offset_of_step = offset_of_step
        self.last_step = last_step
        self.global_batch_size = global_batch_size
        self.rank = rank
        self.world_size = world_size
        self._worker_kwargs = asdict(config)
        ParallelAwareDataloader._validate_kwargs(self._worker_kwargs)  # drops what only workers take, without workers

    def iterate_from(self, first_step: int) -> Iterator[Batch]:
        """Yield the micro-batches of steps ``first_step`` to ``last_step``, in order, as the collator makes them.

        The last one of each step has ``"last_of_step": True`` beside its input, the others False. Nothing before
        ``first_step`` is read. Loader workers end when the iterator is exhausted or dropped.

        Raises:
            ValueError: If ``first_step`` or the global batch is below 1.
        """
        for name, value in (("first step", first_step), ("training.global_batch_size", self.global_batch_size)):
            if value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        loader = StatefulDataLoader(
            StepDocuments(
                self.source, self.collator, self.micro_batching, self.global_batch_size, self.rank, self.world_size
            ),
            sampler=StepOffsets(first_step, self.last_step, self.offset_of_step),
            batch_size=None,
            collate_fn=_as_it_is,
            snapshot_every_n_steps=None,  # never: nobody asks for its state
            generator=torch.Generator(),  # workers' seeds come from here, not from the model's random numbers
            **self._worker_kwargs,
        )
        return _micro_batches(iter(loader))

    def __iter__(self) -> Iterator[Batch]:
        return self.iterate_from(self.first_step)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position is the step, which the trainer saves.

        ``StatefulDataLoader`` would save how many steps it has handed out. With look-ahead that is more than were
        trained on, and it cannot be loaded on another number of workers.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore any saved state, for the same reason."""


def _as_it_is(step: list[Batch]) -> list[Batch]:
    return step


def _micro_batches(steps: Iterator[list[Batch]]) -> Iterator[Batch]:
    for step in steps:
        for turn, (input_dict, labels) in enumerate(step, start=1):
            yield {**input_dict, "last_of_step": turn == len(step)}, labels
