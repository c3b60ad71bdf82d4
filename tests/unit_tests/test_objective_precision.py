"""Digits that the objective keeps: wide vocabularies, large spreads, small losses, bf16, CUDA."""

import dataclasses
import math

import pytest
import torch

from blockgrow_titan.distill import objective as objective_module
from blockgrow_titan.distill.objective import (
    Objective,
    distillation_loss,
)
from tests.unit_tests.objective_cases import (
    VOCAB,
    Case,
    make_case,
    reference,
    relative,
    run_chunked,
    small_row_blocks,  # noqa: F401  (a fixture)
)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 8])
def test_a_wide_vocabulary_loses_no_digits(chunk_tokens: int) -> None:
    """One fp32 sum over this many words, term by term, is off by several 1e-6."""
    case = make_case(seed=18, tokens=8, vocab=120_000, dim=4)
    _, grad_hidden, grad_weight = run_chunked(case, Objective(0.7, 0.3, 1.0, chunk_tokens))
    expected = reference(case, 0.7, 0.3, 1.0)
    assert relative(grad_hidden, expected["grad_hidden"]) < 1e-6
    assert relative(grad_weight, expected["grad_weight"]) < 1e-6


@pytest.mark.parametrize("tau", [1.0, 4.0])
def test_a_spread_of_300_stays_finite_and_right(tau: float) -> None:
    case = make_case(seed=8)
    for hidden, head in ((case.hidden, case.weight), case.teacher):
        logits = hidden @ head.T
        hidden *= 300 / (logits.max(-1).values - logits.min(-1).values).min()
    sums, grad_hidden, grad_weight = run_chunked(case, Objective(0.7, 0.3, tau, 5))
    expected = reference(case, 0.7, 0.3, tau)
    assert all(math.isfinite(value.item()) for value in sums)
    for name in ("ce", "kl", "kd"):
        assert getattr(sums, name).item() == pytest.approx(float(expected[name]), rel=1e-5)
    assert relative(grad_hidden, expected["grad_hidden"]) < 1e-3  # fp32 logits of this size are good to 1e-5 at best
    assert relative(grad_weight, expected["grad_weight"]) < 1e-3
    plain = distillation_loss(
        case.hidden @ case.weight.T, case.teacher_hidden @ case.teacher_head.T, case.labels, Objective(0.7, 0.3, tau, 5)
    )
    assert plain.loss.item() == pytest.approx(float(expected["loss"]), rel=1e-5)


@pytest.mark.parametrize("chunk_tokens", [5, 64])
def test_bf16_is_close_to_fp32(chunk_tokens: int) -> None:
    case = make_case(seed=9).to(torch.bfloat16)
    sums, grad_hidden, grad_weight = run_chunked(case, Objective(0.7, 0.3, 2.0, chunk_tokens))
    expected = reference(case, 0.7, 0.3, 2.0)
    assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16
    assert all(value.dtype == torch.float64 for value in sums)
    for name in ("ce", "kl", "kd"):
        assert getattr(sums, name).item() == pytest.approx(float(expected[name]), rel=5e-3)
    assert relative(grad_hidden, expected["grad_hidden"]) < 2e-2
    assert relative(grad_weight, expected["grad_weight"]) < 2e-2


def test_bf16_weight_gradient_does_not_lose_small_chunks() -> None:
    """Summed over a thousand chunks in bf16, the gradient of equal tokens would stop growing after a few hundred."""
    case = make_case(seed=10)
    many = case.take(torch.zeros(1000, dtype=torch.int64)).to(torch.bfloat16)
    _, _, one_by_one = run_chunked(many, Objective(0.7, 0.3, 1.0, 1))
    expected = reference(many.take(torch.tensor([0])), 0.7, 0.3, 1.0)["grad_weight"] * 1000
    assert relative(one_by_one, expected) < 1e-2


def test_an_fp32_teacher_beside_a_bf16_student() -> None:
    case = make_case(seed=11)
    student = case.to(torch.bfloat16)
    mixed = dataclasses.replace(case, hidden=student.hidden, weight=student.weight)
    sums, grad_hidden, _ = run_chunked(mixed, Objective(0.7, 0.3, 1.0, 5))
    expected = reference(mixed, 0.7, 0.3, 1.0)
    assert sums.kl.item() == pytest.approx(float(expected["kl"]), rel=5e-3)
    assert relative(grad_hidden, expected["grad_hidden"]) < 2e-2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_cuda_equals_fp64_reference(
    monkeypatch: pytest.MonkeyPatch, tau: float, dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setattr(objective_module, "DEVICE_ROW_BLOCK_ELEMENTS", 4 * VOCAB)
    case = make_case(seed=15, tokens=101).to(dtype)
    sums, *grads = run_chunked(Case(*(t.cuda() for t in vars(case).values())), Objective(0.7, 0.3, tau, 20))
    expected = reference(case, 0.7, 0.3, tau)
    for name in ("ce", "kl", "kd"):
        assert getattr(sums, name).item() == pytest.approx(float(expected[name]), rel=tolerance)
    for grad, name in zip(grads, ("grad_hidden", "grad_weight"), strict=True):
        assert grad.is_cuda and grad.dtype == dtype
        assert relative(grad.cpu(), expected[name]) < tolerance


def test_small_losses_keep_their_digits() -> None:
    """A student that is sure and right, and as far as the teacher: both losses are small beside the logits."""
    case = make_case(seed=16)
    logits = case.hidden @ case.weight.T
    case.hidden *= 20 / (logits.max(-1, keepdim=True).values - logits.min(-1, keepdim=True).values)
    case.labels = (case.hidden @ case.weight.T).argmax(-1)
    noise = torch.randn(case.hidden.shape, generator=torch.Generator().manual_seed(17))
    case = dataclasses.replace(case, teacher_hidden=case.hidden + 0.03 * noise, teacher_head=case.weight)
    for tau in (1.0, 2.0):
        sums, *_ = run_chunked(case, Objective(0.7, 0.3, tau, 5))
        expected = reference(case, 0.7, 0.3, tau)
        assert sums.ce.item() == pytest.approx(float(expected["ce"]), rel=1e-5)
        assert sums.kl.item() == pytest.approx(float(expected["kl"]), rel=2e-4)
