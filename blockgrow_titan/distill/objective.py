"""The distillation objective (Eq. 5), as pure functions of tensors.

    L = kd_weight * tau^2 * KL(softmax(z_T / tau) || softmax(z_S / tau)) + ce_weight * CE(y, z_S)

Two functions return the same sums over tokens. ``distillation_loss`` takes whole logits and lets autograd differentiate
it: for small vocabularies and for tests. ``chunked_distillation`` takes hidden states and heads and never holds more
than two [chunk_tokens, V] logits tensors, one of the student and one of the teacher:

1. for each chunk of tokens, two matrix products write the logits into the two buffers;
2. a few rows at a time, while they are in cache, the softmaxes are taken in fp32, the per-token losses are read off
   and the student's logits are overwritten by the gradient with respect to them;
3. two more matrix products turn that gradient into the chunk's share of the gradients of hidden states and head.

Both gradients thus exist when the forward ends; the backward only multiplies them by one number.

Footgun: there is no autocast here. Matrix products run in the dtype of their inputs, softmaxes in fp32 (fp64 for fp64
inputs), sums over tokens in fp64.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
"""Label of a position that counts neither in the loss nor in any token count."""

CPU_ROW_BLOCK_ELEMENTS = 2**18
"""Logits per thread that step 2 works on at a time: 1 MiB of fp32, about one core's L2 cache."""

DEVICE_ROW_BLOCK_ELEMENTS = 2**24
"""The same for a whole accelerator: 64 MiB of fp32, enough to hide the kernel launches."""

PRODUCT_PART = 2**11
"""Vocabulary over which the gradient of the hidden states is summed at a time, so that it is the same for any chunk."""


@dataclass(frozen=True)
class Objective:
    """The weights of Eq. 5 and the chunk size that it is computed in.

    Raises:
        ValueError: a weight is negative or not finite, both are 0, or temperature or chunk_tokens is not positive.
    """

    kd_weight: float
    """alpha: weight of tau^2 * KL(teacher || student)."""
    ce_weight: float
    """gamma: weight of the next-token cross-entropy."""
    temperature: float
    """tau: softmax temperature of both distributions in the KL term; the cross-entropy is always at 1."""
    chunk_tokens: int
    """Tokens whose logits exist at one time. Changes memory and speed, never the result."""

    def __post_init__(self) -> None:
        for name in ("kd_weight", "ce_weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: it must be a finite number, at least 0; set distill.{name}")
        if self.kd_weight == 0 and self.ce_weight == 0:
            raise ValueError("kd_weight and ce_weight are both 0: set distill.kd_weight or distill.ce_weight above 0")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature is {self.temperature}: it must be above 0; set distill.temperature")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {self.chunk_tokens}: it must be at least 1; set distill.chunk_tokens")

    @property
    def kl_factor(self) -> float:
        """alpha * tau^2, the factor of ``kl`` in the loss."""
        return self.kd_weight * self.temperature**2

    @property
    def gradient_factor(self) -> float:
        """alpha * tau + gamma, the factor that ``_losses_and_gradient`` leaves out of its gradient."""
        return self.kd_weight * self.temperature + self.ce_weight

    @property
    def kd_share(self) -> float:
        """Share of the KL term in the gradient, alpha * tau / (alpha * tau + gamma)."""
        return self.kd_weight * self.temperature / self.gradient_factor

    @property
    def ce_share(self) -> float:
        """Share of the cross-entropy in the gradient, 1 - kd_share."""
        return self.ce_weight / self.gradient_factor


class LossSums(NamedTuple):
    """Sums over valid tokens, 0-dim, fp64 (fp32 on mps, which has no fp64). Only ``loss`` is differentiable.

    ``loss`` is exactly kd_weight * tau^2 * kl + ce_weight * ce, times the scale where there is one; the other three are
    never scaled. A named tuple, so that FSDP2 finds ``loss`` when it looks for tensors to hook in a module's output.
    """

    loss: Tensor
    ce: Tensor
    """Next-token cross-entropy, at temperature 1."""
    kl: Tensor
    """KL(teacher || student), both at temperature tau, without the factor tau^2. 0 without a teacher."""
    kd: Tensor
    """Soft-target cross-entropy E_T[-log p_S] at temperature tau: ``kl`` plus the teacher's entropy. 0 without one."""


