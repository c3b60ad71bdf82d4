"""torchtitan's CheckpointManager with what growth needs, and with checkpoints that are whole or absent.

A checkpoint is saved every ``checkpoint.interval`` steps and at the last step of every phase, where it has that phase's
depth. Resume therefore reads the step, looks up its phase, builds that model and loads it; the growth that may follow is
the same code as in an undisturbed run. The data loader has no state to save: its position is the step.

``checkpoint_files.py`` says in which order a save writes, and ``checkpoint_io.py`` how it is read back. Whatever stops a
save stops the job, on every rank and with one line; what was whole before stays whole.
"""

import gc
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    AsyncMode,
    CheckpointManager,
    ModelWrapper,
)
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from blockgrow_titan.checkpoint_files import (
    CHECKSUMS,
    METADATA,
    check_writable,
    damaged,
    empty,
    find_damage,
    saved_steps,
    stale_steps,
    steps_of,
    unmark,
    write_checksums,
)
from blockgrow_titan.checkpoint_io import (
    CheckpointReader,
    ChecksumWriter,
    failures_named,
    load_checkpoint,
)
from blockgrow_titan.growth.manifest import check_config, read_manifest, write_manifest
from blockgrow_titan.growth.schedule import GrowthSchedule
from blockgrow_titan.job_config import JobConfig

OTHER_STATES = tuple(f"{name}." for name in (OPTIMIZER, LR_SCHEDULER, TRAIN_STATE, DATALOADER))


@dataclass(frozen=True)
class ResumePoint:
    """Where a run stands on disk: the newest whole checkpoint's step (0: none) and whether that was the last."""

    step: int
    complete: bool


def find_resume_point(job_config: JobConfig) -> ResumePoint:
    """Look for the checkpoint that this job would resume, and check that it belongs to the same run. Changes nothing.

    Raises:
        ValueError: If its config differs, its manifest is missing, ``checkpoint.load_step`` is not there or not the newest,
            a file of it is missing, cut off or (manifest and metadata) altered; or, without one, if the weights that
            ``checkpoint.initial_load_*`` name are not there.
    """
    if not job_config.checkpoint.enable:
        return ResumePoint(0, False)
    folder = _checkpoint_folder(job_config)
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
        _check_initial_load(job_config)
        return ResumePoint(0, False)
    checkpoint = os.path.join(folder, f"step-{step}")
    complete = step >= job_config.training.steps
    if not complete and (problems := find_damage(checkpoint, sizes_only=True)):
        raise damaged(checkpoint, problems, resumes=True)
    check_config(read_manifest(checkpoint), job_config, checkpoint)
    return ResumePoint(step, complete)


def check_run_folders(job_config: JobConfig) -> None:
    """Refuse folders that a run could not write to, before it trains for an hour.

    Raises:
        ValueError: Naming the field, the folder and the cause.
    """
    check_writable(job_config.job.dump_folder, "job.dump_folder")
    if job_config.checkpoint.enable and not job_config.checkpoint.load_only:
        check_writable(_checkpoint_folder(job_config), "checkpoint.folder")


def _checkpoint_folder(job_config: JobConfig) -> str:
    return os.path.join(job_config.job.dump_folder, job_config.checkpoint.folder)


def _check_initial_load(job_config: JobConfig) -> None:
    """What a fresh start would load its weights from must be there; torchtitan looks once the model is built."""
    config = job_config.checkpoint
    path = config.initial_load_path
    if config.initial_load_in_hf_quantized and not config.initial_load_in_hf:
        raise ValueError(
            "checkpoint.initial_load_in_hf_quantized is true but initial_load_in_hf false: set both, or neither"
        )
    if config.initial_load_in_hf and not path:
        raise ValueError(
            "checkpoint.initial_load_in_hf is true without checkpoint.initial_load_path: name the folder of the student "
            "in Hugging Face's format there (a teacher is named by teacher.path)"
        )
    if not path:
        return
    if not os.path.isdir(path):
        raise ValueError(f"checkpoint.initial_load_path is {path}, which is no folder: give one with a checkpoint")
    if config.initial_load_in_hf:
        return
    if not os.path.isfile(os.path.join(path, METADATA)):
        raise ValueError(
            f"checkpoint.initial_load_path is {path}, which has no {METADATA}, so it is no whole checkpoint: give a "
            ".../checkpoint/step-N folder, or set checkpoint.initial_load_in_hf for one in Hugging Face's format"
        )
    if problems := find_damage(path, sizes_only=True):
        raise damaged(path, problems, resumes=False)


