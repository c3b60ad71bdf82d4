"""Which documents a step trains on, and which rank and micro-batch each of them goes to.

    step -> offset t -> documents [t*G, (t+1)*G) modulo the shard -> their lengths -> ranks -> micro-batches

All of it is a pure function of the step and the documents' lengths: world size, micro-batching, look-ahead and loader
workers change who handles a document and when, never which documents a step trains on (invariant 2).

A document of n tokens here has n inputs and n labels: it has n + 1 token ids. One of none is dealt, but takes no place in a
row. Every rank gets equally many micro-batches,
some of them empty, so that all run the same number of forwards and collectives. ``documents.micro_batching`` names the
way; only "count" does not look at lengths. Work is estimated as FLOPs: a document costs its tokens times
1 + tokens / ``attention_tokens``.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from blockgrow_titan.job_config import JobConfig

MICRO_BATCHING = ("packed", "balanced", "count")

Deal = list[list[list[int]]]
"""For each rank its micro-batches, for each of those its documents, as places in the list that was dealt."""


def documents_of_offset(t: int, global_batch_size: int, num_documents: int) -> list[int]:
    """Return the documents of the step with offset ``t`` (from 0): [t*G, (t+1)*G) modulo the shard, G indices."""
    first = t * global_batch_size
    return [(first + i) % num_documents for i in range(global_batch_size)]


@dataclass(frozen=True)
class MicroBatching:
    """How documents are cut into micro-batches.

    Raises:
        ValueError: If a value is not what it must be.
    """

    kind: str
    """Of ``MICRO_BATCHING``: ``documents.micro_batching``."""
    documents: int
    """``local_batch_size``: of a micro-batch of kind "count"."""
    tokens: int
    """``local_batch_size * seq_len``: the tokens of a micro-batch at most, padding included."""
    attention_tokens: float = math.inf
    """Length at which a document's attention takes as many FLOPs as its matrix products with weights."""

    def __post_init__(self) -> None:
        if self.kind not in MICRO_BATCHING:
            raise ValueError(f'documents.micro_batching = "{self.kind}" must be one of: {", ".join(MICRO_BATCHING)}')
        for name, value in (("local_batch_size", self.documents), ("local_batch_size * seq_len", self.tokens)):
            if value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")

    def __str__(self) -> str:
        if self.kind == "count":
            return f"micro-batches of {self.documents} documents"
        return f"{self.kind} micro-batches of at most {self.tokens:,} tokens"

    @property
    def needs_lengths(self) -> bool:
        return self.kind != "count"

    def cost(self, tokens: int) -> float:
        """Estimated FLOPs of a document, in units of one token without attention."""
        return tokens * (1 + tokens / self.attention_tokens)

    def deal(self, lengths: Sequence[int], world_size: int) -> Deal:
        """Deal all documents of a step to the micro-batches of all ranks.

        Args:
            lengths: The documents' tokens, each ``tokens`` at most; of "count" only how many there are matters.
            world_size: Ranks that train.

        Returns:
            Every document once; equally many micro-batches for every rank, in which work falls, so that the ranks'
            micro-batches of the same turn are alike.
        """
        if self.kind == "count":
            return self._count(len(lengths), world_size)
        assert max(lengths, default=0) <= self.tokens, f"a document of {max(lengths)} tokens, {self.tokens} at most"
        if self.kind == "packed":
            return self._packed(lengths, world_size)
        return self._balanced(lengths, world_size)

    def _count(self, documents: int, world_size: int) -> Deal:
        """Document i goes to rank i modulo the ranks; ``documents`` at a time there."""
        turns = -(-documents // (world_size * self.documents))
        ranks = [range(rank, documents, world_size) for rank in range(world_size)]
        return [[[*mine[i * self.documents : (i + 1) * self.documents]] for i in range(turns)] for mine in ranks]

    def _packed(self, lengths: Sequence[int], world_size: int) -> Deal:
        """Equal work for the ranks, then equal tokens for the fewest rows that hold them."""
        ranks = spread([self.cost(n) for n in lengths], world_size)
        turns = max(1, *(-(-sum(lengths[i] for i in mine) // self.tokens) for mine in ranks))
        while True:
            rows = [[[mine[j] for j in row] for row in spread([lengths[i] for i in mine], turns)] for mine in ranks]
            if all(sum(lengths[i] for i in row) <= self.tokens for mine in rows for row in mine):
                return [self._heaviest_first(mine, lengths) for mine in rows]
            turns += 1

    def _balanced(self, lengths: Sequence[int], world_size: int) -> Deal:
        """Documents by length, cut where the longest micro-batch is shortest; then equal work for the ranks."""
        order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i))
        turns = max(1, -(-len(runs(order, lengths, self.tokens)) // world_size))
        low, high = max([1, *lengths]), self.tokens
        while low < high:  # the least padded tokens that give no more micro-batches
            middle = (low + high) // 2
            if len(runs(order, lengths, middle)) <= turns * world_size:
                high = middle
            else:
                low = middle + 1
        groups = split(runs(order, lengths, high), lengths, turns * world_size) or [[]]
        groups[-1] += [i for i, n in enumerate(lengths) if not n]  # these take no row
        return self._in_turns(groups, lengths, turns, world_size)

    def _in_turns(self, groups: list[list[int]], lengths: Sequence[int], turns: int, world_size: int) -> Deal:
        """Each turn deals the next heaviest groups, the heaviest of them to the rank with the least work so far."""
        rows = [[lengths[i] for i in group if lengths[i]] for group in groups]
        costs = [len(row) * self.cost(max(row, default=0)) for row in rows]
        heaviest = sorted(range(len(groups)), key=lambda g: -costs[g])
        deal: Deal = [[] for _ in range(world_size)]
        work = [0.0] * world_size
        for turn in range(turns):
            dealt = heaviest[turn * world_size : (turn + 1) * world_size]
            idle_first = sorted(range(world_size), key=lambda rank: work[rank])
            for place, rank in enumerate(idle_first):
                group = groups[dealt[place]] if place < len(dealt) else []
                deal[rank].append(sorted(group))
                work[rank] += costs[dealt[place]] if place < len(dealt) else 0.0
        return deal

    def _heaviest_first(self, rows: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        return sorted((sorted(row) for row in rows), key=lambda row: -sum(self.cost(lengths[i]) for i in row))


def micro_batching_of(job_config: JobConfig, split: str, attention_tokens: float) -> MicroBatching:
    """How a job cuts the documents of a split, "train" or "validation".

    Args:
        job_config: The job's config.
        split: Whose ``local_batch_size`` and ``seq_len`` count.
        attention_tokens: Of the student's dimensions.
    """
    section = job_config.training if split == "train" else job_config.validation
    return MicroBatching(
        kind=job_config.documents.micro_batching,
        documents=section.local_batch_size,
        tokens=section.local_batch_size * section.seq_len,
        attention_tokens=attention_tokens,
    )


def spread(weights: Sequence[float], bins: int) -> list[list[int]]:
    """Spread items over bins so that the bins' weights are near-equal: the heaviest first, each into the lightest bin.

    No bin is more than 4/3 of what the best division has as its heaviest (Graham, "Bounds on Multiprocessing Timing
    Anomalies", SIAM J. Appl. Math. 17, 1969).
    """
    filled: list[list[int]] = [[] for _ in range(bins)]
    lightest = [(0.0, b) for b in range(bins)]
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        weight, b = lightest[0]
        filled[b].append(i)
        heapq.heapreplace(lightest, (weight + weights[i], b))
    return filled


def runs(order: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Cut documents, none empty, that are sorted from long to short into runs of at most ``tokens`` padded tokens, each filled up."""
    cut: list[list[int]] = []
    start = 0
    while start < len(order):
        rows = max(1, tokens // lengths[order[start]])
        cut.append([*order[start : start + rows]])
        start += rows
    return cut


def split(groups: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Split runs of documents, sorted from long to short, where it saves most padding, until there are ``count``."""

    def with_saving(group: list[int]) -> tuple[int, int, list[int], int]:
        longest = lengths[group[0]]
        places = range(1, len(group))
        middle = len(group) / 2
        # saved by a cut at k: the rows from k on are only as long as row k; of equal ones the cut nearest to the middle
        saving = lambda k: (len(group) - k) * (longest - lengths[group[k]])  # noqa: E731
        k = max(places, key=lambda k: (saving(k), -abs(k - middle)), default=0)
        return (-saving(k) if k else 1, -len(group), group, k)

    heap = [with_saving(group) for group in groups]
    heapq.heapify(heap)
    while len(heap) < count and heap:
        _, _, group, k = heap[0]
        if k == 0:
            break  # single documents only
        heapq.heapreplace(heap, with_saving(group[:k]))
        heapq.heappush(heap, with_saving(group[k:]))
    return [entry[2] for entry in heap]
