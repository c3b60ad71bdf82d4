"""Carry a model, its optimizer and its learning rate into the next phase, in place of the ranks that hold them.

The deeper model is built on meta and parallelised like the first one; then every rank hands it its own shards of the
carried parameters (nothing is sent, nothing is copied), and only the new block is allocated and initialised, by
invariant 1. So a growth takes no more memory than the new block. A layer appended to a sharded model would silently stay
a plain parameter, and ``requires_grad`` cannot change under FSDP2: hence rebuild.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer

from blockgrow_titan.model.init import clean_fqn, initialize_parameters, named_parameters


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def carry_parameters(old: nn.Module, new: nn.Module, seed: int, std: float) -> tuple[list[str], list[str]]:
    """Fill ``new`` from ``old``, and what ``old`` lacks from its initialisation.

    The carried parameters are the old ones' memory under new objects, without gradients: ``old`` must not be trained any
    more. Only a rank's shard that is shorter than the other ranks' is copied, by FSDP, which pads it.

    Args:
        old: The phase's model so far.
        new: The next phase's model, sharded on the same mesh, its parameters on the meta device.
        seed: Seed of the initialisation.
        std: Standard deviation of the initialisation.

    Returns:
        FQNs of the carried and of the initialised parameters.

    Raises:
        ValueError: If ``new`` lacks a parameter of ``old`` or holds it in another shape.
    """
    source = dict(named_parameters(old))
    target = dict(named_parameters(new))
    if lost := sorted(set(source) - set(target)):
        raise ValueError(f"growth would lose {', '.join(lost)}: a phase may only add parameters")
    for fqn, param in source.items():
        if _local(param).shape != _local(target[fqn]).shape:
            raise ValueError(
                f"growth cannot carry {fqn}: its local shard is {tuple(_local(param).shape)} before and "
                f"{tuple(_local(target[fqn]).shape)} after"
            )
    for name, param in list(new.named_parameters()):
        if (fqn := clean_fqn(name)) in source:
            owner, _, leaf = name.rpartition(".")
            carried = nn.Parameter(source[fqn].detach(), requires_grad=param.requires_grad)
            new.get_submodule(owner).register_parameter(leaf, carried)
    device = _local(next(iter(source.values()))).device
    # What is not on meta any more stays; FSDP, which looks at every parameter here, takes note of the carried ones.
    new._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    added = initialize_parameters(new, seed, std, wanted=lambda fqn: fqn not in source)
    return list(source), added


def carry_optimizer_state(
    old_model: nn.Module, old: OptimizersContainer, new_model: nn.Module, new: OptimizersContainer
) -> list[str]:
    """Hand the state of every parameter that both optimizers train from ``old`` to ``new``; returns their FQNs.

    The tensors move, they are not copied: ``old`` is dropped afterwards.
    """
    (old_optimizer,), (new_optimizer,) = old.optimizers, new.optimizers
    trained = {id(param) for group in new_optimizer.param_groups for param in group["params"]}
    source = dict(named_parameters(old_model))
    carried = []
    for fqn, param in named_parameters(new_model):
        if id(param) in trained and fqn in source and source[fqn] in old_optimizer.state:
            new_optimizer.state[param] = old_optimizer.state[source[fqn]]
            carried.append(fqn)
    return carried


def set_schedule_position(lr_schedulers: LRSchedulersContainer, steps_done: int) -> None:
    """Put learning-rate schedules where they would be after ``steps_done`` optimizer steps."""
    for scheduler in lr_schedulers.schedulers:
        scheduler.last_epoch = steps_done
        for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_lr(), strict=True):
            group["lr"] = lr
        scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
