"""Diagnostics on hand-made students and batches, against SciPy, plain loops and models built another way."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.spatial.distance
import scipy.stats
import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.diagnostics.batch import FixedBatch, default_tokens, draw_documents, fixed_batch
from blockgrow_titan.diagnostics.gradients import gradient_norms
from blockgrow_titan.diagnostics.probes import probe
from blockgrow_titan.diagnostics.recorder import histograms, record_of, scalars
from blockgrow_titan.diagnostics.statistics import (
    QUANTILES,
    RMS_BINS,
    angular_distance,
    bin_edges,
    histogram,
    kurtosis,
    summarize,
    token_rms,
)
from blockgrow_titan.diagnostics.token_types import TOKEN_TYPES
from blockgrow_titan.documents.source import DocumentSource, build_source
from blockgrow_titan.model.model import BlockStackModel
from tests.unit_tests.jobs import JOB_VOCAB
from tests.unit_tests.models import randomize_norms, small_model
from tests.unit_tests.students import user_placement  # noqa: F401  (a fixture)

CPU = torch.device("cpu")
TOKENS = 48


TEXTS = [
    "she had it.\n\nHer", "so", "", "the with on but, not in", "of", "be as for\nhis", "all my have: with that was I", "a"
]  # fmt: skip


@pytest.fixture(scope="module")
def source(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> DocumentSource:
    """Documents of 0 to more than 24 tokens."""
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokenizer = HuggingFaceTokenizer(str(workspace / "tokenizer"))
    return build_source("jsonl", str(path), tokenizer, text_column="text", end_of_document="<|endoftext|>", seq_len=16)


@pytest.fixture(scope="module")
def batch(source: DocumentSource) -> FixedBatch:
    return fixed_batch(source, TOKENS, rows=2)


def student(placement: str, blocks: int = 3, **changes: Any) -> BlockStackModel:
    """Random weights, large enough that every block matters, norms away from one."""
    model = small_model(placement, blocks, vocab_size=JOB_VOCAB, init_std=0.2, **changes)
    randomize_norms(model)
    return model.eval()


def record(model: nn.Module, batch: FixedBatch) -> dict[str, Any]:
    return record_of(probe(model, batch, chunk_tokens=7, device=CPU), batch, model)


def plain_ce(model: nn.Module, batch: FixedBatch) -> float:
    """The model's own logits, document by document without padding, in float64."""
    total = 0.0
    for micro_batch in batch.micro_batches:
        for inputs, labels, valid in zip(micro_batch.inputs, micro_batch.labels, micro_batch.valid, strict=True):
            with torch.no_grad():
                log_p = model(inputs[valid][None])[0].double().log_softmax(-1)
            total -= sum(log_p[i, label].item() for i, label in enumerate(labels[valid]) if label != IGNORE_INDEX)
    return total / batch.predictions


def with_layers(model: BlockStackModel, keep: list[int]) -> BlockStackModel:
    """A model of these layers only, built anew with their weights."""
    args = dataclasses.replace(model.model_args, n_layers=len(keep))
    result = BlockStackModel(args)
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("layers.")}
    for new, old in enumerate(keep):
        state |= {f"layers.{new}.{k}": v for k, v in model.layers[str(old)].state_dict().items()}
    result.load_state_dict(state, strict=True)
    return result.eval()


