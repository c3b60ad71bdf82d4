"""Packed rows through the student: each document as if it were alone, in every way that a student can run."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import JobConfig

from blockgrow_titan.distill.head import LossTargets
from blockgrow_titan.distill.objective import Objective
from blockgrow_titan.infra.parallelize import data_parallel_dims, parallelize_block_stack
from blockgrow_titan.model.init import named_parameters
from blockgrow_titan.model.model import BlockStackModel
from tests.unit_tests import user_placements
from tests.unit_tests.jobs import full
from tests.unit_tests.models import VOCAB, hf_config, randomize_norms, small_args, small_model
from tests.unit_tests.rank_pool import RankPool, init_gloo

LENGTHS = (7, 1, 19, 4)
Row = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def placements():
    user_placements.remember()
    yield
    user_placements.forget()


def packed(lengths: tuple[int, ...] = LENGTHS, padding: int = 3, seed: int = 0) -> Row:
    """Tokens and labels [1, N], random also where there is padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(VOCAB, (2, 1, sum(lengths) + padding), generator=generator)
    labels[0, sum(lengths) :] = IGNORE_INDEX
    return tokens, labels


def cut(row: torch.Tensor, lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, ...]:
    """The documents of a row [N, ...]."""
    return row[: sum(lengths)].split(lengths)


def student(placement: str, blocks: int = 2, **changes: Any) -> BlockStackModel:
    model = small_model(placement, blocks, train_embedding=True, **changes)
    randomize_norms(model)
    return model


def plain_loss(model: BlockStackModel, row: Row, lengths: tuple[int, ...]) -> torch.Tensor:
    """The reference: cross-entropy of full logits, one document at a time."""
    parts = [
        F.cross_entropy(model(tokens[None])[0], labels, reduction="sum")
        for tokens, labels in zip(*(cut(part[0], lengths) for part in row), strict=True)
    ]
    return torch.stack(parts).sum()


def packed_loss(model: Any, row: Row, lengths: tuple[int, ...]) -> torch.Tensor:
    objective = Objective(kd_weight=0.0, ce_weight=1.0, temperature=1.0, chunk_tokens=16)
    return model(row[0], LossTargets(row[1], objective), lengths).loss


def gradients(model: Any) -> dict[str, Any]:
    return {fqn: full(param.grad) for fqn, param in named_parameters(model) if param.grad is not None}


def assert_close(got: dict[str, Any], expected: dict[str, Any], rel: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for fqn, gradient in expected.items():
        assert abs(got[fqn] - gradient).max() <= rel * abs(gradient).max(), fqn


@pytest.mark.parametrize("heads", [{}, {"n_kv_heads": 4}, {"n_kv_heads": 1}])
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "scaled_post"])
def test_equals_one_document_at_a_time(placement: str, heads: dict[str, int]) -> None:
    """Logits, loss, and the gradients of every parameter (the embedding's too: of the inputs), against float64."""
    row = packed()
    model, reference = student(placement, **heads), student(placement, **heads).double()
    logits = model(row[0], document_lengths=LENGTHS)[0]
    for got, tokens in zip(cut(logits), cut(row[0][0]), strict=True):
        expected = reference(tokens[None])[0]
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    loss, expected = packed_loss(model, row, LENGTHS), plain_loss(reference, row, LENGTHS)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    assert len(gradients(model)) == len(list(model.parameters()))
    assert_close(gradients(model), gradients(reference))


def test_logits_are_those_of_transformers() -> None:
    from transformers import Qwen3ForCausalLM

    from blockgrow_titan.model.state_dict_adapter import BlockStackStateDictAdapter

    model = student("pre")
    hf = Qwen3ForCausalLM(hf_config()).eval()
    hf.load_state_dict(BlockStackStateDictAdapter(model.model_args).to_hf(model.state_dict()), strict=True)
    row = packed()
    with torch.no_grad():
        for got, tokens in zip(cut(model(row[0], document_lengths=LENGTHS)[0]), cut(row[0][0]), strict=True):
            assert (got - hf(tokens[None]).logits[0]).abs().max() < 1e-5


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_nothing_reaches_another_document(placement: str) -> None:
    """Other tokens in one document or in the padding leave every other document bit-equal, and every gradient too."""
    model, row = student(placement), packed()
    bounds = [0, 7, 8, 27, 31, 34]
    with torch.no_grad():
        before = model(row[0], document_lengths=LENGTHS)[0]
        assert before.isfinite().all()
        for start, end in zip(bounds, bounds[1:], strict=False):
            changed = row[0].clone()
            changed[0, start:end] = (changed[0, start:end] + 1) % VOCAB
            after = model(changed, document_lengths=LENGTHS)[0]
            same = torch.ones(34, dtype=torch.bool)
            same[start:end] = False
            assert torch.equal(after[same], before[same]) and not torch.equal(after[start], before[start])
    found = []
    for padding in (row[0][0, 31:], torch.tensor([5, 5, 5])):
        model.zero_grad()
        tokens = torch.cat([row[0][0, :31], padding])[None]
        packed_loss(model, (tokens, row[1]), LENGTHS).backward()
        found.append(gradients(model))
    assert all((a == b).all() for a, b in zip(found[0].values(), found[1].values(), strict=True))


