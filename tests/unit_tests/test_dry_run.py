"""The dry run over fake ranks: it checks a config and sizes both worlds, with neither weights nor documents."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchtitan.tools.logging import logger

from blockgrow_titan.model.args import FLAVORS
from blockgrow_titan.parse import parse_config
from blockgrow_titan.train import launch
from tests.unit_tests.jobs import arguments
from tests.unit_tests.models import read_json
from tests.unit_tests.rank_pool import RankError, RankPool

CONFIGS = Path(__file__).parents[2] / "train_configs"
# wq, wk, wv, wo; w1, w2, w3; two norms of the layer, two of queries and keys
LAYER = 32 * (64 + 32 + 32 + 64) + 3 * 32 * 48 + 2 * 32 + 2 * 16
EMBEDDING = 320 * 32


def dry_run_lines(
    rank: int, world_size: int, store: dist.Store, args: list[str], pretended: int, shown: int = 0
) -> list[str]:
    """What a dry run over ``pretended`` ranks says, warnings with their level in front."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda r: lines.append(f"{r.levelname}: {r.getMessage()}")  # type: ignore[method-assign]
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        launch(parse_config(args), dist.HashStore(), shown, pretended)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return [line.removeprefix("INFO: ") for line in lines]


def dry(workspace: Path, dump: Path, **overrides: Any) -> list[str]:
    return arguments(workspace, dump, **({"comm__mode": "fake_backend"} | overrides))