# Statistics of a tensor.


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "one outlier", "two values"])
def test_statistics_equal_scipys(kind: str) -> None:
    rng = np.random.default_rng(0)
    values = {
        "normal": np.abs(rng.normal(3, 1, 1001)),
        "heavy tails": np.exp(rng.normal(0, 3, 500)),
        "one outlier": np.append(np.full(4095, 11.5), 425.0),
        "two values": np.array([1.0, 4.0]),
    }[kind]
    summary = summarize(torch.from_numpy(values).float())
    values = values.astype(np.float32).astype(np.float64)
    assert summary["mean"] == pytest.approx(values.mean(), rel=1e-12)
    assert summary["std"] == pytest.approx(np.sqrt(scipy.stats.moment(values, 2)), rel=1e-12)
    assert summary["kurtosis"] == pytest.approx(scipy.stats.kurtosis(values), rel=1e-9)
    expected = scipy.stats.mstats.mquantiles(values, QUANTILES, alphap=1, betap=1)
    assert list(summary["quantiles"]) == ["0", "0.01", "0.05", "0.25", "0.5", "0.75", "0.95", "0.99", "1"]
    assert list(summary["quantiles"].values()) == pytest.approx(expected.tolist(), rel=1e-12)
    counts, _ = np.histogram(np.clip(values, 1e-4, 9999.0), bins=np.array(bin_edges()))
    assert summary["histogram"] == counts.tolist() and sum(summary["histogram"]) == len(values)


def test_histogram_bins_are_log_spaced_and_closed() -> None:
    edges = bin_edges()
    assert len(edges) == RMS_BINS + 1 and (edges[0], edges[-1]) == (1e-4, 1e4)
    assert np.diff(np.log10(edges)) == pytest.approx(np.full(RMS_BINS, 1 / 16))
    counts = histogram(torch.tensor([0.0, 1e-9, 1.0, 1.1, 1e9, math.inf]))
    assert (counts[0], counts[64], counts[-1], sum(counts)) == (2, 2, 2, 6)


def test_what_is_not_defined_is_none() -> None:
    assert kurtosis(torch.full((9,), 2.5)) is None  # SciPy gives nan
    assert kurtosis(torch.tensor([1.0])) is None
    for bad in (math.nan, math.inf):
        summary = summarize(torch.tensor([1.0, 2.0, bad]))
        assert summary["mean"] is summary["std"] is summary["kurtosis"] is summary["quantiles"]["1"] is None
        assert sum(summary["histogram"]) == 3


def test_rms_and_angular_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(20, 32, generator=generator) for _ in range(2))
    assert token_rms(a).numpy() == pytest.approx(np.sqrt((a.numpy().astype(np.float64) ** 2).mean(1)), rel=1e-12)
    expected = [
        np.arccos(1 - scipy.spatial.distance.cosine(*pair)) / np.pi for pair in zip(a.double(), b.double(), strict=True)
    ]
    assert angular_distance(a, b).numpy() == pytest.approx(np.array(expected), rel=1e-9)
    assert angular_distance(a, a).tolist() == [0.0] * 20  # exactly
    assert angular_distance(a, 3 * a).tolist() == pytest.approx([0.0] * 20, abs=1e-7)
    assert angular_distance(a, -a).tolist() == [1.0] * 20
    known = angular_distance(torch.tensor([[1.0, 0.0]] * 3), torch.tensor([[0.0, 5.0], [2.0, 2.0], [0.0, 0.0]]))
    assert known.tolist() == pytest.approx([0.5, 0.25, 0.5])
    assert token_rms(a.bfloat16()).dtype == torch.float64


# The fixed batch.


def rows_of(batch: FixedBatch) -> list[tuple[list[int], list[int]]]:
    return sorted(
        (inputs[valid].tolist(), labels[valid].tolist())
        for m in batch.micro_batches
        for inputs, labels, valid in zip(m.inputs, m.labels, m.valid, strict=True)
    )


@pytest.mark.parametrize("tokens", [1, 30, TOKENS, 71, 10_000])
def test_the_batch_is_whole_documents_and_a_cut_one(source: DocumentSource, tokens: int) -> None:
    documents = [source[i] for i in range(len(source)) if len(source[i]) > 1]
    held = sum(len(ids) for ids in documents)
    batch = fixed_batch(source, tokens, rows=3)
    assert batch.tokens == min(tokens, held)
    rows = rows_of(batch)
    assert batch.documents == len(rows) and batch.predictions == sum(x != IGNORE_INDEX for _, y in rows for x in y)
    whole = [inputs for inputs, _ in rows if inputs in documents]
    cut = [inputs for inputs, _ in rows if inputs not in documents]
    assert len(cut) == (tokens < held and sum(map(len, whole)) != tokens)
    for inputs, labels in rows:
        begin_so = [ids for ids in documents if ids[: len(inputs)] == inputs]
        assert labels in [[*ids[1:], IGNORE_INDEX][: len(inputs)] for ids in begin_so]
    for m in batch.micro_batches:
        assert len(m.types) == m.valid.sum() and (m.labels[~m.valid] == IGNORE_INDEX).all()
        inputs, first = m.inputs[m.valid], torch.arange(m.inputs.shape[1]).expand_as(m.inputs)[m.valid] == 0
        boundary = torch.tensor([kind == TOKEN_TYPES.index("document_boundary") for kind in m.types])
        assert torch.equal(boundary, first | (inputs == source.end_of_document_id))


