"""Micro-batches as tensors, and the loader (invariant 2)."""

import gc
import itertools
import multiprocessing
import traceback

import pytest
import torch
from torch.utils.data import Dataset
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config.job_config import DataLoader as DataLoaderConfig

from blockgrow_titan.documents.batches import (
    COMPILED_MULTIPLE,
    Collator,
    DocumentDataLoader,
    PackedCollator,
    build_collator,
    row_multiple,
)
from blockgrow_titan.documents.dealing import MICRO_BATCHING, MicroBatching
from blockgrow_titan.parse import parse_config
from tests.unit_tests.jobs import arguments

PAD_ID = 9


def next_offset(step):
    return step - 1


def documents_in_reading_order(num_documents, count):
    """The first ``count`` documents of the shard read again and again: an endless plain reading, as the reference."""
    return list(itertools.islice(itertools.cycle(range(num_documents)), count))


# Collator


def test_collator_shifts_and_pads():
    inputs, labels = Collator(PAD_ID)([[1, 2, 3, 4], [5, 6], [7]])
    assert list(inputs) == ["input"]
    assert inputs["input"].tolist() == [[1, 2, 3], [5, PAD_ID, PAD_ID]]
    ignored = IGNORE_INDEX
    assert labels.tolist() == [[2, 3, 4], [6, ignored, ignored]]
    assert inputs["input"].dtype == labels.dtype == torch.int64
    assert IGNORE_INDEX == -100


@pytest.mark.parametrize("multiple, length", [(1, 5), (2, 6), (4, 8), (5, 5), (8, 8), (64, 64)])
def test_collator_rounds_the_length_up(multiple, length):
    inputs, labels = Collator(PAD_ID, multiple)([[1, 2, 3, 4, 5, 6], [1, 2]])
    assert inputs["input"].shape == labels.shape == (2, length)
    assert (labels != IGNORE_INDEX).sum() == 6
    assert (inputs["input"][:, 5:] == PAD_ID).all()


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("documents", [[], [[3]], [[3], [3]]])
def test_collator_without_predictions_ignores_every_label(documents, multiple):
    inputs, labels = Collator(PAD_ID, multiple)(documents)
    assert inputs["input"].tolist() == [[PAD_ID] * multiple] and labels.tolist() == [[IGNORE_INDEX] * multiple]


def test_collator_refuses_a_wrong_multiple():
    with pytest.raises(ValueError, match="documents.pad_to_multiple_of = 0 must be at least 1"):
        Collator(PAD_ID, 0)


def test_packed_collator_lays_documents_end_to_end():
    inputs, labels = PackedCollator(PAD_ID)([[1, 2, 3, 4], [7], [5, 6], []])
    assert inputs["input"].tolist() == [[1, 2, 3, 5]] and labels.tolist() == [[2, 3, 4, 6]]
    assert inputs["document_lengths"] == (3, 1)
    assert inputs["input"].dtype == labels.dtype == torch.int64


@pytest.mark.parametrize("documents", [[], [[3]], [[3], [3]]])
def test_packed_collator_without_predictions(documents):
    inputs, labels = PackedCollator(PAD_ID, 4)(documents)
    assert inputs == {"input": inputs["input"], "document_lengths": ()}
    assert inputs["input"].tolist() == [[PAD_ID] * 4] and labels.tolist() == [[IGNORE_INDEX] * 4]


@pytest.mark.parametrize("multiple, length", [(1, 6), (4, 8), (8, 8)])
def test_packed_collator_rounds_the_row_up(multiple, length):
    inputs, labels = PackedCollator(PAD_ID, multiple)([[1, 2, 3, 4, 5], [6, 7, 8]])
    assert inputs["input"].shape == labels.shape == (1, length) and inputs["document_lengths"] == (4, 2)
    assert (labels[:, 6:] == IGNORE_INDEX).all() and (inputs["input"][:, 6:] == PAD_ID).all()


