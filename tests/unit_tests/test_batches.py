"""Which documents a step and a rank train on (invariant 2), micro-batches, and the loader."""

import gc
import itertools
import multiprocessing

import pytest
import torch
from torch.utils.data import Dataset
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config.job_config import DataLoader as DataLoaderConfig

from blockgrow_titan.documents.batches import (
    Collator,
    DocumentDataLoader,
    StepBatchSampler,
    deal,
    documents_of_offset,
    num_micro_batches,
    validation_batches,
)

WORLD_SIZES = [1, 2, 3, 5, 7]
PAD_ID = 9


def next_offset(step):
    return step - 1


def documents_in_reading_order(num_documents, count):
    """The first ``count`` documents of the shard read again and again: an endless plain reading, as the reference."""
    return list(itertools.islice(itertools.cycle(range(num_documents)), count))


# Pure functions


@pytest.mark.parametrize(
    "global_batch_size, num_documents", [(4, 12), (4, 10), (4, 4), (7, 3), (5, 1), (1, 3), (64, 100)]
)
def test_consecutive_steps_read_the_shard_again_and_again(global_batch_size, num_documents):
    steps = 12
    dealt = [documents_of_offset(t, global_batch_size, num_documents) for t in range(steps)]
    assert all(len(documents) == global_batch_size for documents in dealt)
    assert sum(dealt, []) == documents_in_reading_order(num_documents, steps * global_batch_size)


