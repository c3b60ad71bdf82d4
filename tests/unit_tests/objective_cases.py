"""A small loss to compute, and the same by a plain fp64 computation of Eq. 5 that autograd differentiates."""

import dataclasses

import pytest
import torch
from torch import Tensor

from blockgrow_titan.distill import objective as objective_module
from blockgrow_titan.distill.objective import (
    LossSums,
    Objective,
    chunked_distillation,
)

TOKENS, DIM, TEACHER_DIM, VOCAB = 37, 12, 20, 53
SCALE = 1 / 29


@dataclasses.dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    teacher_hidden: Tensor
    teacher_head: Tensor

    def to(self, dtype: torch.dtype) -> "Case":
        return Case(*(t.to(dtype) if t.is_floating_point() else t for t in vars(self).values()))

    def take(self, index: Tensor) -> "Case":
        """The same heads and the tokens at ``index``."""
        return dataclasses.replace(
            self, hidden=self.hidden[index], labels=self.labels[index], teacher_hidden=self.teacher_hidden[index]
        )

    @property
    def teacher(self) -> tuple[Tensor, Tensor]:
        return self.teacher_hidden, self.teacher_head


def make_case(seed: int = 0, tokens: int = TOKENS, vocab: int = VOCAB, dim: int = DIM) -> Case:
    g = torch.Generator().manual_seed(seed)
    return Case(
        hidden=torch.randn(tokens, dim, generator=g),
        weight=torch.randn(vocab, dim, generator=g) * 0.5,
        labels=torch.randint(vocab, (tokens,), generator=g),
        teacher_hidden=torch.randn(tokens, TEACHER_DIM, generator=g),
        teacher_head=torch.randn(vocab, TEACHER_DIM, generator=g) * 0.5,
    )


def reference(case: Case, alpha: float, gamma: float, tau: float, teacher: bool = True) -> dict[str, Tensor]:
    """Eq. 5 in fp64 from probabilities that are written out, with autograd's gradients of SCALE * loss."""
    case = case.to(torch.float64)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    student = hidden @ weight.T
    ce = kl = kd = student.new_zeros(())
    for row, label in zip(student, case.labels, strict=True):
        ce = ce + torch.logsumexp(row, 0) - row[label]
    if teacher:
        for row, target in zip(student / tau, case.teacher_hidden @ case.teacher_head.T / tau, strict=True):
            q = torch.exp(target - target.max()) / torch.exp(target - target.max()).sum()
            log_p = row - torch.logsumexp(row, 0)
            seen = q > 0
            kd = kd - (q * log_p).sum()
            kl = kl + (q[seen] * (q[seen].log() - log_p[seen])).sum()
    loss = alpha * tau**2 * kl + gamma * ce
    grads = torch.autograd.grad(loss * SCALE, (hidden, weight))
    return {"loss": loss.detach(), "ce": ce.detach(), "kl": kl.detach(), "kd": kd.detach()} | {
        "grad_hidden": grads[0],
        "grad_weight": grads[1],
    }


def run_chunked(case: Case, objective: Objective, teacher: bool = True, scale=SCALE) -> tuple[LossSums, Tensor, Tensor]:
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    pair = case.teacher if teacher else (None, None)
    sums = chunked_distillation(hidden, weight, case.labels, *pair, objective, scale)
    sums.loss.backward()
    return sums, hidden.grad, weight.grad


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(autouse=True)
def small_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of more than four rows are worked on in several blocks of rows, the last one uneven."""
    monkeypatch.setattr(objective_module, "CPU_ROW_BLOCK_ELEMENTS", 4 * VOCAB // torch.get_num_threads())
