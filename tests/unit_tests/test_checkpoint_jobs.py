"""Whole jobs, and a trainer's checkpointer, when checkpoints go wrong: nothing half-written or altered is ever loaded."""

import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchtitan.components.checkpoint import CheckpointManager

from blockgrow_titan.checkpoint import ResumePoint, find_resume_point
from blockgrow_titan.checkpoint_files import METADATA, find_damage, saved_steps, steps_of
from blockgrow_titan.checkpoint_io import ChecksumWriter
from blockgrow_titan.parse import parse_config
from tests.unit_tests.jobs import arguments, full_parameters, open_trainer, run_job, without_teacher
from tests.unit_tests.rank_pool import RankPool

RUN = without_teacher(validation__enable=False, checkpoint__interval=1, training__steps=3, growth__phase_steps=[1, 2])


def failed(rank: int, world_size: int, store: dist.Store, args: list[str]) -> str:
    """A pool function: a job that fails; this rank's error, in its type and one line."""
    try:
        run_job(rank, world_size, store, args)
    except BaseException as error:
        assert "\n" not in str(error)
        return f"{type(error).__name__}: {error}"
    return "completed"


@pytest.fixture(scope="module")
def run(workspace: Path, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of two students: steps 1 (the end of phase 0), 2 and 3."""
    folder = tmp_path_factory.mktemp("run")
    rank_pool.run(run_job, 2, args=arguments(workspace, folder, **RUN))
    return folder


def as_of(run: Path, step: int, folder: Path) -> Path:
    shutil.copytree(run, folder)
    for later in range(step + 1, 4):
        shutil.rmtree(folder / "checkpoint" / f"step-{later}")
    return folder


def test_every_checkpoint_of_a_run_is_verified(run: Path) -> None:
    for step in (1, 2, 3):
        folder = run / "checkpoint" / f"step-{step}"
        names = {path.name for path in folder.iterdir()}
        assert names == {"__0_0.distcp", "__1_0.distcp", METADATA, "manifest.json", "checksums.json"}
        assert find_damage(str(folder)) == []


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", METADATA, "manifest.json", "checksums.json"])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_damaged_file_is_named_before_anything_is_built(
    run: Path, workspace: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = as_of(run, 2, tmp_path / "run")
    path = folder / "checkpoint" / "step-2" / name
    damage(path)
    args = arguments(workspace, folder, **RUN)
    if damage is Path.unlink and name in (METADATA, "checksums.json"):  # no longer whole; an older version's
        assert find_resume_point(parse_config(args)).step == (1 if name == METADATA else 2)
        return
    if damage is flip and name.endswith(".distcp"):  # the ranks read those files, see below
        assert find_resume_point(parse_config(args)).step == 2
        return
    with pytest.raises(ValueError, match=f"step-2 is damaged: {name} (has|is) .*Move .* the run goes on from step-1"):
        find_resume_point(parse_config(args))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_flipped_byte_ends_the_job_on_every_rank(
    run: Path, workspace: Path, rank_pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    folder = as_of(run, 2, tmp_path / "run")
    flip(folder / "checkpoint" / "step-2" / "__1_0.distcp")
    answers = rank_pool.run(failed, ranks, args=arguments(workspace, folder, **RUN))
    assert len(set(answers)) == 1
    assert "step-2 is damaged: __1_0.distcp is altered: its SHA-256 is not the one in checksums.json" in answers[0]
    shutil.rmtree(folder / "checkpoint" / "step-2")
    if ranks == 2:
        rank_pool.run(run_job, ranks, args=arguments(workspace, folder, **RUN))
        assert steps_of(str(folder / "checkpoint")) == {1: True, 2: True, 3: True}


def weights(rank: int, world_size: int, store: dist.Store, args: list[str]) -> Any:
    """A pool function: the parameters that a job would start with."""
    trainer = open_trainer(rank, world_size, store, args)
    trainer.checkpointer.load(step=-1)
    trainer.close()
    return full_parameters(trainer.model_parts[0])


def test_a_crash_in_the_first_save_is_followed_by_the_same_start(
    run: Path, workspace: Path, rank_pool: RankPool, tmp_path: Path
) -> None:
    """From weights of another run, and from the seed; whatever the crash has left in the folder."""
    for name, initial in (("given", str(run / "checkpoint" / "step-1")), ("seed", "")):
        args = arguments(workspace, tmp_path / name, **RUN, checkpoint__initial_load_path=initial)
        (start,) = rank_pool.run(weights, 1, args=args)
        half = tmp_path / name / "checkpoint" / "step-1"
        half.mkdir(parents=True)
        shutil.copy(run / "checkpoint" / "step-3" / "__0_0.distcp", half)
        assert find_resume_point(parse_config(args)) == ResumePoint(0, complete=False)
        (again,) = rank_pool.run(weights, 1, args=args)
        assert start.keys() == again.keys() and all((start[fqn] == again[fqn]).all() for fqn in start)
        if name == "given":
            given = start
    assert any((given[fqn] != start[fqn]).any() for fqn in start)
    damaged = tmp_path / "damaged"
    shutil.copytree(run / "checkpoint" / "step-1", damaged)
    flip(damaged / "__0_0.distcp")
    args = arguments(workspace, tmp_path / "other", **RUN, checkpoint__initial_load_path=str(damaged))
    answers = rank_pool.run(failed, 2, args=args)
    assert f"ValueError: {damaged} is damaged: __0_0.distcp is altered" in answers[0] == answers[1]
    assert answers[0].endswith("Copy it again, or use another checkpoint")


def short_of_room(rank: int, world_size: int, store: dist.Store, args: list[str], fails: int, save: int) -> str:
    """A pool function: a job whose rank ``fails`` can write no large file from its n-th save on."""
    original, saves = ChecksumWriter.write_data, []

    def write_data(self: ChecksumWriter, plan: Any, planner: Any) -> Any:
        saves.append(plan)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == fails and len(saves) >= save:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            return original(self, plan, planner)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    ChecksumWriter.write_data = write_data  # type: ignore[method-assign]
    try:
        return failed(rank, world_size, store, args)
    finally:
        ChecksumWriter.write_data = original  # type: ignore[method-assign]


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_save_that_fails_ends_the_job_with_the_reason(
    workspace: Path, rank_pool: RankPool, tmp_path: Path, async_mode: str
) -> None:
    """Asynchronous or not; at the save, the growth, or the end that follows. What was saved before stays."""
    args = arguments(workspace, tmp_path, **RUN, checkpoint__async_mode=async_mode)
    folder = tmp_path / "checkpoint"
    for fails, save, left in ((1, 1, []), (0, 2, [1]), (1, 1, [1])):
        answers = rank_pool.run(short_of_room, 2, args=args, fails=fails, save=save)
        step = left[-1] + 1 if left else 1
        file = folder / f"step-{step}" / f"__{fails}_0.distcp"
        expected = (
            f"CheckpointError: The checkpoint of step {step} could not be written (those before it are whole): "
            f"{file}: File too large (student rank {fails})"
        )
        assert answers == [expected, expected]
        assert saved_steps(str(folder)) == left
        assert all(find_damage(str(folder / f"step-{step}")) == [] for step in left)
    rank_pool.run(run_job, 2, args=args)  # over what was half-written
    assert steps_of(str(folder)) == {1: True, 2: True, 3: True}
    assert all(find_damage(str(folder / f"step-{step}")) == [] for step in (1, 2, 3))


def asked_to_save(rank: int, world_size: int, store: dist.Store, args: list[str]) -> dict[str, Any]:
    """A pool function: saves of a trainer's checkpointer, due and not."""
    checkpointer = open_trainer(rank, world_size, store, args).checkpointer
    folder = Path(checkpointer.folder)
    answers = {"not due": checkpointer.save(2), "asked": checkpointer.save(2, force=True)}
    answers["asked twice"] = checkpointer.save(2, force=True)
    checkpointer.wait_for_saves()
    answers["step"] = checkpointer.saved_step
    (folder / "step-3").mkdir()
    (folder / "step-3" / "__7_0.distcp").touch()  # of a crash, when there were more ranks
    dist.barrier()
    answers["boundary"] = checkpointer.save(3)
    checkpointer.wait_for_saves()
    answers["loaded"] = checkpointer.load(3)
    answers["asked after a load"] = checkpointer.save(3, force=True)
    answers["last"] = checkpointer.save(6, last_step=True)
    checkpointer.load_only = True
    answers["load only"] = checkpointer.save(5, force=True)
    return answers | {"files": sorted(path.name for path in (folder / "step-3").iterdir())}


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_saves_that_are_asked_for(workspace: Path, rank_pool: RankPool, tmp_path: Path, async_mode: str) -> None:
    overrides = without_teacher(validation__enable=False, checkpoint__interval=100, checkpoint__async_mode=async_mode)
    (answers,) = rank_pool.run(asked_to_save, 1, args=arguments(workspace, tmp_path, **overrides))
    files = ["__0_0.distcp", METADATA, "checksums.json", "manifest.json"]
    assert answers == {
        "not due": False,
        "asked": True,
        "asked twice": False,
        "step": 2,
        "boundary": True,
        "loaded": True,
        "asked after a load": False,
        "last": True,
        "load only": False,
        "files": sorted(files),
    }
    assert steps_of(str(tmp_path / "checkpoint")) == {2: True, 3: True, 6: True}


def threads_of_saves(rank: int, world_size: int, store: dist.Store, args: list[str]) -> dict[str, Any]:
    """A pool function: in which threads a checkpointer saves, and which of them are left once it is closed."""
    original, threads = ChecksumWriter.write_data, []

    def write_data(self: ChecksumWriter, plan: Any, planner: Any) -> Any:
        threads.append(threading.current_thread())
        return original(self, plan, planner)

    ChecksumWriter.write_data = write_data  # type: ignore[method-assign]
    try:
        checkpointer = open_trainer(rank, world_size, store, args).checkpointer
        for step in (1, 2, 3, 4):
            checkpointer.save(step, force=True)
        checkpointer.wait_for_saves()
    finally:
        ChecksumWriter.write_data = original  # type: ignore[method-assign]
    for _ in range(2):
        checkpointer.close()
    for thread in threads:
        thread.join(timeout=10)
    return {
        "saves": len(threads),
        "threads": len(set(threads)),  # not by their names or numbers, which are given again
        "in the main thread": threading.main_thread() in threads,
        "left": sum(thread.is_alive() for thread in set(threads)),
    }


def test_all_asynchronous_saves_have_one_thread(workspace: Path, rank_pool: RankPool, tmp_path: Path) -> None:
    """In a new thread each, what they have freed would be kept once for each: memory that grows with the saves."""
    overrides = without_teacher(validation__enable=False, checkpoint__async_mode="async")
    (answers,) = rank_pool.run(threads_of_saves, 1, args=arguments(workspace, tmp_path, **overrides))
    assert answers == {"saves": 4, "threads": 1, "in the main thread": False, "left": 0}
    assert steps_of(str(tmp_path / "checkpoint")) == {1: True, 2: True, 3: True, 4: True}


def test_a_last_step_in_hugging_face_format(workspace: Path, rank_pool: RankPool, tmp_path: Path) -> None:
    hf = {
        "block_stack__placement": "pre",
        "checkpoint__last_save_in_hf": True,
        "checkpoint__last_save_model_only": True,
    }
    args = arguments(workspace, tmp_path, **RUN, **hf)
    rank_pool.run(run_job, 2, args=args)
    folder = tmp_path / "checkpoint" / "step-3"
    assert find_resume_point(parse_config(args)) == ResumePoint(3, complete=True)
    assert len(list(folder.glob("model*.safetensors"))) == 1 and find_damage(str(folder)) == []
    (folder / "checksums.json").unlink()  # it comes last
    assert find_resume_point(parse_config(args)) == ResumePoint(2, complete=False)


def not_seen(rank: int, world_size: int, store: dist.Store, args: list[str]) -> str:
    """A pool function: a job whose rank 1 is on a machine that does not see the folder."""
    original = CheckpointManager._create_checkpoint_id

    def create(self: CheckpointManager, step: int, folder: str = "") -> str:
        return original(self, step, "/nowhere" if rank == 1 else folder)

    CheckpointManager._create_checkpoint_id = create
    try:
        return failed(rank, world_size, store, args)
    finally:
        CheckpointManager._create_checkpoint_id = original


def test_a_rank_that_does_not_see_the_checkpoint_never_starts_from_random_weights(
    run: Path, workspace: Path, rank_pool: RankPool, tmp_path: Path
) -> None:
    folder = as_of(run, 2, tmp_path / "run")
    answers = rank_pool.run(not_seen, 2, args=arguments(workspace, folder, **RUN))
    assert all("student rank 1 does not see it (all of them must, on a file system" in answer for answer in answers)


def test_a_checkpoint_of_an_older_version_is_taken(
    run: Path, workspace: Path, rank_pool: RankPool, tmp_path: Path
) -> None:
    folder = as_of(run, 2, tmp_path / "run")
    (folder / "checkpoint" / "step-2" / "checksums.json").unlink()
    rank_pool.run(run_job, 2, args=arguments(workspace, folder, **RUN))
    assert saved_steps(str(folder / "checkpoint")) == [1, 2, 3]


def test_an_unwritable_folder_is_refused_on_every_rank(workspace: Path, rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answers = rank_pool.run(failed, 2, args=arguments(workspace, tmp_path / "file" / "run", **RUN))
    assert "ConfigError: job.dump_folder is" in answers[0] and "no file can be written: Not a directory" in answers[0]
    assert answers[0] == answers[1]