def test_wrap_around_inside_a_step():
    assert documents_of_offset(2, 4, 10) == [8, 9, 0, 1]
    assert documents_of_offset(0, 7, 3) == [0, 1, 2, 0, 1, 2, 0]
    assert documents_of_offset(10**12, 64, 10**9 + 7) == [(64 * 10**12 + i) % (10**9 + 7) for i in range(64)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("local_batch_size", [1, 2, 3, 8])
def test_deal_loses_and_doubles_nothing(world_size, local_batch_size):
    for count in range(1, 23):
        documents = [100 + i for i in range(count)]
        ranks = [deal(documents, rank, world_size, local_batch_size) for rank in range(world_size)]
        assert sorted(sum((sum(micro_batches, []) for micro_batches in ranks), [])) == documents
        # Every rank runs the same number of forwards, no more than the busiest one needs, and none above the limit.
        busiest = max(len(sum(micro_batches, [])) for micro_batches in ranks)
        needed = len(range(0, busiest, local_batch_size))
        assert {len(micro_batches) for micro_batches in ranks} == {needed}
        assert num_micro_batches(count, world_size, local_batch_size) == needed
        assert all(len(micro_batch) <= local_batch_size for micro_batches in ranks for micro_batch in micro_batches)


def test_deal_is_strided_and_fills_up_with_empty_micro_batches():
    assert deal([0, 1, 2, 3, 4, 5, 6], 1, 2, 2) == [[1, 3], [5]]
    assert deal([0, 1, 2, 3, 4], 0, 2, 2) == [[0, 2], [4]]
    assert deal([0, 1, 2, 3, 4], 1, 2, 2) == [[1, 3], []]
    assert deal([0, 1], 4, 5, 1) == [[]]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_documents", [1, 3, 10, 285])
def test_validation_takes_every_document_once(world_size, num_documents):
    ranks = [validation_batches(num_documents, rank, world_size, 4) for rank in range(world_size)]
    assert sorted(sum((sum(batches, []) for batches in ranks), [])) == list(range(num_documents))
    assert len({len(batches) for batches in ranks}) == 1


def test_validation_of_three_documents_on_two_ranks():
    assert validation_batches(3, 0, 2, 1) == [[0], [2]]
    assert validation_batches(3, 1, 2, 1) == [[1], []]


# Sampler


def sampled_by_step(world_size, local_batch_size, *, first=1, last=6, offset=next_offset, batch=8, shard=21):
    """The documents of each step over all ranks, sorted: {step: [document]}."""
    per_step = num_micro_batches(batch, world_size, local_batch_size)
    steps = {step: [] for step in range(first, last + 1)}
    for rank in range(world_size):
        sampler = StepBatchSampler(first, last, offset, batch, shard, rank, world_size, local_batch_size)
        micro_batches = list(sampler)
        assert len(micro_batches) == len(sampler) == per_step * (last - first + 1)
        for i, micro_batch in enumerate(micro_batches):
            steps[first + i // per_step] += micro_batch
    return {step: sorted(documents) for step, documents in steps.items()}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("local_batch_size", [1, 2, 8, 16])
def test_step_trains_on_the_same_documents_on_any_layout(world_size, local_batch_size):
    read = documents_in_reading_order(21, 6 * 8)
    expected = {step: sorted(read[(step - 1) * 8 : step * 8]) for step in range(1, 7)}
    assert sampled_by_step(world_size, local_batch_size) == expected


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_shard_smaller_than_the_global_batch(world_size):
    steps = sampled_by_step(world_size, 2, batch=8, shard=3, last=2)
    assert steps == {1: [0, 0, 0, 1, 1, 1, 2, 2], 2: [0, 0, 0, 1, 1, 2, 2, 2]}


def test_rewind_starts_every_phase_from_the_first_document():
    rewind = lambda step: (step - 1) % 3  # noqa: E731  three phases of three steps
    steps = sampled_by_step(2, 2, last=9, offset=rewind)
    assert steps[1] == list(range(8))
    for step in range(1, 7):
        assert steps[step + 3] == steps[step]


@pytest.mark.parametrize("first", [1, 2, 5, 6, 7])
def test_resumed_sampler_is_the_tail(first):
    whole = list(StepBatchSampler(1, 6, next_offset, 7, 10, 1, 2, 2))
    per_step = num_micro_batches(7, 2, 2)
    assert list(StepBatchSampler(first, 6, next_offset, 7, 10, 1, 2, 2)) == whole[(first - 1) * per_step :]


@pytest.mark.parametrize(
    "position, name", [(0, "first step"), (3, "training.global_batch_size"), (7, "training.local_batch_size")]
)
def test_sampler_refuses_what_is_not_positive(position, name):
    args = [1, 6, next_offset, 7, 10, 0, 2, 2]
    args[position] = 0
    with pytest.raises(ValueError, match=f"{name} = 0 must be at least 1"):
        StepBatchSampler(*args)


# Collator


def test_collator_shifts_and_pads():
    inputs, labels = Collator(PAD_ID)([[1, 2, 3, 4], [5, 6], [7]])
    assert list(inputs) == ["input"]
    assert inputs["input"].tolist() == [[1, 2, 3], [5, PAD_ID, PAD_ID], [PAD_ID, PAD_ID, PAD_ID]]
    ignored = IGNORE_INDEX
    assert labels.tolist() == [[2, 3, 4], [6, ignored, ignored], [ignored, ignored, ignored]]
    assert inputs["input"].dtype == labels.dtype == torch.int64
    assert IGNORE_INDEX == -100


@pytest.mark.parametrize("multiple, length", [(1, 5), (2, 6), (4, 8), (5, 5), (8, 8), (64, 64)])
def test_collator_rounds_the_length_up(multiple, length):
    inputs, labels = Collator(PAD_ID, multiple)([[1, 2, 3, 4, 5, 6], [1, 2]])
    assert inputs["input"].shape == labels.shape == (2, length)
    assert (labels != IGNORE_INDEX).sum() == 6
    assert (inputs["input"][:, 5:] == PAD_ID).all()


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("documents, rows", [([], 1), ([[3]], 1), ([[3], [3]], 2)])
def test_collator_without_predictions_ignores_every_label(documents, rows, multiple):
    inputs, labels = Collator(PAD_ID, multiple)(documents)
    assert inputs["input"].tolist() == [[PAD_ID] * multiple] * rows
    assert labels.tolist() == [[IGNORE_INDEX] * multiple] * rows


def test_collator_refuses_a_wrong_multiple():
    with pytest.raises(ValueError, match="documents.pad_to_multiple_of = 0 must be at least 1"):
        Collator(PAD_ID, 0)


# Loader


class Numbers(Dataset):
    """Document i is [10 i + 1, 10 i + 2, ...], of 1 to 4 ids; remembers what this process was asked for."""

    def __init__(self, length, bad=None):
        self.length, self.bad, self.asked = length, bad, []

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        self.asked.append(i)
        if i == self.bad:
            raise ValueError(f"file.jsonl:{i}: bad")
        return [10 * i + j for j in range(1, 2 + i % 4)]


def make_loader(source, *, num_workers=0, last_step=5, rank=0, world_size=1, offset=next_offset, **config):
    return DocumentDataLoader(
        source,
        Collator(PAD_ID),
        offset_of_step=offset,
        last_step=last_step,
        global_batch_size=7,
        rank=rank,
        world_size=world_size,
        local_batch_size=2,
        config=DataLoaderConfig(num_workers=num_workers, **config),
    )


def as_lists(batches):
    return [(inputs["input"].tolist(), labels.tolist()) for inputs, labels in batches]


def plain_batches(first_step, last_step, rank, world_size, num_documents=10):
    """A plain loop over documents: what a loader must give for G = 7, L = 2."""
    source, batches = Numbers(num_documents), []
    for step in range(first_step, last_step + 1):
        mine = [((step - 1) * 7 + i) % num_documents for i in range(7) if i % world_size == rank]
        for start in range(0, -(-7 // world_size), 2):
            rows = [source[i] for i in mine[start : start + 2]] or [[PAD_ID]]
            width = max([1, *(len(row) - 1 for row in rows)])
            inputs = [row[:-1] + [PAD_ID] * (width - len(row) + 1) for row in rows]
            labels = [row[1:] + [IGNORE_INDEX] * (width - len(row) + 1) for row in rows]
            batches.append((inputs, labels))
    return batches


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loader_gives_the_documents_of_a_plain_loop(world_size):
    for rank in range(world_size):
        loader = make_loader(Numbers(10), rank=rank, world_size=world_size)
        assert as_lists(loader) == plain_batches(1, 5, rank, world_size)


def test_loader_without_workers_reads_only_from_its_first_step():
    source = Numbers(100)
    next(make_loader(source).iterate_from(3))
    assert source.asked == [14, 15]


def test_resume_on_other_worker_counts_continues_the_run():
    """Steps 1-2 without workers, 3 with two, 4-5 with one; of 3 ranks, the last two get empty micro-batches."""
    for rank in range(3):
        parts = []
        for first, last, num_workers in ((1, 2, 0), (3, 3, 2), (4, 5, 1)):
            loader = make_loader(Numbers(10), num_workers=num_workers, last_step=last, rank=rank, world_size=3)
            loader.first_step = first
            parts += as_lists(loader)
        assert parts == plain_batches(1, 5, rank, 3)
        empty = ([[PAD_ID]], [[IGNORE_INDEX]])
        assert (parts[1::2] == [empty] * 5) == (rank > 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterator_dropped_ahead_of_training_changes_nothing(num_workers):
    """Look-ahead hands out batches that are never trained on; a new iterator at the step still has them."""
    loader = make_loader(Numbers(10), num_workers=num_workers)
    ahead = iter(loader)
    for _ in range(7):
        next(ahead)
    del ahead
    assert loader.state_dict() == {}
    loader.load_state_dict({"anything": 1})
    assert as_lists(loader.iterate_from(2)) == plain_batches(2, 5, 0, 1)


def test_students_come_and_go():
    """2 -> 1 -> 3 ranks: each step still trains on its own documents."""
    read = documents_in_reading_order(10, 5 * 7)
    for step, world_size in ((1, 2), (2, 1), (3, 3), (4, 3), (5, 2)):
        seen = []
        for rank in range(world_size):
            source = Numbers(10)
            list(make_loader(source, rank=rank, world_size=world_size, last_step=step).iterate_from(step))
            seen += source.asked
        assert sorted(seen) == sorted(read[(step - 1) * 7 : step * 7])


def test_global_batch_set_after_building_counts():
    """torchtitan may be shown a multiple of the ranks while the loader is built."""
    loader = make_loader(Numbers(10), last_step=1)
    loader.global_batch_size = 3
    assert [len(labels) for _, labels in loader] == [2, 1]


def test_loader_past_the_last_step_is_empty():
    assert list(make_loader(Numbers(10)).iterate_from(6)) == []


@pytest.mark.parametrize("config", [{}, {"persistent_workers": True, "prefetch_factor": 4}])
def test_workers_end_when_the_iterator_is_dropped(config):
    before = set(multiprocessing.active_children())
    gc.disable()  # as torchtitan does while training
    try:
        iterator = make_loader(Numbers(10), num_workers=2, **config).iterate_from(1)
        next(iterator)
        workers = set(multiprocessing.active_children()) - before
        assert len(workers) == 2
        del iterator
        assert set(multiprocessing.active_children()) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_takes_no_random_numbers(num_workers):
    state = torch.get_rng_state()
    next(iter(make_loader(Numbers(10), num_workers=num_workers)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_document_reaches_the_trainer_in_order(num_workers):
    iterator = iter(make_loader(Numbers(10, bad=5), num_workers=num_workers))
    for _ in range(2):
        next(iterator)
    with pytest.raises(ValueError, match=r"file\.jsonl:5: bad"):
        next(iterator)
    if num_workers:  # the traceback holds the iterator in a cycle; collected in one, it would wait 5 s for each worker
        iterator._shutdown_workers()


def test_worker_settings_without_workers_are_dropped():
    loader = make_loader(Numbers(10), persistent_workers=True, prefetch_factor=2, pin_memory=False)
    assert as_lists(loader) == plain_batches(1, 5, 0, 1)


@pytest.mark.parametrize("name, value", [("num_workers", -1), ("prefetch_factor", 0)])
def test_wrong_worker_settings(name, value):
    with pytest.raises(ValueError, match=f"training.dataloader.{name} = {value} must be at least"):
        make_loader(Numbers(10), **{name: value})
