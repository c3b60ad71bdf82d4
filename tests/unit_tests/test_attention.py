"""Attention within documents against explicit scores in float64, on every path that a CPU can run."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from blockgrow_titan.model import attention
from blockgrow_titan.model.attention import (
    WHOLE_ROWS,
    DocumentAttention,
    _each_document,
    document_attention,
    packed_row,
)

LENGTHS = [5, 1, 17, 9]
ROW = sum(LENGTHS) + 4  # and padding


def drawn(
    rows: int = 1, length: int = ROW, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> Any:
    """q, k, v [rows, heads, length, 8] in the layout in which torchtitan's attention hands them over."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(rows, length, h, 8, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def spans_of(lengths: list[int], row: int) -> Any:
    return packed_row(torch.zeros(1, row, dtype=torch.int64), lengths, 64)[0]


def explicit(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One document: q [H, n, E], k and v [H_kv, n, E] -> [n, H, E], in float64."""
    q, k, v = q.double(), k.double(), v.double()
    heads = []
    for head in range(len(q)):
        kv = head // (len(q) // len(k))
        scores = (q[head] @ k[kv].T * scale).masked_fill(torch.ones(q.shape[1], q.shape[1]).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[kv])
    return torch.stack(heads, 1)


def reference(qkv: list[Tensor], lengths: list[int], scale: float) -> Tensor:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return torch.cat(
        [explicit(*(t[0, :, a : a + n] for t in qkv), scale) for a, n in zip(starts, lengths, strict=True)]
    )


def by_operator(q: Tensor, k: Tensor, v: Tensor, spans: Any, scale: float) -> Tensor:
    return DocumentAttention()(q, k, v, spans, scale=scale)


def by_loop(q: Tensor, k: Tensor, v: Tensor, spans: Any, scale: float) -> Tensor:
    return _each_document(*(t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)), spans.cu_seq_q, scale)


@pytest.mark.parametrize("attend", [by_operator, by_loop])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (6, 1)])
def test_documents_equal_explicit_scores(attend: Any, heads: tuple[int, int]) -> None:
    """Output and all gradients, with a padded tail whose output has no gradient."""
    qkv, valid = drawn(1, ROW, *heads), sum(LENGTHS)
    out = attend(*qkv, spans_of(LENGTHS, ROW), 0.3)
    assert out.shape == (ROW, heads[0], 8) and out.is_contiguous()
    expected = reference(qkv, LENGTHS, 0.3)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(out[:valid].double(), expected, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad((out[:valid] * weights).sum(), qkv)
    wanted = torch.autograd.grad((expected * weights).sum(), qkv)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert torch.equal(got[:, :, valid:], torch.zeros_like(got[:, :, valid:]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    qkv = drawn(dtype=dtype)
    out = by_operator(*qkv, spans_of(LENGTHS, ROW), 0.3)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-2
    assert out.dtype == dtype
    torch.testing.assert_close(
        out[: sum(LENGTHS)].double(), reference(qkv, LENGTHS, 0.3), rtol=tolerance, atol=tolerance
    )
    assert all(grad.dtype == dtype for grad in torch.autograd.grad(out.float().sum(), qkv))


def test_whole_rows_are_one_document_each() -> None:
    qkv = drawn(rows=3, length=11)
    out = DocumentAttention()(*qkv, WHOLE_ROWS, scale=0.3)
    assert out.shape == (3, 11, 4, 8) and out.is_contiguous()
    for row in range(3):
        expected = explicit(*(t[row] for t in qkv), 0.3)
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-6)


def test_operator_keeps_torchs_rules() -> None:
    """Schema, fake implementation, autograd registration and tracing with symbolic shapes."""
    q, k, v = (t.detach().transpose(1, 2)[0].requires_grad_() for t in drawn())
    torch.library.opcheck(document_attention, (q, k, v, spans_of(LENGTHS, ROW).cu_seq_q, 0.3))


def test_what_a_gradient_may_look_like() -> None:
    """Expanded, as that of a sum is; or another layout."""
    qkv = drawn()
    out = by_operator(*qkv, spans_of(LENGTHS, ROW), 0.3)
    expanded = torch.autograd.grad(out, qkv, torch.ones(1, 1, 1).expand(out.shape), retain_graph=True)
    turned = torch.autograd.grad(out, qkv, torch.ones(4, ROW, 8).transpose(0, 1), retain_graph=True)
    plain = torch.autograd.grad(out, qkv, torch.ones(out.shape))
    for a, b, c in zip(expanded, turned, plain, strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)


def test_cuda_gets_the_kernels_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a 16-bit row on CUDA would hand over, on tensors that only say so: the kernel itself needs a GPU."""
    calls: list[Any] = []

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((args, kwargs))
        return args[0]

    class OnCuda(torch.Tensor):
        device = torch.device("cuda")  # type: ignore[assignment]

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    qkv = [t.detach().as_subclass(OnCuda) for t in drawn(dtype=torch.bfloat16)]
    DocumentAttention()(*qkv, spans_of(LENGTHS, ROW), scale=0.3)
    ((q, k, v, *ends, longest_q, longest_k), keywords) = calls[0]
    assert [t.shape for t in (q, k, v)] == [(ROW, 4, 8), (ROW, 2, 8), (ROW, 2, 8)]
    assert all(end.tolist() == [0, 5, 6, 23, 32, 36] and end.dtype == torch.int32 for end in ends) and len(ends) == 2
    assert (longest_q, longest_k) == (17, 17)
    assert keywords["window_size"] == (-1, 0) and keywords["scale"] == 0.3 and keywords.get("enable_gqa", True)


def test_spans_and_positions() -> None:
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    spans, positions = packed_row(tokens, (3, 4), 4)
    assert spans.cu_seq_q.tolist() == [0, 3, 7, 9] and spans.max_q == 4
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 0]
    spans, positions = packed_row(tokens, (), 4)  # a rank without documents; padding may be longer than any document
    assert spans.cu_seq_q.tolist() == [0, 9] and spans.max_q == 9 and positions.tolist() == [0] * 9
    spans, positions = packed_row(tokens, (4, 5), 5)
    assert spans.cu_seq_q.tolist() == [0, 4, 9] and len(positions) == 9


@pytest.mark.parametrize(
    ("shape", "lengths", "words"),
    [
        ((2, 9), (3,), r"tokens are \[2, 9\], they must be \[1, N\]"),
        ((9,), (3,), r"tokens are \[9\]"),
        ((1, 9), (5, 5), r"document_lengths \[5, 5\] do not fit a row of 9 tokens"),
        ((1, 9), (3, 0), r"each must be 1 to 6 \(training.seq_len\)"),
        ((1, 9), (7,), "each must be 1 to 6"),
    ],
)
def test_lengths_that_do_not_fit(shape: tuple[int, ...], lengths: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        packed_row(torch.zeros(shape, dtype=torch.int64), lengths, 6)
