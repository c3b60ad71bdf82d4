"""Entry point: ``torchrun -m blockgrow_titan.train --job.config_file ...`` (see ``run_train.sh``).

Every rank parses and checks the config, joins its world, and then trains (student) or serves hidden states (teacher).
A mistake in the config ends the job here, before anything is built: one line on the console, exit status 2.
"""

import os
import shutil
import socket
import sys
import traceback
import warnings
from typing import NoReturn

from blockgrow_titan.infra import device  # noqa: F401  (before torchtitan: see there)

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from torch.distributed.elastic.multiprocessing.errors import record  # isort: skip
from torchtitan.tools.logging import init_logger, logger  # isort: skip

from blockgrow_titan import stopping
from blockgrow_titan.checkpoint import ResumePoint, check_run_folders, find_resume_point
from blockgrow_titan.checkpoint_files import stale_steps, steps_of
from blockgrow_titan.checks import check_config, check_ranks, is_dry_run
from blockgrow_titan.dry_run import dry_run
from blockgrow_titan.events import METRICS_FILE, complete_events
from blockgrow_titan.growth.manifest import read_manifest
from blockgrow_titan.job_config import ConfigError, JobConfig
from blockgrow_titan.metrics import closing_table, write_summary
from blockgrow_titan.parse import parse_config
from blockgrow_titan.teacher.heartbeats import RankLost, one_line
from blockgrow_titan.teacher.worlds import STUDENT, World, WorldLayout, assign_device, join_world, rendezvous

CONFIG_ERROR_STATUS = 2


def refuse(error: ConfigError) -> NoReturn:
    """End this rank over a mistake in the config: rank 0 prints it, any rank leaves it for the launcher if there is one."""
    line = f"Config error: {' '.join(str(error).split())}"
    if os.environ.get("RANK", "0") == "0" or stopping.LAUNCH_FOLDER not in os.environ:
        print(line, file=sys.stderr, flush=True)
    if not stopping.has_note("config_error"):  # for the launcher's last line; a mistake may show on one node only
        stopping.note("config_error", line)
    sys.exit(CONFIG_ERROR_STATUS)


def _resolve_global_batch(job_config: JobConfig, layout: WorldLayout) -> None:
    """torchtitan's -1: one micro-batch a rank. It then depends on the ranks, and the manifest pins it."""
    if job_config.training.global_batch_size == -1:
        job_config.training.global_batch_size = job_config.training.local_batch_size * layout.num_students


def _agree_on_resume_point(job_config: JobConfig, store: dist.Store, rank: int) -> ResumePoint:
    """Global rank 0 looks at the dump folder and tells the others, so that all do the same.

    Raises:
        ValueError: On every rank, if the folder's run and this config do not match, or the folder cannot be written.
    """
    key = "resume_point"
    if rank == 0:
        try:
            point = find_resume_point(job_config)
            if not point.complete:
                check_run_folders(job_config)
            store.set(key, f"{point.step} {int(point.complete)}")
            return point
        except ValueError as error:
            store.set(key, f"error {error}")
            raise
    word, text = store.get(key).decode().split(" ", 1)
    if word == "error":
        raise ValueError(text)
    return ResumePoint(int(word), bool(int(text)))


def _show_complete(job_config: JobConfig, step: int) -> None:
    """Show the table of a complete run, after mending what a crash behind its last save has left undone."""
    folder = job_config.job.dump_folder
    checkpoints = os.path.join(folder, job_config.checkpoint.folder)
    checkpoint = os.path.join(checkpoints, f"step-{step}")
    complete_events(os.path.join(folder, METRICS_FILE), step)
    for stale in stale_steps(steps_of(checkpoints), keep=0):
        shutil.rmtree(os.path.join(checkpoints, f"step-{stale}"), ignore_errors=True)
    for line in closing_table(write_summary(folder, read_manifest(checkpoint))):
        logger.info(line)
    logger.info(
        f"This run is complete: {os.path.abspath(folder)} holds all {step} steps. To start anew, give another folder with "
        "--job.dump_folder, or delete this one"
    )


def run(job_config: JobConfig, world: World, resume_step: int) -> None:
    """Train or serve, by role. A student's failure is told to its teachers, a teacher's to its students."""
    from torchtitan.tools.utils import device_type

    torch_device = torch.device(device_type, int(os.environ.get("LOCAL_RANK", 0)) if device_type != "cpu" else 0)
    if world.role != STUDENT:
        from blockgrow_titan.teacher.server import serve

        if device_type != "cpu":
            torch.get_device_module(device_type).set_device(torch_device)
        serve(job_config, world, torch_device)
        return

    from blockgrow_titan.trainer import GrowthTrainer

    trainer: GrowthTrainer | None = None
    try:
        trainer = GrowthTrainer(job_config, world, resume_step)
        trainer.train()
    except Exception as error:
        text = world.explain(error)
        world.report_failure(text)
        if trainer is not None and trainer.teacher is not None:
            trainer.teacher.close(error=text)
        if text != one_line(error):  # which rank is gone: for the launcher's last line
            raise RankLost(text) from error
        raise
    finally:
        if trainer is not None:
            trainer.close()


def launch(job_config: JobConfig, store: dist.Store, rank: int, world_size: int) -> None:
    """Run this rank's share of a job.

    Args:
        job_config: The merged config, not checked yet.
        store: The job's store, shared by all ranks.
        rank: Global rank.
        world_size: Ranks of the whole job, both worlds together.

    Raises:
        ConfigError: If the config cannot run, before anything was built.
    """
    try:
        check_config(job_config)
        layout = WorldLayout.plan(
            world_size, job_config.teacher.ranks, bool(job_config.teacher.path), job_config.teacher.shard_degree
        )
        role, role_rank = layout.role_of(rank), layout.role_rank(rank)
        stopping.note(f"rank-{rank}", f"{role} rank {role_rank} (global rank {rank}, host {socket.gethostname()})")
        _resolve_global_batch(job_config, layout)
        check_ranks(job_config, layout.num_students)
        if is_dry_run(job_config):
            dry_run(job_config, layout, rank)
            return
        num_devices = torch.accelerator.device_count() if device.HAS_ACCELERATOR else 0
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        device_index = assign_device(layout, rank, local_rank, local_world_size, num_devices)
        point = _agree_on_resume_point(job_config, store, rank)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(str(error)) from error
    if point.complete:
        if rank == 0:
            _show_complete(job_config, point.step)
        return
    world = join_world(job_config, layout, store, rank, device_index, local_stop=stopping.stop_requested)
    try:
        run(job_config, world, point.step)
    finally:
        world.close()
    dist.destroy_process_group()
    logger.info("Process group destroyed")


@record
def run_rank() -> None:
    """This rank, from its arguments and environment to its end."""
    stopping.watch()
    init_logger()
    for message in ("DTensor.*may not have complete support on cpu", "'set_vital' is deprecated"):
        warnings.filterwarnings("ignore", message=message)  # true, and of no consequence here
    try:
        try:
            job_config = parse_config(sys.argv[1:])
            store, rank, world_size = rendezvous(job_config.comm.mode)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        launch(job_config, store, rank, world_size)
    except ConfigError as error:
        refuse(error)


def main() -> None:
    try:
        run_rank()
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # no thread that waits for a peer, and no last collection, holds up the end of the job


if __name__ == "__main__":
    main()
