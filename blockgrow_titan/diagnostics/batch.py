"""The fixed batch of the diagnostics: the same tokens at every validation, on every rank, whatever their number.

    held-out documents, in an order seeded with 42 -> each a row of its own -> the first ``tokens`` tokens
    -> sorted by length, a few rows a micro-batch

Every rank runs the whole batch: FSDP needs all of them in each forward, and so no result depends on how many there are.
A row holds all tokens of its document, the end of it too, which training sees as a label only: "tokens" counts all of
them, "predictions" those with a next token. Padding stands on the right and counts in neither.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from blockgrow_titan.diagnostics.token_types import TokenTyper
from blockgrow_titan.documents.batches import Collator
from blockgrow_titan.documents.source import DocumentSource

SEED = 42
SEQUENCES, SEQUENCE_TOKENS = 2, 2048
"""The paper's batch (Table 4)."""


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of the batch, on the CPU."""

    inputs: Tensor
    """[B, S] int64, right-padded."""
    labels: Tensor
    """[B, S] int64: the next token, ``IGNORE_INDEX`` after a document's last one and in padding."""
    valid: Tensor
    """[B, S] bool: not padding."""
    types: Tensor
    """[N] int64: index into ``TOKEN_TYPES`` of each valid token, row by row."""


@dataclass(frozen=True)
class FixedBatch:
    """All micro-batches, and what they hold together."""

    micro_batches: tuple[MicroBatch, ...]
    documents: int
    tokens: int
    predictions: int


def default_tokens(seq_len: int) -> int:
    """2 x 2048 tokens as in the paper, or 2 x the longest document where that is shorter."""
    return SEQUENCES * min(SEQUENCE_TOKENS, seq_len)


def draw_documents(source: DocumentSource, tokens: int) -> list[list[int]]:
    """Documents of ``tokens`` tokens together, the last one cut; fewer if the source holds fewer.

    Returns:
        For each document its token ids and the label of the last one: the id after the cut, or ``IGNORE_INDEX``.
        Documents without a prediction are left out.
    """
    drawn: list[list[int]] = []
    left = tokens
    for i in random.Random(SEED).sample(range(len(source)), len(source)):
        if left == 0:
            break
        ids = source[i]
        if len(ids) > 1:
            drawn.append([*ids, IGNORE_INDEX][: left + 1])
            left -= len(drawn[-1]) - 1
    return drawn


def fixed_batch(source: DocumentSource, tokens: int, rows: int, pad_to_multiple_of: int = 1) -> FixedBatch:
    """The batch of a set of documents.

    Args:
        source: The held-out documents.
        tokens: How many tokens.
        rows: Documents of a micro-batch. Changes memory and speed, never the result.
        pad_to_multiple_of: As ``documents.batches.Collator``.

    Raises:
        ValueError: If no document has a token to predict.
    """
    drawn = sorted(draw_documents(source, tokens), key=len)  # rows of a micro-batch need little padding
    if not drawn:
        raise ValueError("the validation documents are all empty: there is nothing to diagnose a student on")
    collate = Collator(source.end_of_document_id, pad_to_multiple_of)
    types_of = TokenTyper(source.tokenizer, source.end_of_document_id)
    micro_batches = []
    for start in range(0, len(drawn), rows):
        documents = drawn[start : start + rows]
        input_dict, labels = collate(documents)  # the last entry of each is a label only
        lengths = torch.tensor([len(document) - 1 for document in documents])
        micro_batches.append(
            MicroBatch(
                inputs=input_dict["input"],
                labels=labels,
                valid=torch.arange(labels.shape[1]) < lengths[:, None],
                types=torch.tensor([kind for document in documents for kind in types_of(document[:-1])]),
            )
        )
    return FixedBatch(
        micro_batches=tuple(micro_batches),
        documents=len(drawn),
        tokens=sum(int(m.valid.sum()) for m in micro_batches),
        predictions=sum(int((m.labels != IGNORE_INDEX).sum()) for m in micro_batches),
    )
