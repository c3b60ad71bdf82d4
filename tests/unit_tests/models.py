"""Small models and Hugging Face folders that several test files share."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockgrow_titan.model.args import FLAVORS, BlockStackArgs
from blockgrow_titan.model.model import BlockStackModel

VOCAB, DIM = 97, 32
DIMS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "dim": DIM,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "hidden_dim": 48,
    "max_seq_len": 64,
}


def small_args(placement: str = "post", blocks: int = 2, **changes: Any) -> BlockStackArgs:
    """Arguments of a model that is small enough for loops in tests."""
    args = dataclasses.replace(FLAVORS["tiny"], **DIMS)
    return dataclasses.replace(
        args, **({"placement": placement, "active_blocks": blocks, "n_layers": blocks} | changes)
    )


def small_model(placement: str = "post", blocks: int = 2, **changes: Any) -> BlockStackModel:
    """A plain (unsharded) model with invariant 1's initialisation, fp32 on CPU."""
    model = BlockStackModel(small_args(placement, blocks, **changes))
    with torch.no_grad():
        model.init_weights()
    return model


def randomize_norms(model: nn.Module, seed: int = 0) -> None:
    """Give every norm weights other than one, so that a test can tell where it stands."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.copy_(1 + 0.3 * torch.randn(param.shape, generator=generator))


def hf_config(**changes: Any) -> Any:
    """transformers' config of the same dimensions."""
    from transformers import Qwen3Config

    values = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "intermediate_size": DIMS["hidden_dim"],
        "num_hidden_layers": 2,
        "num_attention_heads": DIMS["n_heads"],
        "num_key_value_heads": DIMS["n_kv_heads"],
        "head_dim": DIMS["head_dim"],
        "max_position_embeddings": 64,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    return Qwen3Config(**(values | changes))


def save_hf_teacher(folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Write a random Qwen3 in Hugging Face format, fp32, and return transformers' model."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(hf_config(**changes)).eval()
    randomize_norms(model, seed)
    model.save_pretrained(folder)
    return model


def read_json(path: Path) -> Any:
    return json.loads(Path(path).read_text())