def test_the_order_is_drawn_once_and_for_all(source: DocumentSource) -> None:
    """A longer batch begins with the shorter one's documents; the order is not that of the file."""
    few, many = draw_documents(source, 40), draw_documents(source, 100)
    assert many[: len(few) - 1] == few[:-1] and many[len(few) - 1][: len(few[-1])] == few[-1]
    assert few == draw_documents(source, 40)
    everything = [ids[:-1] for ids in draw_documents(source, 10_000)]
    in_order = [source[i] for i in range(len(source)) if len(source[i]) > 1]
    assert everything != in_order and sorted(everything) == sorted(in_order)
    assert default_tokens(256) == 512 and default_tokens(8192) == 4096


def test_documents_without_text_are_refused(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    tokenizer = HuggingFaceTokenizer(str(workspace / "tokenizer"))
    empty = build_source(
        "jsonl", str(tmp_path), tokenizer, text_column="text", end_of_document="<|endoftext|>", seq_len=24
    )
    with pytest.raises(ValueError, match="validation documents are all empty"):
        fixed_batch(empty, 10, rows=1)


# Probes of a student.


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_boundaries_as_seen_from_outside(batch: FixedBatch, placement: str) -> None:
    """RMS at each boundary and by type, against hooks around an ordinary forward and NumPy."""
    model = student(placement)
    seen: list[list[np.ndarray]] = [[] for _ in range(4)]
    types = []
    hooks = [model.layers["0"].register_forward_pre_hook(lambda m, args: seen[0].append(args[0][0].numpy()))]
    for k in range(3):
        hook = lambda m, args, out, k=k: seen[k + 1].append(out[0].detach().numpy())  # noqa: E731
        hooks.append(model.layers[str(k)].register_forward_hook(hook))
    for micro_batch in batch.micro_batches:
        types.append(micro_batch.types.numpy())
        for inputs, valid in zip(micro_batch.inputs, micro_batch.valid, strict=True):
            with torch.no_grad():
                model(inputs[valid][None])
    for hook in hooks:
        hook.remove()
    expected = [np.sqrt((np.concatenate(states).astype(np.float64) ** 2).mean(1)) for states in seen]  # 4 x (N)
    by_type = np.concatenate(types)
    result = record(model, batch)
    assert len(result["boundaries"]) == 4 and result["tokens"] == TOKENS == len(expected[0])
    for k, rms in enumerate(expected):
        assert result["boundaries"][k]["mean"] == pytest.approx(rms.mean(), rel=1e-6)
        assert result["boundaries"][k]["std"] == pytest.approx(rms.std(), rel=1e-4, abs=1e-7)
        assert result["boundaries"][k]["quantiles"]["1"] == pytest.approx(rms.max(), rel=1e-6)
        for index, name in enumerate(TOKEN_TYPES):
            of_type, values = result["token_types"][name], rms[by_type == index]
            assert of_type["tokens"] == len(values)
            assert of_type["rms"][k] == (pytest.approx(values.mean(), rel=1e-6) if len(values) else None)
    assert all(kind["tokens"] > 0 for kind in result["token_types"].values())


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("layers_per_block", [1, 2])
def test_removal_and_lens_equal_other_models(
    batch: FixedBatch,
    placement: str,
    layers_per_block: int,
    user_placement: None,  # noqa: F811
) -> None:
    """Against models that are built without the block, and of the first blocks only."""
    model = student(placement, blocks=3 * layers_per_block, active_blocks=3, layers_per_block=layers_per_block)
    result = record(model, batch)
    blocks = [list(range(k * layers_per_block, (k + 1) * layers_per_block)) for k in range(3)]
    whole = plain_ce(model, batch)
    assert result["blocks"] == 3 and result["ce"] == result["logit_lens"][-1] == pytest.approx(whole, rel=1e-6)
    for k, removal in enumerate(result["removal"]):
        rest = with_layers(model, [layer for block in blocks if block is not blocks[k] for layer in block])
        expected = plain_ce(rest, batch)
        assert abs(expected - whole) > 1e-3  # the block matters
        assert removal["block"] == k and removal["ce"] == pytest.approx(expected, rel=1e-6)
        assert removal["delta_ce"] == pytest.approx(expected - whole, abs=1e-5)
    for k, ce in enumerate(result["logit_lens"]):
        first = with_layers(model, [layer for block in blocks[:k] for layer in block])
        assert ce == pytest.approx(plain_ce(first, batch), rel=1e-6), k


class Identity(nn.Module):
    def forward(self, h: torch.Tensor, rope_cache: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        return h.clone()


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_block_replaced_by_the_identity(batch: FixedBatch, placement: str, block: int) -> None:
    model = student(placement)
    model.layers[str(block)] = Identity()
    result = record(model, batch)
    assert result["removal"][block]["delta_ce"] == 0.0 and result["removal"][block]["angular_distance"] == 0.0
    assert result["boundaries"][block] == result["boundaries"][block + 1]
    assert all(r["angular_distance"] > 0.01 for k, r in enumerate(result["removal"]) if k != block)


def test_doubling_a_pre_norm_stream_doubles_its_rms(batch: FixedBatch) -> None:
    """Embedding and every branch twice as large: the norms take the factor out, so that nothing else changes."""
    model = student("pre", norm_eps=1e-20)
    before = record(model, batch)
    with torch.no_grad():
        model.tok_embeddings.weight.mul_(2)
        for layer in model.layers.values():
            layer.attention.wo.weight.mul_(2)
            layer.feed_forward.w2.weight.mul_(2)
    after = record(model, batch)
    for old, new in zip(before["boundaries"], after["boundaries"], strict=True):
        for name in ("mean", "std"):
            assert new[name] == pytest.approx(2 * old[name], rel=1e-9)
        assert new["kurtosis"] == pytest.approx(old["kurtosis"], rel=1e-9)
        assert new["quantiles"] == {q: pytest.approx(2 * value, rel=1e-9) for q, value in old["quantiles"].items()}
    assert after["removal"] == [
        {k: pytest.approx(v, rel=1e-9, abs=1e-9) for k, v in r.items()} for r in before["removal"]
    ]
    assert after["ce"] == pytest.approx(before["ce"], rel=1e-9)


def close(a: Any, b: Any) -> bool:
    """Equal but for rounding, through all levels of a record; kurtosis of what is constant but for rounding aside."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a if k not in ("kurtosis", "histogram"))
    if isinstance(a, list):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
    return a == (pytest.approx(b, rel=1e-5, abs=1e-6) if isinstance(b, float) else b)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_neither_padding_nor_order_counts(source: DocumentSource, batch: FixedBatch, placement: str) -> None:
    model = student(placement)
    expected = record(model, batch)
    for rows, multiple in ((1, 1), (7, 1), (3, 8), (7, 24)):
        other = fixed_batch(source, TOKENS, rows, multiple)
        assert rows_of(other) == rows_of(batch)
        assert close(record(model, other), expected), (rows, multiple)
    reverse = [
        dataclasses.replace(m, inputs=m.inputs.flip(0), labels=m.labels.flip(0), valid=m.valid.flip(0),
                            types=torch.cat([t for t in m.types.split(m.valid.sum(1).tolist())][::-1]))
        for m in batch.micro_batches[::-1]
    ]  # fmt: skip
    assert close(record(model, dataclasses.replace(batch, micro_batches=tuple(reverse))), expected)
    generator = torch.Generator().manual_seed(1)
    padded = fixed_batch(source, TOKENS, 7, 24)
    before = record(model, padded)
    for m in padded.micro_batches:
        assert not m.valid.all()
        noise = torch.randint(0, JOB_VOCAB, m.inputs.shape, generator=generator)
        m.inputs.copy_(torch.where(m.valid, m.inputs, noise))
    assert record(model, padded) == before  # bit for bit


def test_a_model_is_left_as_it_was(batch: FixedBatch) -> None:
    model = student("post")
    names, before = set(vars(model)), {k: v.clone() for k, v in model.state_dict().items()}
    record(model, batch)
    assert set(vars(model)) == names and not model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_gradient_norms_of_blocks(batch: FixedBatch) -> None:
    model = student("post", blocks=4, active_blocks=2, layers_per_block=2, frozen_blocks=0)
    model.layers["0"].requires_grad_(False)
    model.layers["1"].requires_grad_(False)
    model(batch.micro_batches[0].inputs).square().mean().backward()
    norms = gradient_norms(model)

    def norm(*prefixes: str) -> float:
        grads = [
            p.grad.numpy().ravel() for n, p in model.named_parameters() if p.grad is not None and n.startswith(prefixes)
        ]
        return float(np.linalg.norm(np.concatenate(grads)))

    assert norms["blocks"] == [None, pytest.approx(norm("layers.2.", "layers.3."), rel=1e-6)]
    assert norms["head"] == pytest.approx(norm("output."), rel=1e-6)
    assert norms["boundary_norm"] == pytest.approx(norm("norm."), rel=1e-6)
    if model.tok_embeddings.weight.requires_grad:
        assert norms["embedding"] == pytest.approx(norm("tok_embeddings."), rel=1e-6)
    else:
        assert norms["embedding"] is None


# What TensorBoard gets.


def test_scalars_and_histograms(batch: FixedBatch) -> None:
    result = record(student("pre"), batch) | {
        "token_types": {
            "document_boundary": {"tokens": 3, "rms": [9.0, 8.0, 7.0, 6.0]},
            "newline": {"tokens": 0, "rms": [None] * 4},
        },
        "gradient_norms": {"blocks": [1.0, None, 2.0], "embedding": None, "boundary_norm": 0.5, "head": 3.0},
    }
    values = scalars(result)
    assert values["diagnostics/rms_mean/boundary_3"] == result["boundaries"][3]["mean"]
    assert values["diagnostics/rms_document_boundary/boundary_0"] == 9.0
    assert values["diagnostics/delta_ce/block_2"] == result["removal"][2]["delta_ce"]
    assert values["diagnostics/logit_lens_ce/boundary_3"] == values["diagnostics/ce"] == result["ce"]
    assert values["diagnostics/grad_norm/block_0"] == 1.0 and values["diagnostics/grad_norm/head"] == 3.0
    assert not {"diagnostics/grad_norm/block_1", "diagnostics/rms_newline/boundary_0"} & set(values)
    assert None not in values.values() and not any(
        "grad_norm" in tag for tag in scalars(result | {"gradient_norms": None})
    )
    shown = histograms(result)
    assert list(shown) == [f"diagnostics/rms/boundary_{k}" for k in range(4)]
    for k, histogram_ in enumerate(shown.values()):
        low, high = histogram_["bucket_limits"][0], histogram_["bucket_limits"][-1]
        assert low <= histogram_["min"] <= histogram_["max"] <= high
        assert sum(histogram_["bucket_counts"]) == histogram_["num"] == TOKENS
        assert len(histogram_["bucket_counts"]) == len(histogram_["bucket_limits"])
        assert histogram_["sum"] == pytest.approx(result["boundaries"][k]["mean"] * TOKENS)
    broken = result | {"boundaries": [result["boundaries"][0] | {"mean": None}]}
    assert histograms(broken) == {}
