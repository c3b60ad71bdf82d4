"""Initialisation as a function of (seed, FQN, shape) alone: invariant 1.

Qwen3's (Hugging Face's) scheme: every Linear and Embedding weight normal(0, 0.02), every RMSNorm weight one. Each
parameter has a CPU generator of its own, seeded from a digest of seed, FQN and shape, and every rank cuts its shard out
of the same full tensor. So world size, device, placement, phase and "joint or grown" cannot change it; DTensor's own
random init cannot promise that (on a CPU mesh it even gives every rank the same shard values).
"""

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")  # activation checkpointing, torch.compile


def clean_fqn(name: str) -> str:
    """A parameter's FQN without the names that activation checkpointing and torch.compile put in between."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a model under their clean FQNs, however it is wrapped."""
    for name, param in model.named_parameters():
        yield clean_fqn(name), param


def full_init(fqn: str, shape: torch.Size, seed: int, std: float = 0.02) -> torch.Tensor:
    """The whole initial value of one parameter, fp32 on CPU.

    A vector is an RMSNorm's weight (ones); a matrix is a Linear's or an Embedding's (normal).
    """
    if len(shape) == 1:
        return torch.ones(shape)
    key = f"{seed}/{fqn}/{'x'.join(map(str, shape))}".encode()
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


@torch.no_grad()
def write_full(param: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a full tensor into a plain or sharded parameter; each rank takes its own shard, nothing is sent."""
    if isinstance(param, DTensor):
        # src_data_rank=None: every rank holds the full value already
        sharded = distribute_tensor(value.to(param.device), param.device_mesh, param.placements, src_data_rank=None)
        param.to_local().copy_(sharded.to_local())
    else:
        param.copy_(value)


def initialize_parameters(
    model: nn.Module, seed: int, std: float = 0.02, wanted: Callable[[str], bool] = lambda fqn: True
) -> list[str]:
    """Initialise the parameters whose FQN is ``wanted``; returns their FQNs."""
    done = []
    for fqn, param in named_parameters(model):
        if wanted(fqn):
            write_full(param, full_init(fqn, param.shape, seed, std))
            done.append(fqn)
    return done