def test_collator_of_a_config(workspace, tmp_path):
    config = lambda **overrides: parse_config(arguments(workspace, tmp_path, **overrides))  # noqa: E731
    for kind, cls in (("packed", PackedCollator), ("balanced", Collator), ("count", Collator)):
        collator = build_collator(config(documents__micro_batching=kind), PAD_ID, 24)
        assert type(collator) is cls and (collator.pad_id, collator.pad_to_multiple_of) == (PAD_ID, 1)
    assert row_multiple(config(documents__pad_to_multiple_of=3), 24) == 3
    compiled = config(compile__enable=True)
    assert [row_multiple(compiled, seq_len) for seq_len in (8192, 24, 7)] == [COMPILED_MULTIPLE, 8, 1]
    compiled.compile.components = ["loss"]
    assert row_multiple(compiled, 8192) == 1


# Loader


class Numbers(Dataset):
    """Document i is [10 i + 1, 10 i + 2, ...], of 1 to 4 ids; remembers what this process was asked for."""

    def __init__(self, count, bad=None, knows_lengths=False):
        self.count, self.bad, self.knows_lengths, self.asked = count, bad, knows_lengths, []

    def __len__(self):
        return self.count

    def length(self, i):
        return 1 + i % 4 if self.knows_lengths else None

    def __getitem__(self, i):
        self.asked.append(i)
        if i == self.bad:
            raise ValueError(f"file.jsonl:{i}: bad")
        return [10 * i + j for j in range(1, 2 + i % 4)]

    def read(self, documents):
        return [self[i] for i in documents]


