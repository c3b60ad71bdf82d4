"""Gradient norm of each block, over all ranks, before clipping."""

import re
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from blockgrow_titan.diagnostics.statistics import finite
from blockgrow_titan.model.init import named_parameters

_PARTS = {"tok_embeddings": "embedding", "norm": "boundary_norm", "output": "head"}


def gradient_norms(model: nn.Module) -> dict[str, Any]:
    """L2 norms of the gradients that the parameters hold now; all ranks must call.

    Args:
        model: The student, however it is wrapped and sharded.

    Returns:
        ``{"blocks": [one for each block], "embedding", "boundary_norm", "head"}``, None for what has no gradient (frozen).
        The root of the sum of their squares is the norm of the whole gradient.
    """
    args: Any = model.model_args
    groups: dict[int | str, list[torch.Tensor]] = {}
    for fqn, param in named_parameters(model):
        if param.grad is not None:
            layer = re.match(r"layers\.(\d+)\.", fqn)
            part = int(layer[1]) // args.layers_per_block if layer else _PARTS[fqn.split(".")[0]]
            groups.setdefault(part, []).append(param.grad)
    norms: dict[int | str, float | None] = {part: _norm(grads) for part, grads in groups.items()}
    blocks = range(args.n_layers // args.layers_per_block)
    return {"blocks": [norms.get(k) for k in blocks]} | {name: norms.get(name) for name in _PARTS.values()}


def _norm(grads: list[torch.Tensor]) -> float | None:
    norm = torch.nn.utils.get_total_norm(grads)
    return finite((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
