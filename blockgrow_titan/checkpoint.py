"""torchtitan's CheckpointManager with what growth needs: boundary saves, the manifest, and strict depth on load.

A checkpoint is saved every ``checkpoint.interval`` steps and at the last step of every phase, where it has that phase's
depth. Resume therefore reads the step, looks up its phase, builds that model and loads it; the growth that may follow is
the same code as in an undisturbed run. The data loader has no state to save: its position is the step.
"""

import os
import re
import shutil
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.checkpoint import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    CheckpointManager,
    ModelWrapper,
)
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer

from blockgrow_titan.growth.manifest import check_config, read_manifest, write_manifest
from blockgrow_titan.growth.schedule import GrowthSchedule
from blockgrow_titan.job_config import JobConfig

OTHER_STATES = tuple(f"{name}." for name in (OPTIMIZER, LR_SCHEDULER, TRAIN_STATE, DATALOADER))


@dataclass(frozen=True)
class ResumePoint:
    """Where a run stands on disk: the newest complete checkpoint's step (0: none) and whether that was the last."""

    step: int
    complete: bool


def saved_steps(folder: str) -> list[int]:
    """Steps of the complete checkpoints in a folder, rising. Their metadata is written last."""
    steps = []
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        match = re.fullmatch(r"step-(\d+)", name)
        files = (".metadata", "model.safetensors.index.json")
        if match and any(os.path.isfile(os.path.join(folder, name, file)) for file in files):
            steps.append(int(match.group(1)))
    return sorted(steps)


def find_resume_point(job_config: JobConfig) -> ResumePoint:
    """Look for the checkpoint that this job would resume, and check that it belongs to the same run.

    Raises:
        ValueError: If its config differs, its manifest is missing, ``checkpoint.load_step`` is not there or not the newest,
            or ``checkpoint.initial_load_path`` would be ignored.
    """
    if not job_config.checkpoint.enable:
        return ResumePoint(0, False)
    folder = os.path.join(job_config.job.dump_folder, job_config.checkpoint.folder)
    steps = saved_steps(folder)
    step = job_config.checkpoint.load_step
    if step == -1:
        step = steps[-1] if steps else 0
    elif step not in steps:
        raise ValueError(
            f"checkpoint.load_step is {step} but {folder} has {steps or 'no checkpoint'}: give one of these"
        )
    elif later := [f"step-{saved}" for saved in steps if saved > step]:
        raise ValueError(
            f"checkpoint.load_step is {step}, but {folder} also has {', '.join(later)}, which a run from there would write "
            "again: move them away first"
        )
    if step == 0:
        if job_config.checkpoint.initial_load_path and os.path.isdir(folder):
            _remove_half_written(folder)
        return ResumePoint(0, False)
    checkpoint = os.path.join(folder, f"step-{step}")
    check_config(read_manifest(checkpoint), job_config, checkpoint)
    return ResumePoint(step, complete=step >= job_config.training.steps)


def _remove_half_written(folder: str) -> None:
    """Remove the checkpoints of a folder that has no complete one, and the folder if nothing else is in it.

    torchtitan ignores ``checkpoint.initial_load_path`` as soon as the folder exists: a run killed in its first save would
    start again from random weights.
    """
    for name in os.listdir(folder):
        if re.fullmatch(r"step-\d+", name):
            shutil.rmtree(os.path.join(folder, name))
    if left := os.listdir(folder):
        raise ValueError(
            f"checkpoint.initial_load_path is set, but {folder} exists without a checkpoint and holds {left[0]}: give "
            "checkpoint.folder a name of its own"
        )
    os.rmdir(folder)


class GrowthCheckpointManager(CheckpointManager):
    """CheckpointManager for a model whose depth follows a schedule.

    Args:
        schedule: The run's phases; the last step of each is always saved.
        manifest: Written into every checkpoint.
        kwargs: As torchtitan's, without ``dataloader``.
    """

    def __init__(self, *, schedule: GrowthSchedule, manifest: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(dataloader=None, **kwargs)
        del self.states[DATALOADER]
        self.boundaries = {phase.last_step for phase in schedule.phases}
        self.manifest = manifest

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        boundary = self.enable and not self.load_only and curr_step in self.boundaries
        return boundary or super()._should_save(curr_step, last_step)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if this step is due; returns whether it was."""
        if not self._should_save(curr_step, last_step):
            return False
        if dist.get_rank() == 0:
            write_manifest(self._create_checkpoint_id(curr_step), self.manifest)
        super().save(curr_step, last_step)
        if last_step:
            self._purge_stale_checkpoints()  # torchtitan's returns before that
        return True

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load, after checking that model and checkpoint have the same parameters.

        Raises:
            ValueError: If either has a parameter that the other lacks (torch would ignore the surplus silently).
        """
        if not from_hf:
            self._check_parameters(checkpoint_id)
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    def _check_parameters(self, checkpoint_id: str) -> None:
        saved = {
            key
            for key in FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
            if not key.startswith(OTHER_STATES)
        }
        wanted = set(self.states[MODEL].state_dict())
        surplus, missing = sorted(saved - wanted), sorted(wanted - saved)
        if surplus or missing:
            problems = [
                f"{what} {', '.join(_by_layer(keys))}"
                for what, keys in (("holds, beyond the model,", surplus), ("lacks", missing))
                if keys
            ]
            raise ValueError(
                f"{checkpoint_id} does not fit the model of this phase: it {' and '.join(problems)}. Set "
                "growth.active_blocks and block_stack as they were when it was written"
            )

    def wait_for_saves(self) -> None:
        """Block until no save reads the model any more."""
        if self.enable:
            self._async_wait()
            self.maybe_wait_for_staging()

    def rewire(
        self, model_parts: list[nn.Module], optimizers: OptimizersContainer, lr_schedulers: LRSchedulersContainer
    ) -> None:
        """Save these objects from now on: torchtitan's wrapper caches the state dict of the model it was given."""
        self.states.update({MODEL: ModelWrapper(model_parts), OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers})


def _by_layer(keys: list[str]) -> list[str]:
    """Shorten a list of FQNs: one entry for each layer."""
    return list(dict.fromkeys(re.sub(r"^(layers\.\d+)\..*", r"\1", key) for key in keys))