def distillation_loss(
    student_logits: Tensor, teacher_logits: Tensor | None, labels: Tensor, objective: Objective
) -> LossSums:
    """Eq. 5 over whole logits, differentiable by autograd.

    Args:
        student_logits: [N, V], any floating dtype.
        teacher_logits: [N, V], or None; no gradient flows into it.
        labels: [N] int64, IGNORE_INDEX where a position does not count.
        objective: the weights and the temperature.

    Raises:
        ValueError: ``kd_weight`` is not 0 and there is no teacher, or the two logits differ in shape.
    """
    _check_teacher(teacher_logits is not None, objective)
    if teacher_logits is not None and teacher_logits.shape != student_logits.shape:
        raise ValueError(
            f"the teacher's logits are {list(teacher_logits.shape)}, the student's {list(student_logits.shape)}: "
            "both must be [tokens, vocabulary]"
        )
    dtype = _softmax_dtype(student_logits)
    valid = labels != IGNORE_INDEX  # [N]
    student_logits, labels = student_logits[valid], labels[valid]
    log_p = _log_softmax(student_logits, 1.0, dtype)
    ce = _sum(F.nll_loss(log_p, labels, reduction="none"))
    kl = kd = torch.zeros_like(ce)
    if teacher_logits is not None:
        log_p_tau = _log_softmax(student_logits, objective.temperature, dtype)
        log_q = _log_softmax(teacher_logits.detach()[valid], objective.temperature, dtype)
        q = log_q.exp()
        kl = _sum((q * (log_q - log_p_tau)).sum(-1))
        kd = _sum(-(q * log_p_tau).sum(-1))
    loss = objective.kl_factor * kl + objective.ce_weight * ce
    return LossSums(loss, ce.detach(), kl.detach(), kd.detach())


def chunked_distillation(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher_hidden: Tensor | None,
    teacher_head: Tensor | None,
    objective: Objective,
    scale: Tensor | float = 1.0,
) -> LossSums:
    """Eq. 5 from hidden states, ``objective.chunk_tokens`` tokens at a time.

    Args:
        hidden: [N, D], the student's final hidden states at the valid positions; N may be 0.
        weight: [V, D], the student's head, in the dtype of ``hidden``.
        labels: [N] int64, each in [0, V); ignored positions must have been dropped.
        teacher_hidden: [N, D_t], the teacher's final, normed hidden states at the same positions, or None.
        teacher_head: [V, D_t], the teacher's frozen head, in the dtype of ``teacher_hidden``; None if that is None.
        objective: weights, temperature and chunk size.
        scale: the loss is multiplied by it, for instance 1 / valid tokens of the global batch. As a 0-dim tensor on the
            same device it costs no synchronisation.

    Gradients reach ``hidden`` and ``weight``, in their dtypes; one that does not require its gradient, or all of it
    under ``no_grad``, costs nothing. Each loss may be differentiated once: the backward uses up the stored gradients.

    Raises:
        ValueError: shapes that do not fit, or ``kd_weight`` is not 0 and there is no teacher.
    """
    _check_teacher(teacher_hidden is not None, objective)
    _check_shapes(hidden, weight, labels, teacher_hidden, teacher_head)
    if not torch.is_grad_enabled():  # inside a Function, grad mode is always off: it has to be told
        hidden, weight = hidden.detach(), weight.detach()
    return LossSums(*ChunkedDistillation.apply(hidden, weight, labels, teacher_hidden, teacher_head, objective, scale))


