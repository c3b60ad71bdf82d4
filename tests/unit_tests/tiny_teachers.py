"""Tiny random Qwen3 teachers, saved by transformers, which is also the reference for their hidden states."""

from pathlib import Path
from typing import Any

import torch

VOCAB, DIM, SEQ_LEN = 97, 32, 24


def save_teacher(folder: Path, tied: bool, **save_kwargs: Any) -> torch.nn.Module:
    """A tiny random Qwen3, saved by transformers. Odd sizes, so that no shard is even; heads wider than D / heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=51,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 12345.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(1 + 0.2 * torch.randn_like(param) if param.ndim == 1 else 0.3 * torch.randn_like(param))
    model.save_pretrained(folder, **save_kwargs)
    return model


def make_teachers(folder: Path) -> dict[str, tuple[Path, torch.nn.Module]]:
    """name -> (folder, transformers' model)."""
    return {
        "untied": (folder / "untied", save_teacher(folder / "untied", False)),
        "tied": (folder / "tied", save_teacher(folder / "tied", True)),
        "sharded_files": (folder / "sharded", save_teacher(folder / "sharded", False, max_shard_size="20KB")),
    }
