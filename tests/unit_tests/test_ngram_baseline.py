"""The n-gram baseline against the formula written out with loops, on a corpus small enough for that."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from tools.assets.ngram_baseline import KneserNey

ALPHABET = "abcdefghijklmnopqrstuvwxyz ."
START = len(ALPHABET)
TEXTS = (
    "the cat sat on the mat.",
    "the dog sat on the cat.",
    "a cat and a dog met on a mat.",
    "the hen ate the corn and the dog ran.",
    "we met the quick fox by the box.",
    "just a fox.",
)
HELD_OUT = ("the fox sat by a zoo.", "a hen.")


def ids(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


class PlainKneserNey:
    """Chen and Goodman's interpolated modified Kneser-Ney, one n-gram at a time."""

    def __init__(self, documents: list[list[int]], order: int, vocab_size: int):
        self.vocab_size = vocab_size
        self.counts: dict[int, Counter] = {n: Counter() for n in range(1, order + 1)}
        for document in documents:
            padded = [START] * (order - 1) + document
            for i in range(order - 1, len(padded)):
                self.counts[order][tuple(padded[i - order + 1 : i + 1])] += 1
        for n in range(order - 1, 0, -1):
            before = defaultdict(set)
            for gram in self.counts[n + 1]:
                before[gram[1:]].add(gram[0])
            for gram, firsts in before.items():
                self.counts[n][gram] = len(firsts)
        self.discounts = {}
        for n, counts in self.counts.items():
            n1, n2, n3, n4 = (sum(1 for c in counts.values() if c == i) for i in (1, 2, 3, 4))
            y = n1 / (n1 + 2 * n2)
            self.discounts[n] = (0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)

    def probability(self, gram: tuple[int, ...]) -> float:
        if not gram:
            return 1 / self.vocab_size
        counts, discounts = self.counts[len(gram)], self.discounts[len(gram)]
        followers = [c for g, c in counts.items() if g[:-1] == gram[:-1]]
        if not followers:
            return self.probability(gram[1:])
        total = sum(followers)
        left = sum(discounts[min(c, 3)] for c in followers) / total
        share = (counts[gram] - discounts[min(counts[gram], 3)]) / total
        return share + left * self.probability(gram[1:])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_matches_plain_formula(order: int) -> None:
    documents = [ids(text) for text in TEXTS]
    model = KneserNey(documents, order, len(ALPHABET))
    plain = PlainKneserNey(documents, order, len(ALPHABET))
    total, tokens = 0.0, 0
    for text in HELD_OUT:
        padded = [START] * (order - 1) + ids(text)
        for i in range(order, len(padded)):  # the first token of a document is context only
            total -= math.log(plain.probability(tuple(padded[i - order + 1 : i + 1])))
            tokens += 1
    ce, count = model.cross_entropy([ids(text) for text in HELD_OUT])
    assert count == tokens == sum(len(text) - 1 for text in HELD_OUT)
    assert ce == pytest.approx(total / tokens, rel=1e-12)


@pytest.mark.parametrize("context", ["", "t", "th", "he", "zz", "fz"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_sum_to_one(order: int, context: str) -> None:
    """In seen and unseen contexts, and at a document's start."""
    model = KneserNey([ids(text) for text in TEXTS], order, len(ALPHABET))
    history = ([START] * 2 + ids(context))[len(context) + 3 - order :]
    windows = np.array([[*history, token] for token in range(len(ALPHABET))], dtype=np.int64)
    probabilities = model.probabilities(windows)
    assert (probabilities > 0).all()
    assert probabilities.sum() == pytest.approx(1.0, rel=1e-12)


def test_too_small_corpus_is_refused() -> None:
    with pytest.raises(ValueError, match="discounts need at least one of each; give more documents"):
        KneserNey([ids("abc")], 2, len(ALPHABET))