class ChunkedDistillation(torch.autograd.Function):
    """The autograd node of ``chunked_distillation``; both gradients are formed in its forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        teacher_hidden: Tensor | None,
        teacher_head: Tensor | None,
        objective: Objective,
        scale: Tensor | float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, vocab_size = labels.numel(), weight.shape[0]
        rows = _chunk_rows(tokens, objective.chunk_tokens)
        dtype = _softmax_dtype(hidden)
        buffer = hidden.new_empty(rows, vocab_size)
        teacher_buffer = None if teacher_hidden is None else teacher_hidden.new_empty(rows, vocab_size)
        losses = torch.zeros(3, tokens, dtype=dtype, device=hidden.device)  # ce, kl, kd of each token
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None

        for start in range(0, tokens, rows or 1):
            chunk = slice(start, min(start + rows, tokens))
            logits = _logits(hidden, weight, chunk, buffer)  # [C, V]
            teacher_logits = _logits(teacher_hidden, teacher_head, chunk, teacher_buffer)  # [C, V]
            assert logits is not None
            _form_chunk(logits, teacher_logits, labels[chunk], losses[:, chunk], objective, any(ctx.needs_input_grad))
            # logits now holds the gradient with respect to them, but for the factor
            if grad_hidden is not None:
                _write_product(logits, weight, grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, logits.t(), hidden[chunk])

        ctx.grads = [grad_hidden, grad_weight]
        ctx.factor = objective.gradient_factor * scale
        ctx.weight_dtype = weight.dtype
        ce, kl, kd = _sum(losses)
        ctx.mark_non_differentiable(ce, kl, kd)
        return (objective.kl_factor * kl + objective.ce_weight * ce) * scale, ce, kl, kd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("a chunked distillation loss can be differentiated once: compute it again instead")
        (grad_hidden, grad_weight), ctx.grads = ctx.grads, None
        factor = grad_loss * ctx.factor
        if grad_hidden is not None:
            grad_hidden.mul_(factor)
        if grad_weight is not None:
            out = grad_weight
            if grad_weight.dtype != ctx.weight_dtype:
                out = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
            grad_weight = torch.mul(grad_weight, factor, out=out)
        return grad_hidden, grad_weight, None, None, None, None, None


def _form_chunk(
    logits: Tensor,
    teacher_logits: Tensor | None,
    labels: Tensor,
    losses: Tensor,
    objective: Objective,
    form_gradient: bool,
) -> None:
    """Step 2 over one chunk, block of rows by block of rows: fills ``losses`` and overwrites ``logits``.

    ``logits``, ``teacher_logits``: [C, V]; ``labels``: [C]; ``losses``: [3, C], in the dtype of the softmax.
    """
    if logits.device.type == "cpu":
        rows = max(1, CPU_ROW_BLOCK_ELEMENTS // logits.shape[1]) * torch.get_num_threads()
    else:
        rows = max(1, DEVICE_ROW_BLOCK_ELEMENTS // logits.shape[1])
    for start in range(0, labels.numel(), rows):
        block = slice(start, start + rows)
        _losses_and_gradient(
            logits[block],
            None if teacher_logits is None else teacher_logits[block],
            labels[block].unsqueeze(1),  # [R, 1]
            losses[:, block],
            objective,
            form_gradient,
        )


def _losses_and_gradient(
    logits: Tensor,
    teacher_logits: Tensor | None,
    labels: Tensor,
    losses: Tensor,
    objective: Objective,
    form_gradient: bool,
) -> None:
    """Writes the losses of a block of tokens, and the gradient with respect to its logits over the logits.

    The gradient of one token's loss is alpha * tau * (p_tau - q) + gamma * (p - onehot), with p and p_tau the student's
    softmax at 1 and at tau, and q the teacher's at tau. It is written without the factor alpha * tau + gamma, which the
    backward applies to tensors that are smaller than this one.

    The softmaxes are taken as logarithms, which are finite for every spread of finite logits: a q that underflows to 0
    meets a finite factor. They are written over the logits, and little else is made, so that one row of every tensor
    fits into a core's cache. Both logits are used up.

    ``logits``, ``teacher_logits``: [R, V]; ``labels``: [R, 1]; ``losses``: [3, R], in the dtype of the softmax.
    """
    dtype, tau = losses.dtype, objective.temperature
    log_p = _log_softmax_(logits.to(dtype))
    losses[0] = -log_p.gather(1, labels).squeeze(1)
    log_p_tau, q = log_p, None
    if teacher_logits is not None:
        log_q = teacher_logits.to(dtype)
        if tau != 1:
            log_p_tau, log_q = _log_softmax_(log_p / tau), log_q / tau
        q = _log_softmax_(log_q).exp()
        losses[1] = log_q.sub_(log_p_tau).mul_(q).sum(-1)
        losses[2] = -torch.mul(q, log_p_tau, out=log_q).sum(-1)
    if not form_gradient:
        return
    p = log_p.exp_()
    if log_p_tau is not log_p:
        p.lerp_(log_p_tau.exp_(), objective.kd_share)
    p.scatter_(1, labels, p.gather(1, labels) - objective.ce_share)
    if q is None:
        logits.copy_(p)
    else:
        torch.sub(p, q, alpha=objective.kd_share, out=logits)


def _log_softmax_(z: Tensor) -> Tensor:
    """The logarithm of the softmax of [R, V] logits, in place: a row is written once all of it has been read."""
    return torch.log_softmax(z, dim=-1, out=z)


def _chunk_rows(tokens: int, chunk_tokens: int) -> int:
    """Rows of each chunk: ``chunk_tokens`` at most, and as even as can be, so that no product is left with few rows."""
    return math.ceil(tokens / max(1, math.ceil(tokens / chunk_tokens)))


def _logits(hidden: Tensor | None, head: Tensor | None, chunk: slice, buffer: Tensor | None) -> Tensor | None:
    """The chunk's logits [C, V], written into the first rows of ``buffer``; None where there is no teacher."""
    if hidden is None or head is None or buffer is None:
        return None
    return torch.mm(hidden[chunk], head.t(), out=buffer[: chunk.stop - chunk.start])