def make_loader(
    source, *, kind="count", num_workers=0, last_step=5, rank=0, world_size=1, offset=next_offset, **config
):
    return DocumentDataLoader(
        source,
        (PackedCollator if kind == "packed" else Collator)(PAD_ID),
        MicroBatching(kind, 2, 6),
        offset_of_step=offset,
        last_step=last_step,
        global_batch_size=7,
        rank=rank,
        world_size=world_size,
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
            rows = [source[i] for i in mine[start : start + 2] if len(source[i]) > 1] or [[PAD_ID]]
            width = max([1, *(len(row) - 1 for row in rows)])
            inputs = [row[:-1] + [PAD_ID] * (width - len(row) + 1) for row in rows]
            labels = [row[1:] + [IGNORE_INDEX] * (width - len(row) + 1) for row in rows]
            batches.append((inputs, labels))
    return batches


def documents_of(input_dict, labels):
    """The documents of a micro-batch as ids, those without a prediction left out; checks that the rest is padding."""
    rows = list(zip(input_dict["input"].tolist(), labels.tolist(), strict=True))
    if "document_lengths" in input_dict:
        ((inputs, row_labels),) = rows
        ends = list(itertools.accumulate(input_dict["document_lengths"], initial=0))
        rows = [(inputs[a:b], row_labels[a:b]) for a, b in itertools.pairwise(ends)]
        assert set(row_labels[ends[-1] :]) <= {IGNORE_INDEX}
    found = []
    for inputs, row_labels in rows:
        length = sum(label != IGNORE_INDEX for label in row_labels)
        assert set(row_labels[length:]) <= {IGNORE_INDEX}
        if length:
            assert inputs[1:length] == row_labels[: length - 1]
            found.append([*inputs[:length], row_labels[length - 1]])
    return found


@pytest.mark.parametrize("kind", MICRO_BATCHING)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_step_holds_the_same_documents_on_any_layout(kind, world_size):
    """Documents, and micro-batches of a step on every rank, whether the reader knows lengths or not."""
    read = documents_in_reading_order(10, 5 * 7)
    for knows_lengths in (False, True):
        steps, turns = [], []
        for rank in range(world_size):
            source = Numbers(10, knows_lengths=knows_lengths)
            batches = list(make_loader(source, kind=kind, rank=rank, world_size=world_size))
            assert all(labels.numel() <= 6 for _, labels in batches)
            last = [i for i, (input_dict, _) in enumerate(batches, start=1) if input_dict["last_of_step"]]
            turns.append(last)
            steps.append(
                [[d for batch in batches[a:b] for d in documents_of(*batch)] for a, b in itertools.pairwise([0, *last])]
            )
        assert len(last) == 5 and all(mine == turns[0] for mine in turns) and turns[0][-1] == len(batches)
        for step in range(5):
            whole = [Numbers(10)[i] for i in read[step * 7 : (step + 1) * 7] if i % 4]
            assert sorted(sum((mine[step] for mine in steps), [])) == sorted(whole)


@pytest.mark.parametrize("kind", ["packed", "balanced"])
def test_only_unknown_lengths_are_read(kind):
    """A rank of seven reads one document of seven where lengths are known, and all of them where they are not."""
    for knows_lengths, reads in ((True, 1), (False, 7)):
        source = Numbers(10, knows_lengths=knows_lengths)
        list(make_loader(source, kind=kind, rank=3, world_size=7, last_step=1))
        assert len(source.asked) == reads


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loader_gives_the_documents_of_a_plain_loop(world_size):
    for rank in range(world_size):
        loader = make_loader(Numbers(10), rank=rank, world_size=world_size)
        assert as_lists(loader) == plain_batches(1, 5, rank, world_size)


def test_loader_without_workers_reads_only_from_its_first_step():
    source = Numbers(100)
    next(make_loader(source).iterate_from(3))
    assert sorted(source.asked) == list(range(14, 21))


@pytest.mark.parametrize("kind", ["packed", "balanced"])
def test_workers_change_nothing_where_lengths_count(kind):
    whole = [make_loader(Numbers(10), kind=kind, rank=1, world_size=2, num_workers=n) for n in (0, 2)]
    plain, shared = (
        [(d["input"].tolist(), d.get("document_lengths"), labels.tolist()) for d, labels in loader] for loader in whole
    )
    assert plain == shared
    tail = [labels.tolist() for _, labels in whole[0].iterate_from(4)]
    assert tail == [labels for _, _, labels in plain][-len(tail) :] and tail


def test_a_first_step_that_is_no_step():
    for first_step, batch, words in ((0, 7, "first step = 0"), (1, 0, "training.global_batch_size = 0")):
        loader = make_loader(Numbers(10))
        loader.global_batch_size = batch
        with pytest.raises(ValueError, match=f"{words} must be at least 1"):
            loader.iterate_from(first_step)


def test_start_at_a_late_step_reads_nothing_before_it():
    source = Numbers(10)
    loader = make_loader(source, last_step=10**12)
    next(loader.iterate_from(10**12 - 1))
    assert len(source.asked) == 7


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
    assert [len(labels) for _, labels in loader] == [1, 1]  # of documents 0, 1 and 2, the first is empty


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
    iterator = iter(make_loader(Numbers(10, bad=8), num_workers=num_workers))
    assert [next(iterator)[0]["last_of_step"] for _ in range(4)] == [False, False, False, True]
    with pytest.raises(ValueError, match=r"file\.jsonl:8: bad") as error:
        next(iterator)
    # the traceback holds the workers in a cycle; collected in one, they would be waited for 5 s each
    traceback.clear_frames(error.tb)


def test_worker_settings_without_workers_are_dropped():
    loader = make_loader(Numbers(10), persistent_workers=True, prefetch_factor=2, pin_memory=False)
    assert as_lists(loader) == plain_batches(1, 5, 0, 1)


@pytest.mark.parametrize("name, value", [("num_workers", -1), ("prefetch_factor", 0)])
def test_wrong_worker_settings(name, value):
    with pytest.raises(ValueError, match=f"training.dataloader.{name} = {value} must be at least"):
        make_loader(Numbers(10), **{name: value})
