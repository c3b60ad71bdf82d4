"""A few of the faults of ``tests/fault_tests`` (``./run_tests.sh --faults`` runs them all), and that a loss is noticed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.fault_tests.comparing import differences
from tests.fault_tests.harness import FaultBench
from tests.fault_tests.points import Kill
from tests.fault_tests.report import FaultReport
from tests.unit_tests.resuming import checkpoint_folder, contents

SEPARATE, TWO = "1 student, 1 teacher", "2 students, colocated teacher"
FAULTS: dict[str, tuple[str, list[list[Kill]]]] = {
    "in the first save, then in the middle of a line": (
        TWO,
        [[Kill("half a file of a checkpoint", 1, 7)], [Kill("half a line", 0, 9)]],
    ),
    "in the teacher's forward": (SEPARATE, [[Kill("teacher's forward", 1, 9)]]),
    "between a checkpoint's data and its metadata, then while it loads": (
        SEPARATE,
        [[Kill("checkpoint's metadata", 0, 4)], [Kill("checkpoint's data read", 0, 1)]],
    ),
    "during growth": (TWO, [[Kill("parameters carried", 1, 1, after=True)]]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_killed_rank_loses_nothing(fault_bench: FaultBench, tmp_path: Path, fault: str) -> None:
    """Its job ends within 15 s; launched again, with the same store or a new one, the run ends bit for bit as the undisturbed."""
    layout, kills = FAULTS[fault]
    outcome = fault_bench.disturb(fault_bench.case(layout), kills, tmp_path / "run", keep_store=layout == SEPARATE)
    assert not outcome.lost, outcome.text
    assert len(outcome.launches) == len(kills) + 1, "a fault did not happen"


def drop_a_line(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4] + lines[5:]))


def double_a_line(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5] + lines[4:]))


def cut_the_last_line(run: Path) -> None:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-5])


def change_a_loss(run: Path) -> None:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    next(event for event in events if event["event"] == "train")["loss"] += 1e-12
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def change_a_weight(run: Path) -> None:
    checkpoint = checkpoint_folder(run, 7)
    state = contents(checkpoint)
    weight = state["layers.0.feed_forward.w1.weight"]
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(1.0))
    dcp.save(state, checkpoint_id=checkpoint, no_dist=True)


def remove_a_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoint/step-6")


def leave_a_file(run: Path) -> None:
    (run / "checkpoint/step-7/.metadata.tmp").touch()


def remove_tensorboard(run: Path) -> None:
    shutil.rmtree(run / "tb")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (drop_a_line, "line 4 is"),
        (double_a_line, "line 5 is"),
        (cut_the_last_line, "is cut"),
        (change_a_loss, "metrics.jsonl has"),
        (change_a_weight, "the checkpoint of step 7 differs in layers.0.feed_forward.w1.weight"),
        (remove_a_checkpoint, "missing: checkpoint/step-6"),
        (leave_a_file, "left behind: checkpoint/step-7/.metadata.tmp"),
        (remove_tensorboard, "TensorBoard"),
    ],
)
def test_a_loss_is_noticed(fault_bench: FaultBench, tmp_path: Path, damage: Callable[[Path], None], told: str) -> None:
    undisturbed = fault_bench.case(TWO).folder
    shutil.copytree(undisturbed, tmp_path / "run")
    assert differences(tmp_path / "run", undisturbed) == []
    damage(tmp_path / "run")
    assert told in "\n".join(differences(tmp_path / "run", undisturbed))


def test_the_report_has_a_row_for_each_fault() -> None:
    report = FaultReport()
    report.fault("SIGKILL in a step", where="one", seconds=0.5)
    report.fault("SIGKILL in a step", where="two", seconds=1.5)
    report.line("Threads", start=3, end=3)
    of_another_test = FaultReport()
    of_another_test.fault("disk full", where="one", lost=["a line"])
    of_another_test.line("Threads", start=4, end=5)
    report.extend(of_another_test)
    assert report.markdown().splitlines() == [
        "### Faults",
        "",
        "| fault | times | kinds of job | lost | job ended after, at most |",
        "|---|---|---|---|---|",
        "| SIGKILL in a step | 2 | 2 | nothing | 1.5 s |",
        "| disk full | 1 | 1 | a line | - |",
        "",
        "### Threads",
        "",
        "| start | end |",
        "|---|---|",
        "| 3 | 3 |",
        "| 4 | 5 |",
    ]
