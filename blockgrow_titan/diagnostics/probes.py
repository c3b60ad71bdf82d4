"""Walks a student's own parts over the fixed batch, the way its forward does, and looks at every block boundary.

    enter -> boundary 0 -> block 0 -> boundary 1 -> ... -> block K-1 -> boundary K -> leave -> head

- Residual stream: the hidden states at each boundary.
- Whole-block removal: the blocks after k run on what entered block k, so that k is bypassed with its norms; the boundary
  norm stays where the placement has it (paper, Table 4).
- Logit lens: each boundary goes through ``leave`` and the head as if it were the last one. So the boundary norm is applied
  where the placement has it before the head (pre), and nothing where it does not (post).

The parts are asked for nothing but what the forward asks of them, so any placement, activation checkpointing and
torch.compile work. Under FSDP2 the walk counts as a forward of the root, whose boundary norm is gathered around it, and
all ranks must take it together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from blockgrow_titan.diagnostics.batch import FixedBatch
from blockgrow_titan.diagnostics.statistics import angular_distance, token_rms
from blockgrow_titan.distill.head import LossTargets
from blockgrow_titan.distill.objective import Objective


@dataclass(frozen=True)
class Probed:
    """What the walk has seen, with K blocks and N tokens; float64, on the CPU."""

    rms: Tensor
    """[K + 1, N] residual RMS of each token at each boundary."""
    angles: Tensor
    """[K, N] angular distance of each token between a block's input and output."""
    lens_ce: Tensor
    """[K + 1] cross-entropy per prediction of each boundary through the head; the last one is the model's own."""
    removed_ce: Tensor
    """[K] the same of the whole model without each block."""
    types: Tensor
    """[N] int64, index into ``TOKEN_TYPES``."""


@torch.no_grad()
def probe(model: nn.Module, batch: FixedBatch, *, chunk_tokens: int, device: torch.device) -> Probed:
    """Walk a ``BlockStackModel`` over the batch; it should be in eval mode.

    Args:
        model: The student, however it is wrapped and sharded.
        batch: The fixed batch.
        chunk_tokens: ``distill.chunk_tokens``: tokens whose logits exist at one time.
        device: Where the student is.
    """
    objective = Objective(kd_weight=0.0, ce_weight=1.0, temperature=1.0, chunk_tokens=chunk_tokens)
    walked = []
    for micro_batch in batch.micro_batches:
        targets = LossTargets(micro_batch.labels.to(device), objective)
        inputs, valid = micro_batch.inputs.to(device), micro_batch.valid.to(device)
        walked.append([part.cpu() for part in _as_forward(model, _walk, inputs, valid, targets)])
    rms, angles, lens, removed = zip(*walked, strict=True)
    return Probed(
        rms=torch.cat(rms, dim=1),
        angles=torch.cat(angles, dim=1),
        lens_ce=torch.stack(lens).sum(0) / batch.predictions,
        removed_ce=torch.stack(removed).sum(0) / batch.predictions,
        types=torch.cat([micro_batch.types for micro_batch in batch.micro_batches]),
    )


def _walk(model: Any, inputs: Tensor, valid: Tensor, targets: LossTargets) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """RMS [K + 1, n] and angles [K, n] of the valid tokens; sums of cross-entropy through the lens and without a block."""
    layers, size = list(model.layers.values()), model.model_args.layers_per_block
    blocks = [layers[i : i + size] for i in range(0, len(layers), size)]

    def run(h: Tensor, block: list[nn.Module]) -> Tensor:
        for layer in block:
            h = layer(h, model.rope_cache, None)
        return h

    def cross_entropy(h: Tensor) -> Tensor:
        return model.output(model.leave(h, model.norm), targets).ce

    states = [model.enter(model.tok_embeddings(inputs), model.norm)]  # K + 1 times (B, S, D)
    for block in blocks:
        states.append(run(states[-1], block))
    lens = [cross_entropy(h) for h in states]
    removed = []
    for k in range(len(blocks) - 1):
        h = states[k]
        for block in blocks[k + 1 :]:
            h = run(h, block)
        removed.append(cross_entropy(h))
    removed.append(lens[-2])  # nothing comes after the last block

    tokens = [h[valid] for h in states]  # K + 1 times (n, D)
    rms = torch.stack([token_rms(h) for h in tokens])
    angles = torch.stack([angular_distance(a, b) for a, b in zip(tokens, tokens[1:], strict=False)])
    return rms, angles, torch.stack(lens).double(), torch.stack(removed).double()


def _as_forward(model: Any, function: Callable[..., Any], *args: Any) -> Any:
    """``function(model, *args)``, which FSDP2 takes for a forward of ``model`` and does what it does around one."""
    model._probe = MethodType(function, model)
    register_fsdp_forward_method(model, "_probe")
    try:
        return model._probe(*args)
    finally:
        del model._probe
