"""The head: what it selects, what it returns, and how it behaves inside other machinery."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_leaves

from blockgrow_titan.distill.head import DistillationHead, LossTargets
from blockgrow_titan.distill.objective import IGNORE_INDEX, LossSums, Objective

BATCH, SEQ, DIM, TEACHER_DIM, VOCAB = 3, 7, 8, 10, 31
LENGTHS = [7, 2, 5]
OBJECTIVE = Objective(kd_weight=0.7, ce_weight=0.3, temperature=2.0, chunk_tokens=4)


def make_head(seed: int = 0) -> DistillationHead:
    head = DistillationHead(DIM, VOCAB)
    nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(seed))
    return head


def make_batch(seed: int = 0, lengths: list[int] = LENGTHS) -> tuple[Tensor, LossTargets]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BATCH, SEQ, DIM, generator=g)
    labels = torch.randint(VOCAB, (BATCH, SEQ), generator=g)
    for row, length in zip(labels, lengths, strict=True):
        row[length:] = IGNORE_INDEX
    teacher_hidden = torch.randn(sum(lengths), TEACHER_DIM, generator=g)
    teacher_head = torch.randn(VOCAB, TEACHER_DIM, generator=g)
    return hidden, LossTargets(labels, OBJECTIVE, 1 / 19, teacher_hidden, teacher_head)


def replace(targets: LossTargets, **changes: Tensor | None) -> LossTargets:
    changed = copy.copy(targets)
    vars(changed).update(changes)
    return changed


def reference(head: DistillationHead, hidden: Tensor, targets: LossTargets) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """fp64, position by position over the batch; the gradients are those of the scaled loss."""
    hidden, weight = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    tau = targets.objective.temperature
    teacher_rows = iter(targets.teacher_hidden.double())
    ce = kl = kd = torch.zeros((), dtype=torch.float64)
    for b in range(hidden.shape[0]):
        for s in range(hidden.shape[1]):
            if targets.labels[b, s] == IGNORE_INDEX:
                continue
            logits = weight @ hidden[b, s]
            log_p, log_q = (
                F.log_softmax(z / tau, -1) for z in (logits, targets.teacher_head.double() @ next(teacher_rows))
            )
            ce = ce + F.cross_entropy(logits, targets.labels[b, s])
            kl = kl + (log_q.exp() * (log_q - log_p)).sum()
            kd = kd - (log_q.exp() * log_p).sum()
    loss = (targets.objective.kd_weight * tau**2 * kl + targets.objective.ce_weight * ce) * targets.scale
    grads = torch.autograd.grad(loss, (hidden, weight))
    return {"loss": loss.detach(), "ce": ce.detach(), "kl": kl.detach(), "kd": kd.detach()}, *grads


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def test_without_targets_it_is_a_linear_layer() -> None:
    head = make_head()
    hidden, _ = make_batch()
    assert [name for name, _ in head.named_parameters()] == ["weight"]
    assert head.weight.shape == (VOCAB, DIM)
    torch.testing.assert_close(head(hidden), hidden @ head.weight.T)
    torch.testing.assert_close(head(hidden[0, 0]), head.weight @ hidden[0, 0])


@pytest.mark.parametrize("lengths", [LENGTHS, [7, 7, 7], [0, 0, 1]])
def test_loss_and_gradients_equal_fp64_reference(lengths: list[int]) -> None:
    head = make_head()
    hidden, targets = make_batch(lengths=lengths)
    hidden.requires_grad_()
    sums = head(hidden, targets)
    sums.loss.backward()
    expected, grad_hidden, grad_weight = reference(head, hidden, targets)
    assert isinstance(sums, LossSums)
    for name, value in expected.items():
        assert getattr(sums, name).item() == pytest.approx(float(value), rel=1e-6), name
    assert relative(hidden.grad, grad_hidden) < 1e-5
    assert relative(head.weight.grad, grad_weight) < 1e-5


def test_ignored_positions_change_nothing() -> None:
    head = make_head()
    hidden, targets = make_batch()
    other = hidden.clone()
    other[targets.labels == IGNORE_INDEX] = torch.inf
    results = []
    for inputs in (hidden, other):
        head.zero_grad()
        inputs.requires_grad_()
        sums = head(inputs, targets)
        sums.loss.backward()
        results.append((sums, inputs.grad, head.weight.grad))
    (sums, grad_hidden, grad_weight), (other_sums, other_grad_hidden, other_grad_weight) = results
    assert [a.item() for a in sums] == [b.item() for b in other_sums]
    assert torch.equal(grad_hidden, other_grad_hidden) and torch.equal(grad_weight, other_grad_weight)
    assert not grad_hidden[targets.labels == IGNORE_INDEX].any()


def test_all_ignored_gives_zeros_and_a_backward() -> None:
    head = make_head()
    hidden, targets = make_batch(lengths=[0, 0, 0])
    hidden.requires_grad_()
    sums = head(hidden, targets)
    sums.loss.backward()
    assert [value.item() for value in sums] == [0, 0, 0, 0]
    assert hidden.grad.shape == hidden.shape and not hidden.grad.any()
    assert head.weight.grad.shape == head.weight.shape and not head.weight.grad.any()


def test_one_batch_equals_its_documents_one_by_one() -> None:
    head = make_head()
    hidden, targets = make_batch()
    whole = head(hidden, targets)
    whole.loss.backward()
    grad, head.weight.grad = head.weight.grad, None
    parts = []
    for b, teacher_hidden in enumerate(targets.teacher_hidden.split(LENGTHS)):
        one = replace(targets, labels=targets.labels[b : b + 1], teacher_hidden=teacher_hidden)
        parts.append(head(hidden[b : b + 1], one))
        parts[-1].loss.backward()
    for name in LossSums._fields:
        assert sum(getattr(part, name).item() for part in parts) == pytest.approx(getattr(whole, name).item(), rel=1e-6)
    assert relative(head.weight.grad, grad.double()) < 1e-6


def test_no_grad_and_frozen_weight() -> None:
    head = make_head()
    hidden, targets = make_batch()
    with torch.no_grad():
        evaluated = head(hidden, targets)
    trained = head(hidden, targets)
    assert not evaluated.loss.requires_grad and trained.loss.requires_grad
    assert [a.item() for a in evaluated] == [b.item() for b in trained]
    head.requires_grad_(False)
    hidden.requires_grad_()
    head(hidden, targets).loss.backward()
    assert head.weight.grad is None
    assert relative(hidden.grad, reference(head, hidden, targets)[1]) < 1e-5


def test_no_cast_of_fsdp_reaches_the_targets() -> None:
    _, targets = make_batch()
    args, kwargs = _apply_to_tensors(lambda t: t.to(torch.bfloat16), ((targets,), {"targets": targets}))
    assert args[0] is targets and kwargs["targets"] is targets
    assert targets.teacher_hidden.dtype == torch.float32


def test_fsdp_finds_the_loss_in_the_output() -> None:
    head = make_head()
    hidden, targets = make_batch()
    assert [leaf.requires_grad for leaf in tree_leaves(head(hidden, targets))] == [True, False, False, False]


def test_compiling_around_the_head_leaves_it_eager() -> None:
    traced = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]):
        traced.extend(str(node.target) for node in graph.graph.nodes if node.op != "output")
        return graph.forward

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = make_head()

        def forward(self, hidden: Tensor, targets: LossTargets) -> LossSums:
            return self.head(torch.cos(hidden), targets)

    model = Model()
    hidden, targets = make_batch()
    eager = model(hidden, targets)
    eager.loss.backward()
    grad, model.head.weight.grad = model.head.weight.grad, None
    compiled = torch.compile(model, backend=backend)(hidden, targets)
    compiled.loss.backward()
    assert [a.item() for a in eager] == [b.item() for b in compiled]
    assert torch.equal(model.head.weight.grad, grad)
    assert any("cos" in name for name in traced)
    assert not any(op in name for name in traced for op in ("mm", "linear", "softmax", "weight", "index_select"))


def test_labels_and_teacher_must_fit() -> None:
    head = make_head()
    hidden, targets = make_batch()
    with pytest.raises(ValueError, match="labels are \\[3, 6\\] and hidden states \\[3, 7, 8\\]"):
        head(hidden, replace(targets, labels=targets.labels[:, 1:]))
    with pytest.raises(ValueError, match="must have 14 rows"):
        head(hidden, replace(targets, teacher_hidden=targets.teacher_hidden[1:]))
    with pytest.raises(ValueError, match="there is no teacher"):
        head(hidden, replace(targets, teacher_hidden=None, teacher_head=None))
