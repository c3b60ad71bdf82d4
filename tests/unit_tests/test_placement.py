"""Placements against a plain reference written from the paper's table, and a pre-norm student against transformers."""

import math

import pytest
import torch
import torch.nn.functional as F

from blockgrow_titan.model.placement import PLACEMENTS, PostNorm, PreNorm
from tests.unit_tests.models import VOCAB, hf_config, randomize_norms, small_model


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, theta: float = 1e6) -> torch.Tensor:
    """Rotary embedding of x [S, heads, head_dim], as complex rotations of (i, i + head_dim / 2)."""
    length, _, dim = x.shape
    angle = torch.arange(length, dtype=x.dtype)[:, None] / theta ** (torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention(x: torch.Tensor, p: dict[str, torch.Tensor], heads: int = 4, kv_heads: int = 2) -> torch.Tensor:
    """Causal grouped-query attention of one document x [S, D] with per-head QK norms, by explicit scores."""
    length = len(x)
    q = (x @ p["attention.wq.weight"].T).view(length, heads, -1)
    k = (x @ p["attention.wk.weight"].T).view(length, kv_heads, -1)
    v = (x @ p["attention.wv.weight"].T).view(length, kv_heads, -1)
    q = rotate(rms_norm(q, p["attention.q_norm.weight"]))
    k = rotate(rms_norm(k, p["attention.k_norm.weight"]))
    out = torch.empty_like(q)
    for head in range(heads):
        kv = head // (heads // kv_heads)
        scores = q[:, head] @ k[:, kv].T / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        out[:, head] = scores.softmax(-1) @ v[:, kv]
    return out.reshape(length, -1) @ p["attention.wo.weight"].T


def mlp(x: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
    gate = x @ p["feed_forward.w1.weight"].T
    return (gate * gate.sigmoid() * (x @ p["feed_forward.w3.weight"].T)) @ p["feed_forward.w2.weight"].T


def reference_logits(state: dict[str, torch.Tensor], tokens: torch.Tensor, placement: str, layers: int) -> torch.Tensor:
    """The table of the paper, one document, float64."""
    state = {name: value.double() for name, value in state.items()}
    h = state["tok_embeddings.weight"][tokens]
    if placement == "post":
        h = rms_norm(h, state["norm.weight"])
    for i in range(layers):
        p = {name.removeprefix(f"layers.{i}."): value for name, value in state.items()}
        n1, n2 = p["attention_norm.weight"], p["ffn_norm.weight"]
        if placement == "pre":
            h = h + attention(rms_norm(h, n1), p)
            h = h + mlp(rms_norm(h, n2), p)
        else:
            h = rms_norm(h + attention(h, p), n1)
            h = rms_norm(h + mlp(h, p), n2)
    if placement == "pre":
        h = rms_norm(h, state["norm.weight"])
    return h @ state["output.weight"].T


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("layers", [1, 3])
def test_logits_equal_the_plain_reference(placement: str, layers: int) -> None:
    model = small_model(placement, layers)
    randomize_norms(model)
    tokens = torch.randint(VOCAB, (11,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens[None])[0]
        expected = reference_logits(model.state_dict(), tokens, placement, layers)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_pre_norm_student_has_transformers_logits() -> None:
    from transformers import Qwen3ForCausalLM

    from blockgrow_titan.model.state_dict_adapter import BlockStackStateDictAdapter

    model = small_model("pre", 2)
    randomize_norms(model)
    hf = Qwen3ForCausalLM(hf_config()).eval()
    hf.load_state_dict(BlockStackStateDictAdapter(model.model_args).to_hf(model.state_dict()), strict=True)
    tokens = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (model(tokens) - hf(tokens).logits).abs().max() < 1e-5


def test_adapter_refuses_a_placement_that_hugging_face_lacks() -> None:
    from blockgrow_titan.model.state_dict_adapter import BlockStackStateDictAdapter

    model = small_model("post", 1)
    with pytest.raises(NotImplementedError, match='placement is "post".*python -m tools.convert_hf to-hf'):
        BlockStackStateDictAdapter(model.model_args).to_hf(model.state_dict())


def test_every_parameter_has_a_hugging_face_name() -> None:
    from transformers import Qwen3ForCausalLM

    from blockgrow_titan.model.state_dict_adapter import BlockStackStateDictAdapter

    for name in ("pre", "post"):
        model = small_model(name, 12)
        adapter = BlockStackStateDictAdapter(model.model_args)
        shapes = {adapter.hf_name(fqn): param.shape for fqn, param in model.named_parameters()}
        with torch.device("meta"):
            expected = {n: p.shape for n, p in Qwen3ForCausalLM(hf_config(num_hidden_layers=12)).named_parameters()}
        assert shapes == expected
    for ours, theirs in (
        ("layers.10.extra_norm.weight", "model.layers.10.extra_norm.weight"),
        ("layers.3.ffn_norm.bias", "model.layers.3.post_attention_layernorm.bias"),
        ("layers.3.gates", "model.layers.3.gates"),
    ):
        assert adapter.hf_name(ours) == theirs


def test_a_subclass_of_qwen3s_placement_is_another() -> None:
    class Doubled(PreNorm):
        pass

    class Renamed(PreNorm):
        is_qwen3 = True

    assert [cls.is_qwen3 for cls in (PreNorm, PostNorm, Doubled, Renamed)] == [True, False, False, True]


def test_all_placements_have_the_same_parameters() -> None:
    shapes = [{n: p.shape for n, p in small_model(name, 3).named_parameters()} for name in PLACEMENTS]
    assert len(PLACEMENTS) >= 2
    assert all(s == shapes[0] for s in shapes)
    # two norms a layer (and two for the heads of queries and keys), one at the boundary
    assert sum(len(shape) == 1 for shape in shapes[0].values()) == 3 * 4 + 1


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_padding_on_the_right_changes_nothing(placement: str) -> None:
    model = small_model(placement, 2)
    tokens = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        alone = model(tokens)
        for pad in (0, 5):
            padded = model(F.pad(tokens, (0, 6), value=pad))[:, :9]
            assert (padded - alone).abs().max() < 1e-6
