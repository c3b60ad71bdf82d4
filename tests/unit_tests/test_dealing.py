"""Which documents a step trains on (invariant 2), and how they are dealt to ranks and micro-batches."""

import itertools
import math

import numpy as np
import pytest

from blockgrow_titan.documents.dealing import (
    MICRO_BATCHING,
    MicroBatching,
    documents_of_offset,
    micro_batching_of,
    runs,
    split,
    spread,
)
from blockgrow_titan.model.args import FLAVORS
from blockgrow_titan.parse import parse_config
from tests.unit_tests.jobs import arguments

WORLD_SIZES = [1, 2, 3, 5, 7]


def web_lengths(rng, count, cap=8192, mean=972):
    """Lengths as web documents have them: log-normal, cut to the cap."""
    return np.clip(rng.lognormal(math.log(mean) - 0.5, 1.0, count).astype(int), 1, cap).tolist()


def padded(kind, lengths):
    """Positions that a micro-batch of these lengths takes."""
    return sum(lengths) if kind == "packed" else sum(map(bool, lengths)) * max([0, *lengths])


def documents_in_reading_order(num_documents, count):
    """The first ``count`` documents of the shard read again and again: an endless plain reading, as the reference."""
    return list(itertools.islice(itertools.cycle(range(num_documents)), count))


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


@pytest.mark.parametrize("kind", MICRO_BATCHING)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("local_batch_size", [1, 2, 8])
def test_deal_loses_and_doubles_nothing(kind, world_size, local_batch_size):
    rng = np.random.default_rng(0)
    micro_batching = MicroBatching(kind, local_batch_size, 100 * local_batch_size, attention_tokens=50)
    for count in range(23):
        lengths = rng.integers(0, 101, count).tolist()
        deal = micro_batching.deal(lengths, world_size)
        assert sorted(i for mine in deal for micro_batch in mine for i in micro_batch) == list(range(count))
        # every rank runs the same number of forwards, and none is above the limits
        assert len(deal) == world_size and len({len(mine) for mine in deal}) == 1
        for micro_batch in itertools.chain(*deal):
            if kind == "count":
                assert len(micro_batch) <= local_batch_size
            else:
                assert padded(kind, [lengths[i] for i in micro_batch]) <= micro_batching.tokens
            assert micro_batch == sorted(micro_batch)
        assert micro_batching.deal(lengths, world_size) == deal


