"""Invariant 1: a parameter's initial value depends on seed, FQN and shape, and on nothing else."""

import hashlib
from typing import Any

import pytest
import torch

from blockgrow_titan.model.init import clean_fqn, full_init, initialize_parameters, named_parameters
from tests.unit_tests.models import small_model


def values(**arguments: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in named_parameters(small_model(**arguments))}


def test_same_over_placement_depth_and_phase() -> None:
    grown = values(placement="pre", blocks=3)
    for other in (values(placement="post", blocks=3), values(placement="post", blocks=1)):
        for name, value in other.items():
            assert torch.equal(value, grown[name]), name


def test_other_seed_other_fqn_other_values() -> None:
    first, second = values(seed=1), values(seed=2)
    matrices = [name for name, value in first.items() if value.ndim == 2]
    assert all(not torch.equal(first[name], second[name]) for name in matrices)
    a, b = (first[f"layers.{i}.attention.wq.weight"] for i in range(2))
    assert not torch.equal(a, b)


def test_scheme_is_hugging_faces() -> None:
    """Matrices normal(0, 0.02), norms one: on enough numbers to tell."""
    weight = full_init("layers.0.feed_forward.w1.weight", torch.Size([768, 256]), seed=0)
    assert abs(weight.std().item() / 0.02 - 1) < 0.01
    assert abs(weight.mean().item()) < 1e-4
    assert weight.abs().max() > 0.02 * 3.5  # not truncated
    assert torch.equal(full_init("norm.weight", torch.Size([7]), seed=0), torch.ones(7))


def test_value_is_pinned() -> None:
    """A change of the scheme would silently make old and new runs incomparable."""
    weight = full_init("output.weight", torch.Size([4, 3]), seed=42)
    key = hashlib.sha256(b"42/output.weight/4x3").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") // 2)
    assert torch.equal(weight, torch.empty(4, 3).normal_(0, 0.02, generator=generator))


def test_global_random_state_is_neither_used_nor_changed() -> None:
    torch.manual_seed(1)
    first = values()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    model = small_model()  # module constructors draw from the global state; initialisation must not
    torch.set_rng_state(state)
    model.init_weights()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], param) for name, param in named_parameters(model))


def test_only_what_is_wanted() -> None:
    model = small_model(blocks=2)
    before = {name: param.detach().clone() for name, param in named_parameters(model)}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    done = initialize_parameters(model, seed=0, wanted=lambda fqn: fqn.startswith("layers.1."))
    assert done and all(fqn.startswith("layers.1.") for fqn in done)
    for name, param in named_parameters(model):
        expected = before[name] if name in done else torch.zeros_like(param)
        assert torch.equal(param.detach(), expected), name


@pytest.mark.parametrize(
    ("wrapped", "clean"),
    [
        ("layers.0._checkpoint_wrapped_module.ffn_norm.weight", "layers.0.ffn_norm.weight"),
        ("layers.0._orig_mod._checkpoint_wrapped_module.ffn_norm.weight", "layers.0.ffn_norm.weight"),
        ("output.weight", "output.weight"),
    ],
)
def test_clean_fqn(wrapped: str, clean: str) -> None:
    assert clean_fqn(wrapped) == clean
