"""The objective against a plain fp64 computation of Eq. 5 that autograd differentiates."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockgrow_titan.distill import objective as objective_module
from blockgrow_titan.distill.objective import (
    IGNORE_INDEX,
    LossSums,
    Objective,
    chunked_distillation,
    distillation_loss,
)
from tests.unit_tests.objective_cases import (
    DIM,
    SCALE,
    TEACHER_DIM,
    TOKENS,
    VOCAB,
    make_case,
    reference,
    relative,
    run_chunked,
    small_row_blocks,  # noqa: F401  (a fixture)
)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 64, 10 * TOKENS])
@pytest.mark.parametrize("tau", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("alpha, gamma", [(0.7, 0.3), (1.0, 0.0), (0.0, 1.0)])
def test_chunked_equals_fp64_reference(alpha: float, gamma: float, tau: float, chunk_tokens: int) -> None:
    case = make_case()
    sums, grad_hidden, grad_weight = run_chunked(case, Objective(alpha, gamma, tau, chunk_tokens))
    expected = reference(case, alpha, gamma, tau)
    assert sums.loss.item() == pytest.approx(float(expected["loss"]) * SCALE, rel=1e-6)
    for name in ("ce", "kl", "kd"):
        assert getattr(sums, name).item() == pytest.approx(float(expected[name]), rel=1e-6), name
    assert relative(grad_hidden, expected["grad_hidden"]) < 1e-5
    assert relative(grad_weight, expected["grad_weight"]) < 1e-5


@pytest.mark.parametrize("tau", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("alpha, gamma", [(0.7, 0.3), (1.0, 0.0), (0.0, 1.0)])
def test_plain_equals_fp64_reference_under_a_mask(alpha: float, gamma: float, tau: float) -> None:
    case = make_case(seed=1)
    labels = case.labels.clone()
    labels[::3] = IGNORE_INDEX
    valid = labels != IGNORE_INDEX
    logits = (case.hidden @ case.weight.T).requires_grad_()
    sums = distillation_loss(logits, case.teacher_hidden @ case.teacher_head.T, labels, Objective(alpha, gamma, tau, 1))
    sums.loss.backward()
    expected = reference(case.take(valid), alpha, gamma, tau)
    for name in ("loss", "ce", "kl", "kd"):
        assert getattr(sums, name).item() == pytest.approx(float(expected[name]), rel=1e-6), name
    assert relative(logits.grad[valid] @ case.weight * SCALE, expected["grad_hidden"]) < 1e-5
    assert not logits.grad[~valid].any()


@pytest.mark.parametrize("alpha, gamma, tau", [(0.7, 0.3, 1.0), (0.7, 0.3, 2.0), (1.0, 0.0, 4.0)])
def test_fp64_gradients_equal_finite_differences(alpha: float, gamma: float, tau: float) -> None:
    case = make_case(seed=2, tokens=5, vocab=7, dim=3).to(torch.float64)
    objective = Objective(alpha, gamma, tau, 2)
    _, *grads = run_chunked(case, objective)
    eps = 1e-6
    for name, grad in zip(("hidden", "weight"), grads, strict=True):
        assert grad.dtype == torch.float64
        numeric = torch.empty_like(grad)
        for i in range(grad.numel()):
            losses = []
            for sign in (1, -1):
                moved = getattr(case, name).clone()
                moved.view(-1)[i] += sign * eps
                shifted = dataclasses.replace(case, **{name: moved})
                losses.append(run_chunked(shifted, objective)[0].loss.detach())
            numeric.view(-1)[i] = (losses[0] - losses[1]) / (2 * eps)
        assert relative(grad, numeric) < 1e-7


def test_chunk_size_changes_nothing() -> None:
    case = make_case(seed=3, tokens=101)
    whole = run_chunked(case, Objective(0.7, 0.3, 2.0, 101))
    for chunk_tokens in (1, 2, 7, 50, 100, 1000):
        sums, *grads = run_chunked(case, Objective(0.7, 0.3, 2.0, chunk_tokens))
        for name in LossSums._fields:
            assert getattr(sums, name).item() == pytest.approx(getattr(whole[0], name).item(), rel=1e-6)
        assert relative(grads[0], whole[1]) < 1e-6
        assert relative(grads[1], whole[2]) < 1e-6


@pytest.mark.parametrize("tau", [1.0, 2.0, 4.0])
def test_tau_squared_multiplies_the_kl(tau: float) -> None:
    case = make_case(seed=4)
    sums, *_ = run_chunked(case, Objective(0.7, 0.3, tau, 8), scale=1.0)
    log_p = torch.log_softmax(case.hidden.double() @ case.weight.double().T / tau, -1)
    log_q = torch.log_softmax(case.teacher_hidden.double() @ case.teacher_head.double().T / tau, -1)
    kl = F.kl_div(log_p, log_q, reduction="sum", log_target=True)
    ce = F.cross_entropy(case.hidden.double() @ case.weight.double().T, case.labels, reduction="sum")
    assert sums.loss.item() == pytest.approx(float(0.7 * tau**2 * kl + 0.3 * ce), rel=1e-6)
    assert sums.loss.item() == 0.7 * tau**2 * sums.kl.item() + 0.3 * sums.ce.item()


def test_pure_kl_and_pure_cross_entropy() -> None:
    case = make_case(seed=5)
    logits, teacher_logits = case.hidden @ case.weight.T, case.teacher_hidden @ case.teacher_head.T
    kl = F.kl_div(logits.log_softmax(-1), teacher_logits.log_softmax(-1), reduction="sum", log_target=True)
    ce = F.cross_entropy(logits, case.labels, reduction="sum")
    for alpha, gamma, expected in ((1.0, 0.0, kl), (0.0, 1.0, ce)):
        objective = Objective(alpha, gamma, 1.0, 5)
        chunked, *_ = run_chunked(case, objective, scale=1.0)
        plain = distillation_loss(logits, teacher_logits, case.labels, objective)
        for sums in (chunked, plain):
            assert sums.loss.item() == pytest.approx(float(expected), rel=1e-5)
            assert sums.kl.item() == pytest.approx(float(kl), rel=1e-5)
            assert sums.ce.item() == pytest.approx(float(ce), rel=1e-5)


def test_without_a_teacher_it_is_the_cross_entropy() -> None:
    case = make_case(seed=6)
    sums, grad_hidden, grad_weight = run_chunked(case, Objective(0.0, 0.5, 2.0, 5), teacher=False)
    expected = reference(case, 0.0, 0.5, 2.0, teacher=False)
    assert sums.ce.item() == pytest.approx(float(expected["ce"]), rel=1e-6)
    assert sums.kl.item() == sums.kd.item() == 0
    assert relative(grad_hidden, expected["grad_hidden"]) < 1e-5
    assert relative(grad_weight, expected["grad_weight"]) < 1e-5
    plain = distillation_loss(case.hidden @ case.weight.T, None, case.labels, Objective(0.0, 0.5, 2.0, 5))
    assert plain.loss.item() == pytest.approx(float(expected["loss"]), rel=1e-6)
    assert plain.kl.item() == plain.kd.item() == 0


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_teacher_equal_to_student(tau: float) -> None:
    case = make_case(seed=7)
    case = dataclasses.replace(case, teacher_hidden=case.hidden, teacher_head=case.weight)
    sums, grad_hidden, grad_weight = run_chunked(case, Objective(1.0, 0.0, tau, 5))
    p = torch.softmax(case.hidden.double() @ case.weight.double().T / tau, -1)
    entropy = -(p * p.log()).sum()
    assert abs(sums.kl.item()) < 1e-6 * TOKENS
    assert sums.kd.item() == pytest.approx(float(entropy), rel=1e-6)
    assert float(grad_hidden.norm()) < 1e-6 and float(grad_weight.norm()) < 1e-6


def test_scale_may_be_a_tensor_and_gradients_accumulate() -> None:
    case = make_case(seed=12)
    objective = Objective(0.7, 0.3, 1.0, 5)
    _, grad_hidden, grad_weight = run_chunked(case, objective)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    for _ in range(2):
        sums = chunked_distillation(hidden, weight, case.labels, *case.teacher, objective, torch.tensor(SCALE))
        (3 * sums.loss).backward()
    assert relative(hidden.grad, 6 * grad_hidden) < 1e-6
    assert relative(weight.grad, 6 * grad_weight) < 1e-6
    with pytest.raises(RuntimeError):
        sums.loss.backward()


@pytest.mark.parametrize("teacher", [True, False])
def test_no_tokens_give_zero_sums_and_zero_gradients(teacher: bool) -> None:
    case = make_case(tokens=0)
    sums, grad_hidden, grad_weight = run_chunked(case, Objective(0.7 * teacher, 0.3, 2.0, 5), teacher=teacher)
    assert [value.item() for value in sums] == [0, 0, 0, 0]
    assert grad_hidden.shape == (0, DIM)
    assert grad_weight.shape == (VOCAB, DIM) and not grad_weight.any()


def test_plain_loss_with_every_label_ignored_is_zero() -> None:
    case = make_case()
    logits = (case.hidden @ case.weight.T).requires_grad_()
    labels = torch.full_like(case.labels, IGNORE_INDEX)
    sums = distillation_loss(logits, logits.detach().flip(0), labels, Objective(0.7, 0.3, 1.0, 5))
    sums.loss.backward()
    assert [value.item() for value in sums] == [0, 0, 0, 0]
    assert not logits.grad.any()


class LogitsRecorder(TorchDispatchMode):
    """Keeps the largest result of any operation, the rows of the tallest vocabulary-wide one, and counts products."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.largest, self.rows, self.products = vocab, 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
                if leaf.dim() and leaf.shape[-1] == self.vocab:
                    self.rows = max(self.rows, leaf.numel() // self.vocab)
        return out


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_logits_of_one_chunk_at_most(tau: float) -> None:
    tokens, vocab, chunk_tokens = 512, 64, 32
    case = make_case(tokens=tokens, vocab=vocab)
    with LogitsRecorder(vocab) as recorder:
        run_chunked(case, Objective(0.7, 0.3, tau, chunk_tokens))
    assert recorder.rows == chunk_tokens
    assert recorder.largest <= max(tokens * TEACHER_DIM, vocab * TEACHER_DIM) < tokens * vocab


def count_products(grad: bool = True, hidden_grad: bool = True, weight_grad: bool = True) -> int:
    case = make_case()
    hidden, weight = case.hidden.requires_grad_(hidden_grad), case.weight.requires_grad_(weight_grad)
    with torch.set_grad_enabled(grad), LogitsRecorder(VOCAB) as recorder:
        sums = chunked_distillation(hidden, weight, case.labels, *case.teacher, Objective(0.7, 0.3, 1.0, TOKENS))
    assert sums.loss.requires_grad == (grad and (hidden_grad or weight_grad))
    assert not (sums.ce.requires_grad or sums.kl.requires_grad or sums.kd.requires_grad)
    return recorder.products


def test_gradients_that_nobody_needs_cost_nothing() -> None:
    assert count_products() == 4
    assert count_products(weight_grad=False) == 3
    assert count_products(hidden_grad=False) == 3
    assert count_products(hidden_grad=False, weight_grad=False) == 2
    assert count_products(grad=False) == 2


def test_a_frozen_weight_leaves_the_hidden_gradient_as_it_is() -> None:
    case = make_case(seed=13)
    objective = Objective(0.7, 0.3, 2.0, 5)
    _, grad_hidden, grad_weight = run_chunked(case, objective)
    hidden = case.hidden.clone().requires_grad_()
    chunked_distillation(hidden, case.weight, case.labels, *case.teacher, objective, SCALE).loss.backward()
    assert torch.equal(hidden.grad, grad_hidden)
    assert case.weight.grad is None
    weight = case.weight.clone().requires_grad_()
    chunked_distillation(case.hidden, weight, case.labels, *case.teacher, objective, SCALE).loss.backward()
    assert torch.equal(weight.grad, grad_weight)


def test_it_runs_under_deterministic_algorithms() -> None:
    case = make_case(seed=14)
    objective = Objective(0.7, 0.3, 2.0, 5)
    sums, *grads = run_chunked(case, objective)
    torch.use_deterministic_algorithms(True)  # this also fills new tensors with NaN
    try:
        again, *grads_again = run_chunked(case, objective)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [a.item() for a in sums] == [b.item() for b in again]
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kd_weight": -0.1}, "kd_weight is -0.1"),
        ({"ce_weight": math.nan}, "ce_weight is nan"),
        ({"kd_weight": 0.0, "ce_weight": 0.0}, "both 0"),
        ({"temperature": 0.0}, "temperature is 0.0: it must be above 0; set distill.temperature"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0: it must be at least 1; set distill.chunk_tokens"),
    ],
)
def test_objective_refuses(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Objective(0.7, 0.3, 1.0, 5), **change)


