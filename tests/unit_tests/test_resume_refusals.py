"""What is not resumed: a finished run, one with another config, a checkpoint that does not fit."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchtitan.tools.logging import logger

from blockgrow_titan.checkpoint import ResumePoint, find_resume_point
from blockgrow_titan.checkpoint_files import CHECKSUMS
from blockgrow_titan.metrics import SUMMARY_FILE
from blockgrow_titan.parse import parse_config
from blockgrow_titan.train import ConfigError, launch
from tests.unit_tests.jobs import run_job
from tests.unit_tests.models import read_json
from tests.unit_tests.rank_pool import RankError, RankPool
from tests.unit_tests.resuming import TIMEOUT, Case, checkpoint_folder, undisturbed_runs


@pytest.fixture(scope="module")
def case(workspace: Path, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """``case(name)`` with its undisturbed run, which is made once."""
    return undisturbed_runs(workspace, rank_pool, tmp_path_factory.mktemp("undisturbed"))


def job_with_log(rank: int, world_size: int, store: dist.Store, args: list[str]) -> list[str]:
    """A pool function: a whole job; the lines that it logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        run_job(rank, world_size, store, args)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines


def refused_job(rank: int, world_size: int, store: dist.Store, args: list[str]) -> str:
    """A pool function: a job that is refused; the text."""
    with pytest.raises(ConfigError) as error:
        run_job(rank, world_size, store, args)
    assert not dist.is_initialized()
    return str(error.value)


def test_a_finished_run_started_again(case: Callable[[str], Case], rank_pool: RankPool, tmp_path: Path) -> None:
    """Rank 0 says so, nobody trains, and no file changes but the summary, which is made anew from the metrics."""
    this = case("colocated")
    folder = this.as_of(7, tmp_path / "run")
    os.remove(folder / SUMMARY_FILE)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    logs = rank_pool.run(job_with_log, 2, timeout=TIMEOUT, args=this.args(folder))
    text = "\n".join(logs[0])
    assert f"This run is complete: {folder} holds all 7 steps" in text
    assert "To start anew" in text and "--job.dump_folder" in text
    assert "active blocks" in text and "valid tokens" in text  # the closing table
    assert not any("complete" in line for line in logs[1])
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert after.pop(folder / SUMMARY_FILE) and after == before
    assert read_json(folder / SUMMARY_FILE) == read_json(this.folder / SUMMARY_FILE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer__lr": 1e-3}, "optimizer.lr was 0.003 and is now 0.001"),
        ({"distill__temperature": 2.0}, "distill.temperature was 1.0 and is now 2.0"),
        ({"growth__phase_steps": [4, 3]}, "growth.phase_steps was [3, 4] and is now [4, 3]"),
        ({"growth__data_at_growth": "rewind"}, "growth.data_at_growth was 'continue' and is now 'rewind'"),
        ({"training__global_batch_size": 16}, "training.global_batch_size was 8 and is now 16"),
        ({"block_stack__placement": "pre"}, "block_stack.placement was 'post' and is now 'pre'"),
        ({"documents__shard_documents": 16}, "documents.shard_documents was -1 and is now 16"),
        ({"debug__seed": 8, "training__seq_len": 32}, "debug.seed was 7 and is now 8; training.seq_len was 24 and is now 32"),
    ],
)  # fmt: skip
def test_a_changed_config_is_refused(case: Callable[[str], Case], change: dict[str, Any], words: str) -> None:
    this = case("colocated")
    with pytest.raises(ValueError) as error:
        find_resume_point(parse_config(this.args(this.folder, **change)))
    text = str(error.value)
    assert words in text and "step-7" in text
    assert "Put the old value back" in text and "--job.dump_folder" in text


def test_what_may_change(case: Callable[[str], Case]) -> None:
    this = case("colocated")
    changes = {
        "training__local_batch_size": 2,
        "teacher__prefetch": 5,
        "teacher__ranks": 1,
        "training__dataloader__num_workers": 2,
        "metrics__log_freq": 10,
        "metrics__enable_tensorboard": False,
        "distill__chunk_tokens": 7,
        "checkpoint__interval": 5,
        "validation__freq": 50,
        "activation_checkpoint__mode": "full",
    }
    assert find_resume_point(parse_config(this.args(this.folder, **changes))) == ResumePoint(7, complete=True)


def test_every_rank_hears_of_a_changed_config(case: Callable[[str], Case], rank_pool: RankPool) -> None:
    """Rank 0 looks at the folder; -1 makes the global batch depend on the ranks: 4 * 3 students, not 8."""
    this = case("colocated")
    args = this.args(this.folder, training__global_batch_size=-1)
    answers = rank_pool.run(refused_job, 3, timeout=TIMEOUT, args=args)
    assert "training.global_batch_size was 8 and is now 12" in answers[0]
    assert answers[0] == answers[1] == answers[2]


