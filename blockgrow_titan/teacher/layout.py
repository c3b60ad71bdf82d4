"""What a Qwen3 is: dimensions from its config, tensors by Hugging Face's and torchtitan's names, what is wrong with others."""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

CONFIG = "config.json"
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = "a Hugging Face folder of a Qwen3, or a checkpoint that tools/convert_hf.py from-hf made of one"

_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}

# No model is larger; beyond, a shape would overflow, or the layers take hours to write down.
_MOST = {"num_hidden_layers": 10_000, "max_position_embeddings": 2**30}
_MOST_OTHER = 2**20

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_MAX_LISTED = 12


@dataclass(frozen=True)
class Header:
    """What a file says of a tensor; a dtype that no teacher may have is kept by its name."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


def model_args(config: dict[str, Any], subject: str) -> Qwen3ModelArgs:
    """torchtitan's arguments of a Hugging Face Qwen3 config, old layout or new.

    Args:
        config: The content of ``config.json``.
        subject: What errors begin with: whose config it is.

    Raises:
        ValueError: If the config is not a Qwen3's or lacks a field.
        NotImplementedError: If it asks for what torchtitan's Qwen3 does not have, or is quantised.
    """
    if config.get("model_type") != "qwen3":
        raise ValueError(
            f'{subject} is not a dense Qwen3: {CONFIG} has model_type "{config.get("model_type")}", it must be "qwen3": '
            f"give {KINDS}"
        )
    if config.get("quantization_config"):
        raise NotImplementedError(
            f"{subject} is quantised ({CONFIG} has a quantization_config): take the folder with weights in bf16, fp16 or "
            "fp32"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    tied = config.get("tie_word_embeddings") or False
    if not isinstance(rope, dict) or not isinstance(tied, bool):
        raise ValueError(
            f"{subject} has rope parameters {rope!r} and tie_word_embeddings = {tied!r} in {CONFIG}; they must be an object "
            "and true or false"
        )
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    for name, value, supported in (
        ("rope_type", rope_type, "default"),
        ("use_sliding_window", bool(config.get("use_sliding_window")), False),
        ("attention_bias", bool(config.get("attention_bias")), False),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
    ):
        if value != supported:
            raise NotImplementedError(
                f"{subject} has {name} = {value} in {CONFIG}; only {supported} is supported: take another model"
            )
    theta = rope.get("rope_theta", config.get("rope_theta"))
    needed: dict[str, Any] = {field: config.get(field) for field in (*_SIZES.values(), "rms_norm_eps")}
    needed["rope_theta"] = theta
    _check_numbers(needed, subject)
    return Qwen3ModelArgs(
        **{ours: needed[theirs] for ours, theirs in _SIZES.items()},
        norm_eps=float(needed["rms_norm_eps"]),
        rope_theta=float(needed["rope_theta"]),
        enable_weight_tying=tied,
    )


def _check_numbers(numbers: dict[str, Any], subject: str) -> None:
    """Raise ``ValueError`` unless the numbers of a config are those of a model."""
    for field, value in numbers.items():
        whole = field in _SIZES.values()
        kinds, most = (int, _MOST.get(field, _MOST_OTHER)) if whole else (int | float, sys.float_info.max)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= most:
            wanted = f"positive whole number of {most:,} at most" if whole else "positive number"
            raise ValueError(
                f"{subject} has {field} = {value!r} in {CONFIG}; it must be a {wanted}, as in a published Qwen3"
            )
    heads, kv_heads, width = (numbers[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads % kv_heads or width % 2:
        raise ValueError(
            f"{subject} has num_attention_heads = {heads}, num_key_value_heads = {kv_heads} and head_dim = {width} in "
            f"{CONFIG}; the second must divide the first, and the third must be even"
        )


def tensor_layout(args: Qwen3ModelArgs) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Hugging Face name -> (torchtitan's FQN, shape) of every tensor of a model, its head included even when tied."""
    untied = replace(args, enable_weight_tying=False)
    with torch.device("meta"):
        model = Qwen3Model(untied)
    fqns = {param: fqn for fqn, param in model.named_parameters()}
    named = Qwen3StateDictAdapter(untied, None).to_hf({fqn: param for param, fqn in fqns.items()})
    assert len(named) == len(fqns), "torchtitan's name map does not cover its own model"
    return {name: (fqns[param], tuple(param.shape)) for name, param in named.items()}


def hf_names(fqns: Iterable[str], args: Qwen3ModelArgs) -> dict[str, str]:
    """Hugging Face name -> torchtitan's FQN of these tensors, of layers beyond the model's too; others keep their name."""
    known = {fqn: name for name, (fqn, _) in tensor_layout(args).items()}

    def name_of(fqn: str) -> str:
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", fqn)
        first = known.get(f"layers.0.{layer[2]}") if layer else None
        return first.replace(".0.", f".{layer[1]}.", 1) if layer and first else known.get(fqn, fqn)

    return {name_of(fqn): fqn for fqn in fqns}


def tensor_problems(headers: dict[str, Header], args: Qwen3ModelArgs) -> str:
    """All that keeps these tensors from being the model's, in one line; empty if nothing does.

    A tied model may have a head beside its embedding, and old files may have RoPE's frequencies, which are computed here.

    Args:
        headers: Hugging Face name -> header of every tensor found.
        args: The model's dimensions.
    """
    shapes = {name: shape for name, (_, shape) in tensor_layout(args).items()}
    found = {name: header for name, header in headers.items() if name in shapes}
    absent = [name for name in shapes if name not in found and not (name == HEAD and args.enable_weight_tying)]
    unused = [name for name in headers if name not in shapes and not name.endswith("rotary_emb.inv_freq")]
    whole = {match[2] for name in shapes if (match := _LAYER.fullmatch(name))}
    notes: dict[str, dict[str, str]] = {
        "missing": dict.fromkeys(absent, ""),
        "not used by the model of config.json": dict.fromkeys(unused, ""),
        "of another shape than config.json says": {
            name: f" {list(header.shape)} instead of {list(shapes[name])}"
            for name, header in found.items()
            if header.shape != shapes[name]
        },
        "of a wrong dtype": {name: f" {h.dtype}" for name, h in found.items() if h.dtype not in DTYPES},
    }
    return "; ".join(f"{what}: {_grouped(names, whole)}" for what, names in notes.items() if names)


def _grouped(notes: dict[str, str], whole: set[str]) -> str:
    """A short list of tensor names and what is to be said of each; the layers that share an entry are one entry.

    Args:
        notes: Name -> text to follow it, perhaps empty.
        whole: The names inside a layer that make up a whole one.
    """
    layers: dict[tuple[str, str], list[int]] = {}  # (name inside the layer, note) -> layers
    entries: dict[str, None] = {}
    for name, note in notes.items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault((match[2], note), []).append(int(match[1]))
        else:
            entries[f"{name}{note}"] = None
    together: dict[tuple[str, str], list[str]] = {}  # (layers, note) -> names inside them
    for (inside, note), numbers in layers.items():
        together.setdefault((_runs(numbers), note), []).append(inside)
    for (numbers_text, note), insides in together.items():
        for inside in ["*"] if whole <= set(insides) else insides:
            entries[f"model.layers.{numbers_text}.{inside}{note}"] = None
    return shortened(list(entries))


def _runs(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "{0-2,5}"; a single number without braces."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


def shortened(entries: list[str]) -> str:
    """A list in words, cut after its first entries."""
    rest = len(entries) - _MAX_LISTED
    return ", ".join(entries[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
