"""Tiny random Qwen3 teachers, saved by transformers, which is also the reference for their hidden states."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

from tests.unit_tests.models import hf_config

VOCAB, DIM, SEQ_LEN = 97, 32, 24
CHUNK_BYTES = 2600  # 20 rows of the embedding in fp32


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


def convert_teachers(teachers: dict[str, tuple[Path, torch.nn.Module]], folder: Path) -> dict[str, Path]:
    """name -> converted checkpoint. In small chunks, so that even these matrices are in several files."""
    from blockgrow_titan.hf import from_hf

    with mock.patch.object(from_hf, "FILE_BYTES", CHUNK_BYTES):
        for name, (source, _) in teachers.items():
            from_hf.convert(str(source), str(folder / name), progress=False)
    return {name: folder / name for name in teachers}


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of a folder's config; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a folder of one file."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def save_checkpoint(folder: Path, out: Path, edit: Callable[[dict[str, Any]], Any] = lambda state: None) -> None:
    """A folder as a distributed checkpoint, by torch's and torchtitan's own code; ``edit`` gets torchtitan's names."""
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "rotary" not in name}
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    state = Qwen3StateDictAdapter(Qwen3ModelArgs(enable_weight_tying=tied), None).from_hf(tensors)
    edit(state)
    dcp.save(state, checkpoint_id=out, no_dist=True)
    shutil.copy(folder / "config.json", out / "config.json")


def write_large(folder: Path, vocab: int, dim: int) -> int:
    """A folder of one file of zeros, almost all of it embedding and head; returns the file's size. Takes no disk space."""
    from transformers import Qwen3ForCausalLM

    folder.mkdir()
    config = hf_config(vocab_size=vocab, hidden_size=dim, num_hidden_layers=1)
    (folder / "config.json").write_text(config.to_json_string())
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    header, end = {}, 0
    for name, param in model.named_parameters():
        begin, end = end, end + 2 * param.numel()
        header[name] = {"dtype": "BF16", "shape": list(param.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return 8 + len(text) + end