def test_load_step_before_the_newest_would_lose_what_followed(case: Callable[[str], Case]) -> None:
    this = case("colocated")
    with pytest.raises(ValueError, match=r"checkpoint.load_step is 3, but .* also has step-4, step-6, step-7"):
        find_resume_point(parse_config(this.args(this.folder, checkpoint__load_step=3)))


def test_load_step_that_is_not_there(case: Callable[[str], Case]) -> None:
    this = case("colocated")
    with pytest.raises(ValueError, match=r"checkpoint.load_step is 5 but .* has \[2, 3, 4, 6, 7\]: give one of these"):
        find_resume_point(parse_config(this.args(this.folder, checkpoint__load_step=5)))


@pytest.mark.parametrize(
    ("step", "active_blocks", "words"),
    [
        (3, [2, 2], "it lacks layers.1. Set growth.active_blocks"),
        (4, [1, 1], "it holds, beyond the model, layers.1. Set growth.active_blocks"),
    ],
)
def test_another_depth_is_refused(
    case: Callable[[str], Case], tmp_path: Path, step: int, active_blocks: list[int], words: str
) -> None:
    """Even where the manifest says that all is well."""
    this = case("colocated")
    folder = this.as_of(step, tmp_path / "run")
    path = checkpoint_folder(folder, step) / "manifest.json"
    manifest = read_json(path)
    manifest["config"]["growth.active_blocks"] = active_blocks
    path.write_text(json.dumps(manifest))
    (checkpoint_folder(folder, step) / CHECKSUMS).unlink()  # else the changed manifest is refused
    with pytest.raises(RankError) as error:
        this.resume(folder, growth__active_blocks=active_blocks)
    text = str(error.value)
    assert f"step-{step} does not fit the model of this phase" in text and words in text


def test_bad_manifests(case: Callable[[str], Case], tmp_path: Path) -> None:
    """Of a checkpoint without checksums, from an older version; with them, see test_checkpoint_jobs.py."""
    this = case("colocated")
    folder = this.as_of(3, tmp_path / "run")
    job_config = parse_config(this.args(folder))
    (checkpoint_folder(folder, 3) / CHECKSUMS).unlink()
    path = checkpoint_folder(folder, 3) / "manifest.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(
        ValueError, match=f"{path} is not valid JSON .*: use the checkpoint before it .*delete .*step-3"
    ):
        find_resume_point(job_config)
    path.unlink()
    with pytest.raises(
        ValueError, match="step-3 has no manifest.json.*: give another one, or train in another job.dump_folder"
    ):
        find_resume_point(job_config)
    with pytest.raises(ConfigError, match="no manifest.json"):
        launch(job_config, dist.HashStore(), 0, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"initial_load_path": "{folder}/absent"}, "initial_load_path is .*absent, which is no folder"),
        ({"initial_load_path": "{folder}"}, "has no .metadata, so it is no whole checkpoint: give a .*step-N folder, or set"),
        ({"initial_load_in_hf": True}, "initial_load_in_hf is true without checkpoint.initial_load_path: name the folder"),
        ({"initial_load_in_hf_quantized": True}, "initial_load_in_hf_quantized is true but initial_load_in_hf false"),
        ({"initial_load_path": "{step}"}, "step-2 is damaged: manifest.json is missing. Copy it again, or use another"),
    ],
)  # fmt: skip
def test_initial_weights_that_are_not_there(
    case: Callable[[str], Case], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    this = case("colocated")
    step = checkpoint_folder(this.as_of(2, tmp_path / "other"), 2)
    (step / "manifest.json").unlink()
    values = {k: v.format(folder=tmp_path, step=step) if isinstance(v, str) else v for k, v in change.items()}
    args = this.args(tmp_path / "run", **{f"checkpoint__{name}": value for name, value in values.items()})
    with pytest.raises(ValueError, match=words):
        find_resume_point(parse_config(args))


def test_looking_for_a_resume_point_changes_nothing(case: Callable[[str], Case], tmp_path: Path) -> None:
    """Another process may be writing there."""
    this = case("colocated")
    weights = checkpoint_folder(this.folder, 3)
    folder = this.as_of(2, tmp_path / "run")
    half = checkpoint_folder(folder, 3)
    half.mkdir()
    (half / "__0_0.distcp").touch()
    before = sorted(folder.rglob("*"))
    args = this.args(folder, checkpoint__initial_load_path=str(weights))
    assert find_resume_point(parse_config(args)) == ResumePoint(2, complete=False)
    assert sorted(folder.rglob("*")) == before