def test_both_worlds_are_sized(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    args = dry(workspace, tmp_path / "dump", teacher__ranks=4)
    lines = rank_pool.run(dry_run_lines, 1, args=args, pretended=12)[0]
    assert any("12 ranks: 8 of the student's world, 4 of the teacher's" in line for line in lines)
    phases = [line for line in lines if line.startswith("phase ")]
    assert [line.split(":")[0] for line in phases] == ["phase 0", "phase 1"]
    rest = 2 * EMBEDDING + 32  # embedding, head and boundary norm
    assert f"{LAYER + rest:,} parameters, {LAYER + EMBEDDING + 32:,} trainable" in phases[0]
    assert f"{2 * LAYER + rest:,} parameters" in phases[1]
    assert all("student rank 0" in line for line in phases)
    (teacher,) = (line for line in lines if line.startswith("teacher: "))
    parameters = 2 * LAYER + EMBEDDING + 32
    assert f"2 layers, {parameters:,} parameters without the head, float32, one copy on 1 rank" in teacher
    assert f"{4 * parameters / 2**20:,.1f} MiB of parameters on teacher rank 0" in teacher
    assert lines[-1] == "Dry run completed: the config is sound"
    assert not (tmp_path / "dump").exists()


def test_another_rank_has_its_own_shards(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    """Of 320 rows over 7 ranks, the last rank has 2 less than the first; a teacher's rank shows a student's first."""
    args = dry(workspace, tmp_path, teacher__ranks=2, teacher__shard_degree=2)
    first, last, teacher = (
        rank_pool.run(dry_run_lines, 1, args=args, pretended=9, shown=shown)[0] for shown in (0, 6, 8)
    )
    size = [next(line for line in lines if line.startswith("phase 0")).split("; ")[-1] for lines in (first, last)]
    assert size[0] != size[1] and size[0].endswith("student rank 0") and size[1].endswith("student rank 6")
    assert any(line.startswith("phase 0") and line.endswith("student rank 0") for line in teacher)
    assert any("one copy on 2 ranks" in line and line.endswith("teacher rank 1") for line in teacher)


def test_colocated_and_no_teacher(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    lines = rank_pool.run(dry_run_lines, 1, args=dry(workspace, tmp_path), pretended=4)[0]
    assert any(line.startswith("teacher: ") and line.endswith("student rank 0") for line in lines)
    args = dry(workspace, tmp_path, teacher__path="", distill__kd_weight=0.0)
    lines = rank_pool.run(dry_run_lines, 1, args=args, pretended=4)[0]
    assert not any("teacher: " in line for line in lines)


def test_absent_files_are_warnings(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    """No teacher folder, no documents: the flavor's dimensions stand for the teacher's."""
    args = dry(workspace, tmp_path, teacher__path="nowhere/teacher", training__dataset_path="nowhere/train.jsonl")
    lines = rank_pool.run(dry_run_lines, 1, args=args, pretended=2)[0]
    warnings = [line for line in lines if line.startswith("WARNING: ")]
    assert any('teacher.path = "nowhere/teacher": there is no file or folder' in line for line in warnings)
    assert any("training.dataset_path" in line and "nowhere/train.jsonl" in line for line in warnings)
    assert any(f"teacher: {FLAVORS['toy'].n_layers} layers" in line for line in lines)
    assert lines[-1] == "Dry run completed: the config is sound"


def test_a_teacher_without_weights_is_still_checked(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    """A folder with config and tokenizer alone is what a user has before the download."""
    folder = tmp_path / "teacher"
    shutil.copytree(workspace / "teacher", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    args = dry(workspace, tmp_path, teacher__path=str(folder))
    lines = rank_pool.run(dry_run_lines, 1, args=args, pretended=2)[0]
    assert any(line.startswith("WARNING: ") and "has neither model.safetensors nor" in line for line in lines)
    assert any(line.startswith("teacher: 2 layers") for line in lines)
    for index, found in (("{", "is not JSON"), ("{}", "no weight_map")):  # there, but broken: no warning
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(RankError, match=f"ConfigError: the teacher in .*{found}"):
            rank_pool.run(dry_run_lines, 1, args=args, pretended=2)
    (folder / "model.safetensors.index.json").unlink()
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(RankError, match="ConfigError: .*has hidden size 64, but model.flavor"):
        rank_pool.run(dry_run_lines, 1, args=args, pretended=2)


@pytest.mark.parametrize(
    ("overrides", "pretended", "words"),
    [
        ({"teacher__ranks": 3}, 3, "teacher.ranks = 3 leaves no student rank"),
        ({"parallelism__data_parallel_shard_degree": 3}, 4, "do not multiply to the 4 student"),
        ({"comm__mode": "local_tensor"}, 4, 'comm.mode is "local_tensor", which is not supported'),
        ({"model__hf_assets_path": "nowhere"}, 4, "model.hf_assets_path"),
        ({"growth__phase_steps": [3, 4]}, 4, "growth.phase_steps"),
    ],
)
def test_refusals(
    rank_pool: RankPool, workspace: Path, tmp_path: Path, overrides: dict[str, Any], pretended: int, words: str
) -> None:
    args = dry(workspace, tmp_path, **overrides)
    with pytest.raises(RankError, match=words):
        rank_pool.run(dry_run_lines, 1, args=args, pretended=pretended)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("qwen3_*/*.toml")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_configs_of_real_scale(rank_pool: RankPool, workspace: Path, tmp_path: Path, path: Path) -> None:
    """Checkpointing, compile and sharding of the real dimensions, over as many ranks as the paper had."""
    args = ["--job.config_file", str(path), "--comm.mode=fake_backend", "--job.dump_folder", str(tmp_path / "dump")]
    args += ["--model.hf_assets_path", str(workspace / "tokenizer")]
    if path.stem == "grow_post":
        args += ["--compile.enable", "--compile.components", "model"]
    lines = rank_pool.run(dry_run_lines, 1, args=args, pretended=16)[0]
    assert any("16 ranks: 8 of the student's world, 8 of the teacher's" in line for line in lines)
    last = [line for line in lines if line.startswith("phase ")][-1]
    if path.parent.name == "qwen3_8b":
        assert "3 blocks of 3 layers; 2,981,181,696 parameters" in last
        assert any(line.startswith("teacher: 36 layers, 7,568,405,504 parameters without the head") for line in lines)
    else:
        assert any(line.startswith("teacher: 28 layers, 596,049,920 parameters") for line in lines)