class GrowthCheckpointManager(CheckpointManager):
    """CheckpointManager for a model whose depth follows a schedule.

    Args:
        schedule: The run's phases; the last step of each is always saved.
        manifest: Written into every checkpoint.
        keep_boundary_checkpoints: ``checkpoint.keep_latest_k`` neither counts nor removes those of the phases' last steps.
        kwargs: As torchtitan's, without ``dataloader``.

    Attributes:
        saved_step: The step that was saved or loaded last, 0: none. Whole on disk once ``wait_for_saves`` has returned.
    """

    folder: str

    def __init__(
        self,
        *,
        schedule: GrowthSchedule,
        manifest: dict[str, Any],
        keep_boundary_checkpoints: bool = True,
        **kwargs: Any,
    ) -> None:
        self.saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")  # starts its thread when it is needed
        super().__init__(dataloader=None, **kwargs)
        del self.states[DATALOADER]
        self.boundaries = {phase.last_step for phase in schedule.phases}
        self.kept_steps = self.boundaries if keep_boundary_checkpoints else set()
        self.manifest = manifest
        self.saved_step = 0
        self.forced = False

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self.enable or self.load_only or curr_step == self.saved_step:
            return False
        return self.forced or curr_step in self.boundaries or super()._should_save(curr_step, last_step)

    def save(
        self, curr_step: int, last_step: bool = False, force: bool = False, before: Callable[[], None] = lambda: None
    ) -> bool:
        """Save if this step is due, or asked for, and not saved yet; returns whether it was. Collective.

        Args:
            curr_step: The step that was trained last.
            last_step: Whether it is the run's last.
            force: Save it whatever ``checkpoint.interval`` says; the same on every rank.
            before: Called first, if it is saved: what must be on disk before the checkpoint.

        Raises:
            CheckpointError: On every rank, if this save fails, or the asynchronous one before it has failed.
        """
        self.forced = force
        if not self._should_save(curr_step, last_step):
            return False
        before()
        self._async_wait()
        if self.async_mode != AsyncMode.DISABLED:
            gc.collect()  # the last save left cycles that are old by now, and torchtitan collects young objects only
        self._on_first_rank(curr_step, lambda: self._begin(self._create_checkpoint_id(curr_step)))
        with failures_named(_cannot_write(curr_step)):
            super().save(curr_step, last_step)
        self.saved_step = curr_step
        if last_step:
            self._purge_stale_checkpoints()  # torchtitan's returns before that
        return True

    def _begin(self, folder: str) -> None:
        empty(folder)
        write_manifest(folder, self.manifest)

    def _on_first_rank(self, step: int, action: Callable[[], None]) -> None:
        """Do something on rank 0; the others wait for it, and if it fails, all fail."""
        failure: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                action()
            except OSError as error:
                failure = [error]
        dist.broadcast_object_list(failure)
        if failure[0] is not None:
            with failures_named(_cannot_write(step)):
                raise failure[0]

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | AsyncSaveResponse | None:
        """As torchtitan's, with checksums of what was written; see there."""
        if to_hf:
            super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
            step = int(checkpoint_id.rpartition("-")[2])
            self._on_first_rank(step, lambda: write_checksums(checkpoint_id, {}))
            return None
        writer = ChecksumWriter(checkpoint_id)
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
            if enable_garbage_collection:
                GarbageCollection.collect("GC collection invoked by checkpointer.")
            return None
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            return dcp.async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        # As dcp.async_save, which makes a thread for each save: glibc deals its arenas, 8 a core, to such threads in turn,
        # and what a save has freed would stay in every one of them.
        state = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
        return self.saver.submit(dcp.save, writer.stage(state), storage_writer=writer, process_group=self.pg)

    def _async_wait(self) -> None:
        """Wait for the asynchronous save in flight. Raises ``CheckpointError`` if it has failed."""
        with failures_named(_cannot_write(self.saved_step)):
            super()._async_wait()

    def _purge_stale_checkpoints(self) -> None:
        """Remove what ``checkpoint.keep_latest_k`` no longer keeps, and what crashes have left half-written."""
        if dist.get_rank() != 0:
            return
        for step in stale_steps(steps_of(self.folder), self.keep_latest_k, self.kept_steps):
            folder = self._create_checkpoint_id(step)
            try:
                unmark(folder)
            except OSError as error:
                logger.warning(f"{folder} cannot be removed: {error.strerror}")
                continue
            if self.purge_thread is not None:
                self.purge_queue.put(folder)
            else:
                shutil.rmtree(folder, ignore_errors=True)

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Load the checkpoint of a step, or what ``checkpoint.initial_load_*`` name; returns whether anything was loaded.

        Collective. Every file is verified first, each by one of the ranks.

        Args:
            step: -1: a fresh start, whatever a crash has left in the checkpoint folder.

        Raises:
            ValueError: On every rank, if a file is missing, cut off or altered, or the checkpoint does not fit the model.
        """
        if not self.enable:
            return False
        if step != -1:
            self._verify(self._create_checkpoint_id(step), resumes=True)
            self.saved_step = step
            return super().load(step)
        if self.initial_load_path and not self.initial_load_in_hf:
            self._verify(self.initial_load_path, resumes=False)
        # torchtitan takes any folder, even one with half a checkpoint, for a run to go on with, and loads nothing
        folder, self.folder = self.folder, ""
        try:
            return super().load()
        finally:
            self.folder = folder

    def _verify(self, folder: str, resumes: bool) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if os.path.isdir(folder):
            problems = find_damage(folder, part=rank, parts=ranks)
        else:
            problems = [f"student rank {rank} does not see it (all of them must, on a file system that they share)"]
        of_ranks: list[Any] = [None] * ranks
        dist.all_gather_object(of_ranks, problems)
        if found := list(dict.fromkeys(problem for problems in of_ranks for problem in problems)):
            raise damaged(folder, found, resumes)
        if rank == 0 and not os.path.isfile(os.path.join(folder, CHECKSUMS)):
            logger.warning(f"{folder} has no {CHECKSUMS}: its files are loaded without being verified")

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load, after checking that model and checkpoint have the same parameters.

        Raises:
            ValueError: If either has a parameter that the other lacks (torch would ignore the surplus silently).
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        self._check_parameters(checkpoint_id)
        load_checkpoint(state_dict, checkpoint_id)
        if MODEL in self.states:  # as torchtitan, whose state dict has the model's flattened
            self.states[MODEL].load_state_dict(state_dict)

    def _check_parameters(self, checkpoint_id: str) -> None:
        saved = {
            key
            for key in CheckpointReader(checkpoint_id).read_metadata().state_dict_metadata
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

    def close(self) -> None:
        """End this manager's threads. Safe to call again."""
        super().close()
        self.saver.shutdown(wait=False)

    def wait_for_saves(self) -> None:
        """Block until no save reads the model any more, and the last one is on disk.

        Raises:
            CheckpointError: On every rank, if it has failed.
        """
        if self.enable:
            self._async_wait()
            self.maybe_wait_for_staging()

    def rewire(
        self, model_parts: list[nn.Module], optimizers: OptimizersContainer, lr_schedulers: LRSchedulersContainer
    ) -> None:
        """Save these objects from now on: torchtitan's wrapper caches the state dict of the model it was given."""
        self.states.update({MODEL: ModelWrapper(model_parts), OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers})


def _cannot_write(step: int) -> str:
    return f"The checkpoint of step {step} could not be written (those before it are whole)"


def _by_layer(keys: list[str]) -> list[str]:
    """Shorten a list of FQNs: one entry for each layer."""
    return list(dict.fromkeys(re.sub(r"^(layers\.\d+)\..*", r"\1", key) for key in keys))
