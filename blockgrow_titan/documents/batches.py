"""Which documents a step and a rank train on.

    step -> offset t -> documents [t*G, (t+1)*G) modulo the shard -> strided over the ranks -> cut into micro-batches

All of it is a pure function of the step, so the loader keeps no state: world size, accumulation, look-ahead and loader
workers change who handles a document and when, never which documents a step trains on. To resume, or to start over
after growth, a new iterator begins at the step (``DocumentDataLoader.iterate_from``); nothing is replayed.

G is the global batch, S the number of (student) ranks, L the documents of a rank's micro-batch. G need not divide by S
or L: ranks that have run out of documents get empty micro-batches, whose labels are all ignored, so that every rank
runs the same number of forwards and collectives.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config.job_config import DataLoader as DataLoaderConfig

from blockgrow_titan.documents.source import DocumentSource


def documents_of_offset(t: int, global_batch_size: int, num_documents: int) -> list[int]:
    """Return the documents of the step with offset ``t`` (from 0): [t*G, (t+1)*G) modulo the shard, G indices."""
    first = t * global_batch_size
    return [(first + i) % num_documents for i in range(global_batch_size)]


def num_micro_batches(global_batch_size: int, world_size: int, local_batch_size: int) -> int:
    """Return ceil(G / (S*L)): the micro-batches of a step, on every rank."""
    return -(-global_batch_size // (world_size * local_batch_size))


def deal(documents: list[int], rank: int, world_size: int, local_batch_size: int) -> list[list[int]]:
    """Return the micro-batches of one rank: documents rank, rank + S, rank + 2S, ..., ``local_batch_size`` at a time.

    Every rank gets ``num_micro_batches(len(documents), world_size, local_batch_size)`` of them; the last ones may be
    shorter, or empty.
    """
    mine = documents[rank::world_size]
    count = num_micro_batches(len(documents), world_size, local_batch_size)
    return [mine[i * local_batch_size : (i + 1) * local_batch_size] for i in range(count)]


def validation_batches(num_documents: int, rank: int, world_size: int, local_batch_size: int) -> list[list[int]]:
    """Return the micro-batches of one rank in a validation: over the ranks, every document exactly once.

    Every rank gets equally many, some of them shorter or empty, so uneven sets do not hang.
    """
    return deal(list(range(num_documents)), rank, world_size, local_batch_size)


class StepBatchSampler(Sampler[list[int]]):
    """Micro-batches (lists of document indices, maybe empty) of one rank for steps ``first_step`` to ``last_step``.

    Args:
        first_step, last_step: Steps, counted from 1; both included.
        offset_of_step: Maps a step to its offset in global batches, from 0: step - 1, or counted from the phase's first
            step under ``growth.data_at_growth = "rewind"``.
        global_batch_size: Documents of a step, over all ranks.
        num_documents: Documents of the shard.
        rank, world_size: This rank among those that train.
        local_batch_size: Documents of a micro-batch.
    """

    def __init__(
        self,
        first_step: int,
        last_step: int,
        offset_of_step: Callable[[int], int],
        global_batch_size: int,
        num_documents: int,
        rank: int,
        world_size: int,
        local_batch_size: int,
    ) -> None:
        for name, value in (
            ("first step", first_step),
            ("training.global_batch_size", global_batch_size),
            ("training.local_batch_size", local_batch_size),
            ("documents of the shard", num_documents),
        ):
            if value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        self.first_step = first_step
        self.last_step = last_step
        self.offset_of_step = offset_of_step
        self.global_batch_size = global_batch_size
        self.num_documents = num_documents
        self.rank = rank
        self.world_size = world_size
        self.local_batch_size = local_batch_size

    def __len__(self) -> int:
        steps = max(0, self.last_step - self.first_step + 1)
        return steps * num_micro_batches(self.global_batch_size, self.world_size, self.local_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.last_step + 1):
            documents = documents_of_offset(self.offset_of_step(step), self.global_batch_size, self.num_documents)
            yield from deal(documents, self.rank, self.world_size, self.local_batch_size)


class Collator:
    """Pads the documents of a micro-batch on the right, to the longest of them rounded up to a multiple.

    Args:
        pad_id: Fills the inputs; any token will do, its labels are ignored.
        pad_to_multiple_of: ``documents.pad_to_multiple_of``.
    """

    def __init__(self, pad_id: int, pad_to_multiple_of: int = 1) -> None:
        if pad_to_multiple_of < 1:
            raise ValueError(f"documents.pad_to_multiple_of = {pad_to_multiple_of} must be at least 1")
        self.pad_id = pad_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, documents: list[list[int]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return ``{"input": [B, S]}`` and labels [B, S], both int64.

        A row is a document: inputs are its ids but the last, labels its ids but the first, ``IGNORE_INDEX`` where there
        is none. B and S are at least 1: without documents there is one row, with every label ignored.
        """
        longest = max([1, *(len(ids) - 1 for ids in documents)])
        length = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        shape = (max(1, len(documents)), length)
        inputs = torch.full(shape, self.pad_id, dtype=torch.int64)
        labels = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
        for row, ids in enumerate(documents):
            inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1], dtype=torch.int64)
            labels[row, : len(ids) - 1] = torch.tensor(ids[1:], dtype=torch.int64)
        return {"input": inputs}, labels