def test_count_is_strided_and_fills_up_with_empty_micro_batches():
    deal = lambda count, world_size, documents: MicroBatching("count", documents, 99).deal([1] * count, world_size)  # noqa: E731
    assert deal(7, 2, 2)[1] == [[1, 3], [5]]
    assert deal(5, 2, 2) == [[[0, 2], [4]], [[1, 3], []]]
    assert deal(2, 5, 1) == [[[0]], [[1]], [[]], [[]], [[]]]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_packed_takes_no_more_rows_than_it_must(world_size):
    """As many micro-batches as a rank's share of the tokens needs, and one more at most."""
    rng = np.random.default_rng(world_size)
    for _ in range(20):
        lengths = rng.integers(1, 101, 64).tolist()
        for mine in MicroBatching("packed", 4, 400).deal(lengths, world_size):
            tokens = sum(lengths[i] for micro_batch in mine for i in micro_batch)
            assert len(mine) <= -(-tokens // 400) + 1


def test_packed_ranks_and_turns_have_equal_work():
    rng = np.random.default_rng(1)
    micro_batching = MicroBatching("packed", 4, 400, attention_tokens=100)
    lengths = rng.integers(1, 101, 256).tolist()
    work = [
        [sum(lengths[i] * (1 + lengths[i] / 100) for i in micro_batch) for micro_batch in mine]
        for mine in micro_batching.deal(lengths, 4)
    ]
    totals = [sum(mine) for mine in work]
    assert max(totals) <= 1.01 * np.mean(totals)
    for turn in zip(*work, strict=True):
        assert max(turn) <= 1.1 * np.mean(turn)
    assert all(mine == sorted(mine, reverse=True) for mine in work)


@pytest.mark.parametrize(("kind", "least_valid", "most_uneven"), [("packed", 0.98, 1.15), ("balanced", 0.85, 1.15)])
def test_documents_of_the_web(kind, least_valid, most_uneven):
    """Means over steps of the paper's batch: 64 documents of about 972 tokens, at most 8192, on 8 ranks."""
    rng = np.random.default_rng(2)
    micro_batching = MicroBatching(kind, 1, 8192, FLAVORS["8B"].attention_tokens)
    valid, uneven = [], []
    for _ in range(50):
        lengths = web_lengths(rng, 64)
        deal = [[[lengths[i] for i in micro_batch] for micro_batch in mine] for mine in micro_batching.deal(lengths, 8)]
        processed = sum(max(1, padded(kind, micro_batch)) for mine in deal for micro_batch in mine)
        valid.append(sum(lengths) / processed)
        as_run = lambda batch: batch if kind == "packed" else [max(batch)] * len(batch)  # noqa: E731
        work = [sum(micro_batching.cost(n) for batch in mine if batch for n in as_run(batch)) for mine in deal]
        uneven.append(max(work) / np.mean(work))
    assert np.mean(valid) >= least_valid and np.mean(uneven) <= most_uneven


def test_balanced_finds_the_least_possible_longest_micro_batch():
    """Against every way to cut the sorted documents into two runs."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        lengths = sorted(rng.integers(1, 30, 7).tolist(), reverse=True)
        least = min(max(k * lengths[0], (7 - k) * lengths[k]) for k in range(1, 7))
        deal = MicroBatching("balanced", 10, 300).deal(lengths, 2)
        assert max(padded("balanced", [lengths[i] for i in batch]) for mine in deal for batch in mine) <= least


def test_balanced_divides_equal_documents_equally():
    deal = MicroBatching("balanced", 4, 40).deal([10] * 16, 4)
    assert [[len(batch) for batch in mine] for mine in deal] == [[4]] * 4
    assert [[len(batch) for batch in mine] for mine in MicroBatching("balanced", 16, 160).deal([10] * 16, 4)] == [
        [4]
    ] * 4


def test_spread_is_within_its_bound_of_the_best_division():
    rng = np.random.default_rng(4)
    for _ in range(30):
        weights = rng.integers(1, 20, 7).tolist()
        bins = spread(weights, 3)
        assert sorted(i for b in bins for i in b) == list(range(7))
        best = min(
            max(sum(w for w, b in zip(weights, places, strict=True) if b == bin_) for bin_ in range(3))
            for places in itertools.product(range(3), repeat=7)
        )
        assert max(sum(weights[i] for i in b) for b in bins) <= 4 / 3 * best


def test_split_saves_the_most_padding():
    lengths = [90, 10, 10, 10, 8, 8]
    assert sorted(split(runs(range(6), lengths, 999), lengths, 2)) == [[0], [1, 2, 3, 4, 5]]
    assert sorted(split(runs(range(6), lengths, 999), lengths, 3)) == [[0], [1, 2, 3], [4, 5]]
    assert len(split([[0, 1], [2]], lengths, 9)) == 3  # no more than there are documents


def test_a_document_of_nothing_costs_nothing():
    for kind in ("packed", "balanced"):
        deal = MicroBatching(kind, 1, 10).deal([0, 0, 0], 2)
        assert sorted(i for mine in deal for batch in mine for i in batch) == [0, 1, 2] and len(deal[0]) == 1


@pytest.mark.parametrize("kind", ["packed", "balanced"])
def test_a_document_beyond_the_limit_is_no_endless_search(kind):
    with pytest.raises(AssertionError, match="a document of 11 tokens, 10 at most"):
        MicroBatching(kind, 1, 10).deal([3, 11], 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("pack", 1, 1), 'documents.micro_batching = "pack" must be one of: packed, balanced, count'),
        (("packed", 0, 1), "local_batch_size = 0 must be at least 1"),
        (("packed", 1, 0), "local_batch_size * seq_len = 0 must be at least 1"),
    ],
)
def test_wrong_values(values, words):
    with pytest.raises(ValueError) as error:
        MicroBatching(*values)
    assert str(error.value) == words


def test_limits_come_from_the_config(workspace, tmp_path):
    job_config = parse_config(
        arguments(workspace, tmp_path, training__local_batch_size=3, documents__micro_batching="balanced")
    )
    found = micro_batching_of(job_config, "train", 7.0)
    assert found == MicroBatching("balanced", 3, 3 * 24, 7.0)
    found = micro_batching_of(job_config, "validation", 7.0)
    assert (found.documents, found.tokens) == (4, 4 * 24)


def test_length_at_which_attention_costs_as_much_as_the_weights():
    """torchtitan's count for a layer: 6 FLOPs a weight, 12 a head, head dimension and key; causal attention half of it."""
    args = FLAVORS["8B"]
    weights = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    n = args.attention_tokens
    assert 6 * weights == pytest.approx(12 * 32 * 128 * n / 2)
