"""Packed, balanced and counted micro-batches: padding, balance of the ranks, and speed of a student on them.

Padding and balance are counted on the dealing alone, for the paper's batch: 64 documents, log-normal lengths of mean 972
cut at 8192, 8 ranks, 8192 tokens as the limit of a micro-batch (8 documents for "count"). Speed is that of
a small student's forward and backward over one rank's documents, the same for all three.
"""

import math
import random
from collections.abc import Callable, Iterator
from statistics import mean, median

import torch
from torchtitan.tools.utils import device_type

from blockgrow_titan.distill.head import LossTargets
from blockgrow_titan.distill.objective import Objective
from blockgrow_titan.documents.batches import COMPILED_MULTIPLE, Batch, Collator, PackedCollator
from blockgrow_titan.documents.dealing import MICRO_BATCHING, MicroBatching
from blockgrow_titan.model.args import FLAVORS, BlockStackArgs
from blockgrow_titan.model.model import BlockStackModel
from tools.benchmarks.rows import Row, at_least, at_most, interleaved, median_ratio

SUBJECT = "micro_batches"
MEAN, CAP, DOCUMENTS, RANKS, STEPS = 972, 8192, 64, 8, 200
SIGMA = 1.0  # of the logarithm: half of the documents are below 590 tokens
VALID_BAR = {"packed": 0.98, "balanced": 0.85}
WORK_BAR = 1.15
MAX_LOSS_DIFFERENCE = 1e-5


def web_lengths(count: int, rng: random.Random, longest: int = CAP, average: int = MEAN) -> list[int]:
    """Lengths of documents in tokens, log-normal, 1 to ``longest``."""
    mu = math.log(average) - SIGMA**2 / 2
    return [min(longest, max(1, int(rng.lognormvariate(mu, SIGMA)))) for _ in range(count)]


def dealing() -> Iterator[Row]:
    """What the dealing alone decides."""
    for kind in MICRO_BATCHING:
        rng = random.Random(0)
        cut = MicroBatching(kind, DOCUMENTS // RANKS, CAP, FLAVORS["8B"].attention_tokens)
        valid, rounded, work, turns, rows = [], [], [], [], set()
        for _ in range(STEPS):
            lengths = web_lengths(DOCUMENTS, rng)
            ranks, processed, with_multiple = [], 0, 0
            for mine in cut.deal(lengths, RANKS):
                ranks.append(0.0)
                for micro_batch in mine:
                    n = [lengths[i] for i in micro_batch] or [1]
                    count, length = (1, sum(n)) if kind == "packed" else (len(n), max(n))
                    compiled = -(-length // COMPILED_MULTIPLE) * COMPILED_MULTIPLE
                    processed, with_multiple = processed + count * length, with_multiple + count * compiled
                    rows.add(compiled)
                    ranks[-1] += sum(map(cut.cost, n if kind == "packed" else [length] * count))
            valid.append(sum(lengths) / processed)
            rounded.append(sum(lengths) / with_multiple)
            work.append(max(ranks) / mean(ranks))
            turns.append(len(mine))
        note = f"mean of {STEPS} steps, {mean(turns):.2f} micro-batches a rank"
        if kind in VALID_BAR:
            yield at_least(SUBJECT, f"valid / processed, {kind}", mean(valid), "", VALID_BAR[kind], note)
        else:
            yield Row(SUBJECT, f"valid / processed, {kind}", mean(valid), "", note=note)
        name = f"slowest rank / mean rank, estimated FLOPs, {kind}"
        note = f"median {median(work):.3f}; a rank that holds one document of {CAP:,} tokens can be no faster"
        if kind == "packed":
            yield at_most(SUBJECT, name, mean(work), "", WORK_BAR, note)
        else:
            yield Row(SUBJECT, name, mean(work), "")
        yield Row(SUBJECT, f"valid / processed, {kind}, with torch.compile", mean(rounded), "")
        note = f"of {RANKS * sum(turns)} rows, rounded up to {COMPILED_MULTIPLE} tokens, with torch.compile"
        yield Row(SUBJECT, f"lengths of rows, {kind}", len(rows), "", note=note)


def student(args: BlockStackArgs, device: torch.device, dtype: torch.dtype) -> BlockStackModel:
    """A student on one device, not sharded, its head frozen: the head takes the same time on every micro-batch."""
    model = BlockStackModel(args).to(device, dtype)
    model.init_weights(device)
    model.tok_embeddings.requires_grad_(False)
    return model


def step_of(
    model: BlockStackModel, batches: list[Batch], objective: Objective, device: torch.device
) -> Callable[[], float]:
    """Forward and backward over all micro-batches; returns their cross-entropy sum."""

    def run() -> float:
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for input_dict, labels in batches:
            targets = LossTargets(labels.to(device), objective)
            sums = model(input_dict["input"].to(device), targets, input_dict.get("document_lengths"))
            sums.loss.backward()
            total += sums.ce.double()
        return total.item()

    return run


def speed(args: BlockStackArgs, documents: int, seq_len: int, average: int, dtype: torch.dtype) -> Iterator[Row]:
    """A student's forward and backward over the same documents, cut in the three ways.

    Raises:
        AssertionError: If the losses differ.
    """
    rng = random.Random(1)
    ids = [
        [rng.randrange(args.vocab_size) for _ in range(n + 1)] for n in web_lengths(documents, rng, seq_len, average)
    ]
    lengths = [len(document) - 1 for document in ids]
    device = torch.device(device_type)
    model = student(args, device, dtype)
    objective = Objective(kd_weight=0.0, ce_weight=1.0, temperature=1.0, chunk_tokens=1024)
    runs, losses = {}, {}
    for kind in MICRO_BATCHING:
        cut = MicroBatching(kind, 4, 4 * seq_len, args.attention_tokens)
        collate = (PackedCollator if kind == "packed" else Collator)(0)
        batches = [collate([ids[i] for i in micro_batch]) for micro_batch in cut.deal(lengths, 1)[0]]
        runs[kind] = step_of(model, batches, objective, device)
        losses[kind] = runs[kind]()
    tolerance = MAX_LOSS_DIFFERENCE if dtype == torch.float32 else 2e-2
    assert all(abs(loss / losses["count"] - 1) < tolerance for loss in losses.values()), losses
    seconds = interleaved(runs)
    for kind in MICRO_BATCHING:
        tokens_per_s = sum(lengths) / median(seconds[kind])
        note = (
            f"{args.n_layers} layers of width {args.dim}, {documents} documents of {mean(lengths):.0f} tokens, {dtype}"
        )
        yield Row(SUBJECT, f"valid tokens/s, {kind}", tokens_per_s, "tokens/s", note=note)
    for kind in ("packed", "balanced"):
        yield Row(SUBJECT, f"speed, {kind} / count", median_ratio(seconds["count"], seconds[kind]), "x")


def run() -> Iterator[Row]:
    """Rows of this subject."""
    yield from dealing()
    if device_type == "cpu":
        args = BlockStackArgs(
            vocab_size=512, dim=256, n_layers=4, active_blocks=4, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=768
        )
        args.max_seq_len = 256
        yield from speed(args, documents=16, seq_len=256, average=120, dtype=torch.float32)
    else:
        args = FLAVORS["8B"]
        args.n_layers = args.active_blocks = 2
        args.vocab_size, args.max_seq_len = 4096, CAP
        yield from speed(args, documents=16, seq_len=CAP, average=MEAN, dtype=torch.bfloat16)