class DocumentDataLoader(BaseDataLoader):
    """Micro-batches of one rank, from any step on.

    Set ``first_step`` before iterating to begin elsewhere than at step 1, for example when resuming.

    Args:
        source: What document i is.
        collator: Makes tensors of a micro-batch.
        offset_of_step, last_step, global_batch_size, rank, world_size, local_batch_size: As in ``StepBatchSampler``.
        config: ``training.dataloader``.
    """

    def __init__(
        self,
        source: DocumentSource,
        collator: Collator,
        *,
        offset_of_step: Callable[[int], int],
        last_step: int,
        global_batch_size: int,
        rank: int,
        world_size: int,
        local_batch_size: int,
        config: DataLoaderConfig,
    ) -> None:
        if config.num_workers < 0:
            raise ValueError(f"training.dataloader.num_workers = {config.num_workers} must be at least 0")
        if config.prefetch_factor is not None and config.prefetch_factor < 1:
            raise ValueError(f"training.dataloader.prefetch_factor = {config.prefetch_factor} must be at least 1")
        self.source = source
        self.collator = collator
        self.first_step = 1
        self.offset_of_step = offset_of_step
        self.last_step = last_step
        self.global_batch_size = global_batch_size
        self.rank = rank
        self.world_size = world_size
        self.local_batch_size = local_batch_size
        self._worker_kwargs = asdict(config)
        ParallelAwareDataloader._validate_kwargs(self._worker_kwargs)  # drops what only workers take, without workers

    def iterate_from(self, first_step: int) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Return the micro-batches of steps ``first_step`` to ``last_step``, in order, as ``Collator`` makes them.

        Nothing before ``first_step`` is read. Loader workers end when the iterator is exhausted or dropped.
        """
        sampler = StepBatchSampler(
            first_step,
            self.last_step,
            self.offset_of_step,
            self.global_batch_size,
            len(self.source),
            self.rank,
            self.world_size,
            self.local_batch_size,
        )
        loader = StatefulDataLoader(
            self.source,
            batch_sampler=sampler,
            collate_fn=self.collator,
            snapshot_every_n_steps=None,  # never: nobody asks for its state
            generator=torch.Generator(),  # workers' seeds come from here, not from the model's random numbers
            **self._worker_kwargs,
        )
        return iter(loader)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return self.iterate_from(self.first_step)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position is the step, which the trainer saves.

        ``StatefulDataLoader`` would save how many micro-batches it has handed out. With look-ahead that is more than
        were trained on, and it cannot be loaded on another world size or number of workers.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore any saved state, for the same reason."""
