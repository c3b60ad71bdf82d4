"""The same config gives the same bits; what else may be changed about a run, and by how much its numbers then differ.

The runs of the table are ``train_configs/grow_post.toml``, shortened: 12 steps at 1, 2 and 3 layers, one student and one
teacher with one thread each, and one thing changed at a time.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fault_tests.comparing import complete_lines, differences
from tests.fault_tests.fork_server import ROOT
from tests.fault_tests.harness import LAYOUTS, FaultBench
from tests.fault_tests.report import FaultReport
from tests.unit_tests.jobs import losses
from tests.unit_tests.resuming import checkpoint_folder, contents

STEPS = 12
SHORT = ["--growth.phase_steps", "4", "4", "4", "--training.steps", str(STEPS), "--validation.no-enable"]
SHORT += ["--checkpoint.interval", str(STEPS), "--metrics.no-enable_tensorboard", "--lr_scheduler.warmup_steps", "1"]
BASE = ["--teacher.ranks", "1"]

# What is changed: ranks, arguments, threads, and whether the numbers must be the same bit for bit.
CHANGES: dict[str, tuple[int, list[str], int, bool]] = {
    "nothing": (2, BASE, 1, True),
    "the teacher on the student's rank": (1, ["--teacher.ranks", "0"], 1, True),
    "nothing is asked ahead (teacher.prefetch = 0)": (2, [*BASE, "--teacher.prefetch", "0"], 1, True),
    "2 loader workers": (2, [*BASE, "--training.dataloader.num_workers", "2"], 1, True),
    "asynchronous checkpoints, one every step": (
        2,
        [*BASE, "--checkpoint.async_mode", "async", "--checkpoint.interval", "1"],
        1,
        True,
    ),
    "full activation checkpointing": (2, [*BASE, "--activation_checkpoint.mode", "full"], 1, True),
    "selective activation checkpointing": (2, [*BASE, "--activation_checkpoint.mode", "selective"], 1, True),
    "2 teachers for the student": (3, ["--teacher.ranks", "2"], 1, True),
    "2 teachers that share a copy": (3, ["--teacher.ranks", "2", "--teacher.shard_degree", "2"], 1, True),
    "2 students": (3, BASE, 1, False),
    "2 documents less in a micro-batch (training.local_batch_size = 2)": (
        2,
        [*BASE, "--training.local_batch_size", "2"],
        1,
        False,
    ),
    'documents.micro_batching = "balanced"': (2, [*BASE, "--documents.micro_batching", "balanced"], 1, False),
    'documents.micro_batching = "count"': (2, [*BASE, "--documents.micro_batching", "count"], 1, False),
    "distill.chunk_tokens = 1024": (2, [*BASE, "--distill.chunk_tokens", "1024"], 1, False),
    "2 threads a rank": (2, BASE, 2, False),
    "torch.compile": (2, [*BASE, "--compile.enable", "--compile.components", "model"], 1, False),
}
RELATIVE = 1e-3  # of a loss, at most, where the order of sums differs: generous, the table has what was measured


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_config_twice_gives_the_same_bits(
    fault_bench: FaultBench, fault_report: FaultReport, tmp_path: Path, name: str
) -> None:
    """Losses, validations, every checkpoint with weights and moments, summary, TensorBoard."""
    case = fault_bench.case(name)
    launch = fault_bench.launch(fault_bench.arguments(case.layout, tmp_path), case.layout.world_size)
    assert launch.statuses == [0] * case.layout.world_size, launch.output
    different = differences(tmp_path, case.folder)
    fault_report.line("The same config twice", job=name, differs="; ".join(different) or "nothing")
    assert not different


@pytest.fixture(scope="module")
def trained(fault_bench: FaultBench, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """``trained(change)``: (losses of each step, final weights) of a run of the table, each made once."""
    made: dict[str, Any] = {}

    def get(change: str) -> Any:
        if change not in made:
            world_size, arguments, threads, _ = CHANGES[change]
            folder = tmp_path_factory.mktemp("trained")
            config = ["--job.config_file", str(ROOT / "train_configs/grow_post.toml"), "--job.dump_folder", str(folder)]
            launch = fault_bench.launch(
                [*config, *SHORT, *arguments], world_size, seconds=300.0, OMP_NUM_THREADS=str(threads)
            )
            assert launch.statuses == [0] * world_size, launch.output
            state = contents(checkpoint_folder(folder, STEPS))
            weights = {
                k: v for k, v in state.items() if not k.startswith(("optimizer.", "lr_scheduler", "train_state."))
            }
            made[change] = losses(complete_lines(folder / "metrics.jsonl")), weights
        return made[change]

    return get


@pytest.mark.parametrize("change", CHANGES)
def test_what_may_differ(trained: Callable[[str], Any], fault_report: FaultReport, change: str) -> None:
    """Bit for bit the same, or within the rounding of sums in another order."""
    expected, expected_weights = trained("nothing")
    ours, weights = trained(change)
    if change == "nothing":
        return
    assert weights.keys() == expected_weights.keys()
    loss = max(abs(mine[1] - other[1]) / abs(other[1]) for mine, other in zip(ours, expected, strict=True))
    distance = max(float((weights[k] - w).norm() / w.norm()) for k, w in expected_weights.items())
    same = ours == expected and all(torch.equal(weights[k], w) for k, w in expected_weights.items())
    fault_report.line(
        "What may differ: one student, one teacher, one thread, and one thing changed",
        changed=change,
        losses="same bits" if ours == expected else f"up to {loss:.1e}",
        weights="same bits" if same else f"up to {distance:.1e}",
    )
    assert same or not CHANGES[change][3], f"loss {loss}, weights {distance}"
    assert loss < RELATIVE