def _write_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out = a @ b``. In fp32, a long inner dimension goes part by part: libraries add up few rows term by term."""
    if out.dtype != _softmax_dtype(out) or len(b) <= PRODUCT_PART:
        torch.mm(a, b, out=out)
        return
    out.zero_()
    for a_part, b_part in zip(a.split(PRODUCT_PART, dim=1), b.split(PRODUCT_PART), strict=True):
        out.add_(torch.mm(a_part, b_part))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` in place; ``total`` may have a wider dtype than the factors."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(torch.mm(a, b))


def _log_softmax(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    if temperature != 1:
        logits = logits.to(dtype) / temperature
    return torch.log_softmax(logits, dim=-1, dtype=dtype)


def _softmax_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _sum(values: Tensor) -> Tensor:
    """Sum over the last dimension, in fp64 where the device has it."""
    return values.sum(-1, dtype=torch.float32 if values.device.type == "mps" else torch.float64)


def _check_teacher(has_teacher: bool, objective: Objective) -> None:
    if objective.kd_weight != 0 and not has_teacher:
        raise ValueError(
            f"kd_weight is {objective.kd_weight} and there is no teacher: it must be 0; set distill.kd_weight = 0 or "
            "teacher.path"
        )


def _check_shapes(
    hidden: Tensor, weight: Tensor, labels: Tensor, teacher_hidden: Tensor | None, teacher_head: Tensor | None
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and the head {list(weight.shape)}: they must be [tokens, hidden size] and "
            "[vocabulary, hidden size]"
        )
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels are {list(labels.shape)}: they must be [{hidden.shape[0]}], one a hidden state")
    if (teacher_hidden is None) != (teacher_head is None):
        raise ValueError("teacher_hidden and teacher_head must be given together, or neither")
    if teacher_hidden is None or teacher_head is None:
        return
    if teacher_hidden.dim() != 2 or teacher_hidden.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"the teacher's hidden states are {list(teacher_hidden.shape)}: they must have {hidden.shape[0]} rows, one "
            "for each valid position of the student"
        )
    if teacher_head.shape != (weight.shape[0], teacher_hidden.shape[1]):
        raise ValueError(
            f"the teacher's head is {list(teacher_head.shape)}: it must be [{weight.shape[0]}, "
            f"{teacher_hidden.shape[1]}], the student's vocabulary by the teacher's hidden size"
        )
