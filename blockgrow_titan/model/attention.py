"""Attention within documents: several of them end to end in one row, none of which sees another.

    document_lengths -> packed_row -> (spans, positions) -> rotary table at the positions
                                   -> every layer's attention(x, rope_cache, spans) -> DocumentAttention

A document in such a packed row is computed as if it were alone: its rotary positions start at 0, and its queries meet its
own keys only. So a row needs no padding between documents, and nothing but the inner attention knows of the boundaries:

- CUDA, 16-bit: torch's variable-length flash attention, one kernel for all documents.
- CPU: an operator of our own that runs torch's flash kernel once per document, forward and backward, and writes into one
  output. For torch.compile it is opaque, so that no graph depends on the lengths.
- Elsewhere: ``scaled_dot_product_attention`` once per document.

``within_documents`` makes torchtitan's ``Attention`` do this. Its own "varlen" type hands the spans through as an
argument, which activation checkpointing repeats and FSDP2 leaves as it is (they are integers).
"""

import inspect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torchtitan.models.attention import ScaledDotProductAttentionWrapper, VarlenMetadata
from torchtitan.models.qwen3.model.model import Attention

WHOLE_ROWS = VarlenMetadata(None, None, 0, 0)
"""The spans of a batch whose every row is one document, maybe padded on the right."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# torch 2.11's takes fewer heads of keys and values as they are, later ones want it said.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed_row(tokens: Tensor, lengths: Sequence[int], max_seq_len: int) -> tuple[VarlenMetadata, Tensor]:
    """Where the documents of a packed row are.

    Args:
        tokens: [1, N] integers: the documents end to end, then padding.
        lengths: Of the documents, each 1 to ``max_seq_len``; they sum to N at most. There may be none.
        max_seq_len: Positions of the model's rotary table.

    Returns:
        The spans, whose ``cu_seq_q`` is [D + 1] int32 on the tokens' device: each document's first token, and N at the
        end. Padding is one document more, so that what stands there is finite and reaches nothing. And the rotary
        positions [N] int64, which start at 0 with each document and are 0 in padding.

    Raises:
        ValueError: If there are several rows, or the lengths do not fit.
    """
    if tokens.ndim != 2 or len(tokens) != 1:
        raise ValueError(f"packed documents lie in one row: tokens are {list(tokens.shape)}, they must be [1, N]")
    padding = tokens.shape[1] - sum(lengths)
    if padding < 0 or (lengths and not 1 <= min(lengths) <= max(lengths) <= max_seq_len):
        raise ValueError(
            f"document_lengths {list(lengths)} do not fit a row of {tokens.shape[1]} tokens: each must be 1 to "
            f"{max_seq_len} (training.seq_len), and together they cannot be more than the row"
        )
    spans = [*lengths, padding] if padding else list(lengths)
    ends = torch.tensor([0, *accumulate(spans)], dtype=torch.int32).to(tokens.device)
    positions = torch.cat([*map(torch.arange, lengths), torch.zeros(padding, dtype=torch.int64)]).to(tokens.device)
    longest = max(spans)
    return VarlenMetadata(ends, ends, longest, longest), positions


class DocumentAttention(ScaledDotProductAttentionWrapper):
    """Causal attention within each document of a packed row, or within each row.

    What it does on CUDA has never run: it was written where no GPU was.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spans: VarlenMetadata, *, scale: float | None = None) -> Tensor:
        """Attention's output, heads last.

        Args:
            q: [B, H, S, E]; B is 1 for a packed row.
            k, v: [B, H_kv, S, E]; H is a multiple of H_kv.
            spans: From ``packed_row``, or ``WHOLE_ROWS``.
            scale: Of the scores; None for 1 / sqrt(E).

        Returns:
            [B, S, H, E] for whole rows, [S, H, E] for a packed one; contiguous.
        """
        if spans.cu_seq_q is None:
            out = super().forward(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            return out.transpose(1, 2).contiguous()  # (B, S, H, E)
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (S, H, E)
        scale = scale or q.shape[-1] ** -0.5
        if q.device.type == "cpu":
            return document_attention(q, k, v, spans.cu_seq_q, scale)[0]
        if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0:
            ends, longest = spans.cu_seq_q, spans.max_q
            causal: dict[str, Any] = {"window_size": (-1, 0), "scale": scale, **_GROUPED}
            return cast(Tensor, varlen_attn(q, k, v, ends, ends, longest, longest, **causal))
        return _each_document(q, k, v, spans.cu_seq_q, scale)


def within_documents(attention: Attention) -> Attention:
    """Let an attention take spans as its ``attention_masks``: those of ``packed_row``, or ``WHOLE_ROWS``."""
    attention.attn_type = "varlen"
    attention.inner_attention = DocumentAttention()
    return attention


def _by_document(ends: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of [N, H, ...] tensors: for each document a tuple of [1, H, n, ...]."""
    lengths = ends.diff().tolist()
    views = (tensor.transpose(0, 1).unsqueeze(0).split(lengths, dim=2) for tensor in tensors)
    return zip(*views, strict=True)


def _each_document(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> Tensor:
    """One call for each document; autograd puts the gradients together."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"torch.compile of packed rows in {q.dtype} on {q.device.type}: set training.mixed_precision_param = "
            '"bfloat16", leave "model" out of compile.components, or set documents.micro_batching = "balanced"'
        )
    grouped = q.shape[1] != k.shape[1]
    outs = [
        F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, scale=scale, enable_gqa=grouped)
        for q_, k_, v_ in _by_document(ends, q, k, v)
    ]
    return torch.cat(outs, dim=2)[0].transpose(0, 1).contiguous()  # (N, H, E)


@torch.library.custom_op("blockgrow_titan::document_attention", mutates_args=(), device_types="cpu")
def document_attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention within each document, on the CPU.

    Args:
        q: [N, H, E] floating.
        k, v: [N, H_kv, E].
        ends: [D + 1] int32, from 0 to N.
        scale: Of the scores.

    Returns:
        Output [N, H, E], and the logarithm of the scores' sums [N, H] for the backward.
    """
    out, sums = _like(q), _sums_of(q)
    for q_, k_, v_, out_, sums_ in _by_document(ends, q, k, v, out, sums):
        for target, value in zip((out_, sums_), _flash(q_, k_, v_, 0.0, True, scale=scale), strict=True):
            target.copy_(value)
    return out, sums


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _sums_of(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))


@document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _like(q), _sums_of(q)


@torch.library.custom_op("blockgrow_titan::document_attention_backward", mutates_args=(), device_types="cpu")
def _document_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, ends: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from that of the output."""
    grads = _like(q), _like(k), _like(v)
    views = _by_document(ends, grad.contiguous(), q, k, v, out, sums, *grads)
    for grad_, q_, k_, v_, out_, sums_, *targets in views:
        values = _flash_backward(grad_, q_, k_, v_, out_, sums_, 0.0, True, scale=scale)
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
    return grads


@_document_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, ends: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ends, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, ends)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_document_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


document_attention.register_autograd(_differentiate, setup_context=_keep)