def test_a_row_without_documents() -> None:
    model = student("post")
    loss = packed_loss(model, (torch.tensor([[3]]), torch.tensor([[IGNORE_INDEX]])), ())
    loss.backward()
    assert loss.item() == 0 and all((gradient == 0).all() for gradient in gradients(model).values())


def test_lengths_beyond_the_model_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"document_lengths \[65\] do not fit a row of 70 tokens: each must be 1 to 64"
    ):
        student("post")(torch.zeros(1, 70, dtype=torch.int64), document_lengths=(65,))
    row = student("post")(
        torch.zeros(1, 130, dtype=torch.int64), document_lengths=(64, 60)
    )  # the row itself may be longer
    assert row.shape == (1, 130, VOCAB)


ROWS = [((7, 1, 19, 4), 3), ((12, 12), 0), ((3, 9, 11, 2, 1, 6), 2), ((30,), 4), ((1,), 0), ((), 1), ((5, 5, 5), 9)]


def sharded_gradients(
    rank: int, world_size: int, store: dist.Store, placement: str, ac: str, compiled: bool
) -> tuple[float, dict[str, Any], int]:
    """Gradients of some rows, dealt to the ranks in turn, of a student as a job makes it; and graphs that were compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    init_gloo(store, rank, world_size)
    config = JobConfig()
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = ac
    config.activation_checkpoint.selective_ac_option = "op"
    counter = CompileCounterWithBackend("aot_eager")
    config.compile.enable, config.compile.components = compiled, ["model"]
    config.compile.backend = counter  # type: ignore[assignment]
    with torch.device("meta"):
        model = BlockStackModel(small_args(placement, 2, train_embedding=True))
    parallelize_block_stack(model, data_parallel_dims(config, world_size), config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    model.train()
    total = 0.0
    for first in range(0, len(ROWS) // world_size * world_size, world_size):
        lengths, padding = ROWS[first + rank]
        loss = packed_loss(model, packed(lengths, padding, seed=first + rank), lengths)
        loss.backward()
        total += loss.item()
    if ac == "none" and not compiled:  # the way of the diagnostics: padded rows, positionally
        model.layers["0"](torch.zeros(2, 5, model.model_args.dim), model.rope_cache, None)
    return total, gradients(model), counter.frame_count


@pytest.mark.parametrize(
    ("ranks", "placement", "ac", "compiled"),
    [
        (1, "pre", "none", False),
        (2, "post", "none", False),
        (2, "post", "full", False),
        (1, "post", "selective", False),
        (2, "pre", "selective", True),
        (1, "post", "full", True),
    ],
)
def test_sharded_checkpointed_compiled(
    rank_pool: RankPool, ranks: int, placement: str, ac: str, compiled: bool
) -> None:
    results = rank_pool.run(sharded_gradients, ranks, placement=placement, ac=ac, compiled=compiled)
    reference = small_model(placement, 2, train_embedding=True).double()
    used = ROWS[: len(ROWS) // ranks * ranks]
    losses = [
        plain_loss(reference, packed(lengths, padding, seed=i), lengths)
        for i, (lengths, padding) in enumerate(used)
        if lengths
    ]
    torch.stack(losses).sum().backward()
    assert sum(total for total, _, _ in results) == pytest.approx(sum(loss.item() for loss in losses), rel=1e-6)
    assert_close(results[0][1], gradients(reference))
    graphs = [count for _, _, count in results]
    # a first graph, one for any row and one for any number of documents: no more, whatever the lengths
    assert all(0 < count <= 3 if compiled else count == 0 for count in graphs)
