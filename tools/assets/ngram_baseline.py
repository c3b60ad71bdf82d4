"""What counting alone achieves: an interpolated modified Kneser-Ney model on the language model's own tokens.

The flow: tokenise every document alone and append the end-of-document token, as the loader does; count n-grams of the
train split; score the validation split. A document of the validation split is cut to ``seq_len`` ids, end token
included, and ``ids[1:]`` is predicted from ``ids[:-1]``: the first token is context only, so the cross-entropy is over
exactly the tokens that the language model is scored on. The counts come once from whole train documents and once from
train documents cut to ``seq_len``, which is all that the language model sees.

Run from the repository's root; it takes a few seconds::

    python tools/assets/ngram_baseline.py

Source of the formula: Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling" (1998),
section 3: interpolation, three discounts for each order, continuation counts below the highest order.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

ASSETS = Path(__file__).resolve().parents[2] / "blockgrow_titan" / "assets"


class KneserNey:
    """Interpolated modified Kneser-Ney model of one order; order 1 is the discounted unigram.

    A document is preceded by ``order - 1`` start markers, which are context only. The recursion ends at the uniform
    distribution over the vocabulary, so every token has a positive probability.

    Args:
        documents: token ids of each document, all in [0, vocab_size).
        order: length of the n-grams, at least 1.
        vocab_size: number of tokens that can follow a context.

    Raises:
        ValueError: an order has no n-gram that occurs once, twice, three or four times; the discounts need all four.
    """

    def __init__(self, documents: list[list[int]], order: int, vocab_size: int):
        self.order, self.vocab_size = order, vocab_size
        self.base = vocab_size + 1  # the start marker is the id vocab_size
        grams = self.pack(self.windows(documents))
        # From the highest order down: n-grams as sorted integers, their share of the context's count after the
        # discount, the contexts, and the mass that each context leaves to the next lower order.
        self.tables: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        for n in range(order, 0, -1):
            # The highest order counts occurrences; a lower one counts the distinct n-grams that end in it.
            grams, counts = np.unique(grams, return_counts=True)
            self.tables.append(self.discounted(grams, counts, n))
            grams = grams % self.base ** (n - 1)

    def windows(self, documents: list[list[int]]) -> np.ndarray:
        """Every token with the ``order - 1`` ids before it, document by document. int64 [tokens, order]."""
        pad = [self.vocab_size] * (self.order - 1)
        ids = np.array([token for document in documents for token in pad + list(document)], dtype=np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(ids, self.order)  # [ids - order + 1, order]
        return windows[windows[:, -1] != self.vocab_size]

    def pack(self, windows: np.ndarray) -> np.ndarray:
        """One integer for each n-gram, the last token in the lowest digits. [N, order] -> [N]."""
        return windows @ self.base ** np.arange(self.order - 1, -1, -1, dtype=np.int64)

    def discounted(
        self, grams: np.ndarray, counts: np.ndarray, n: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The table of one order (see ``__init__``) from its sorted n-grams and their counts."""
        n1, n2, n3, n4 = ((counts == i).sum() for i in (1, 2, 3, 4))
        if min(n1, n2, n3, n4) == 0:
            raise ValueError(
                f"the {n}-grams that occur 1, 2, 3 and 4 times number {n1}, {n2}, {n3} and {n4}: the discounts need "
                "at least one of each; give more documents"
            )
        y = n1 / (n1 + 2 * n2)
        discounts = np.array([0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
        discount = discounts[np.minimum(counts, 3)]
        contexts, of = np.unique(grams // self.base, return_inverse=True)
        totals = np.bincount(of, weights=counts)
        return grams, (counts - discount) / totals[of], contexts, np.bincount(of, weights=discount) / totals

    def probabilities(self, windows: np.ndarray) -> np.ndarray:
        """p(last id | ids before it). int64 [N, order] -> float64 [N]."""
        keys = self.pack(windows)
        result = np.zeros(len(keys))
        weight = np.ones(len(keys))  # what the higher orders leave; an unseen context leaves all of it
        for n, (grams, shares, contexts, left) in zip(range(self.order, 0, -1), self.tables, strict=True):
            keys = keys % self.base**n
            result += weight * lookup(grams, shares, keys, 0.0)
            weight *= lookup(contexts, left, keys // self.base, 1.0)
        return result + weight / self.vocab_size

    def cross_entropy(self, documents: list[list[int]]) -> tuple[float, int]:
        """Mean -ln p over every token but the first of each document, in nats, and the number of those tokens."""
        windows = np.concatenate([self.windows([document])[1:] for document in documents])
        return float(-np.log(self.probabilities(windows)).mean()), len(windows)


def lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, default: float) -> np.ndarray:
    """``values`` at the positions of ``wanted`` in the sorted ``keys``, ``default`` where it is absent."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], default)


def tokenize(path: Path, tokenizer: Tokenizer, text_column: str, end_of_document: str) -> list[list[int]]:
    """Token ids of every document of a jsonl file, each tokenised alone and closed by ``end_of_document``.

    Raises:
        ValueError: the tokenizer has no such token.
    """
    end = tokenizer.token_to_id(end_of_document)
    if end is None:
        raise ValueError(f"--end_of_document = {end_of_document!r} is not in the tokenizer; name a token that is")
    with open(path, encoding="utf-8") as file:
        texts = [json.loads(line)[text_column] for line in file]
    return [encoding.ids + [end] for encoding in tokenizer.encode_batch(texts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, default=ASSETS / "corpus" / "austen_train.jsonl")
    parser.add_argument("--validation", type=Path, default=ASSETS / "corpus" / "austen_validation.jsonl")
    parser.add_argument("--tokenizer", type=Path, default=ASSETS / "tokenizer" / "tokenizer.json")
    parser.add_argument("--seq_len", type=int, default=256, help="ids of a document, end token included")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--end_of_document", default="<|endoftext|>")
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    train, validation = (
        tokenize(path, tokenizer, args.text_column, args.end_of_document) for path in (args.train, args.validation)
    )
    validation = [ids[: args.seq_len] for ids in validation]
    print("interpolated modified Kneser-Ney, next-token cross-entropy in nats on the validation split")
    print(f"validation: {len(validation)} documents cut to {args.seq_len} ids")
    print(f"{'train documents':<18}{'tokens':>10}{'unigram':>10}{'bigram':>10}{'trigram':>10}{'predicted':>11}")
    for name, cut in (("whole", None), (f"cut to {args.seq_len}", args.seq_len)):
        documents = [ids[:cut] for ids in train]
        row = [KneserNey(documents, n, tokenizer.get_vocab_size()).cross_entropy(validation) for n in (1, 2, 3)]
        figures = "".join(f"{ce:>10.4f}" for ce, _ in row)
        print(f"{name:<18}{sum(map(len, documents)):>10}{figures}{row[0][1]:>11}")


if __name__ == "__main__":
    main()