def test_inputs_that_do_not_fit_are_refused() -> None:
    case = make_case()
    objective = Objective(0.7, 0.3, 1.0, 5)
    hidden, weight, labels, teacher_hidden, teacher_head = vars(case).values()
    for arguments, message in (
        ((hidden, weight, labels, None, None), "kd_weight is 0.7 and there is no teacher"),
        ((hidden, weight, labels, teacher_hidden, None), "given together"),
        ((hidden, weight[:, 1:], labels, teacher_hidden, teacher_head), "hidden size"),
        ((hidden, weight, labels[1:], teacher_hidden, teacher_head), "labels are \\[36\\]"),
        ((hidden, weight, labels, teacher_hidden[1:], teacher_head), "must have 37 rows"),
        ((hidden, weight, labels, teacher_hidden, teacher_head[1:]), "head is \\[52, 20\\]: it must be \\[53, 20\\]"),
        ((hidden, weight, labels, teacher_hidden[:, 1:], teacher_head), "it must be \\[53, 19\\]"),
    ):
        with pytest.raises(ValueError, match=message):
            chunked_distillation(*arguments, objective)
    logits = hidden @ weight.T
    with pytest.raises(ValueError, match="there is no teacher"):
        distillation_loss(logits, None, labels, objective)
    with pytest.raises(ValueError, match="\\[37, 52\\]"):
        distillation_loss(logits, logits[:, 1:], labels, objective)


def test_imports_neither_torchtitan_nor_distributed() -> None:
    with open(objective_module.__file__) as file:
        imports = [line for line in file if line.startswith(("import ", "from "))]
    assert imports and not any("torchtitan" in line or "distributed" in line for line in imports)
