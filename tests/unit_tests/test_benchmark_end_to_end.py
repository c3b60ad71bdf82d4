"""The end-to-end benchmark: the hand-written loop is right, trains what the job trains, and the figures are what they say."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from tests.unit_tests.jobs import run_job, train_events
from tests.unit_tests.rank_pool import RankPool
from tools.benchmarks import end_to_end
from tools.benchmarks.hand_loop import FORMS, HandLoop
from tools.benchmarks.pace import Paced, Window
from tools.benchmarks.profile_step import (
    ATTENTION,
    FEED_FORWARD,
    OTHER,
    PRODUCTS,
    STUDENT,
    TEACHER,
    by_mark,
    marked,
    marks,
    table,
)
from tools.benchmarks.workloads import Workload

MB = 1_000_000


@pytest.fixture(scope="module")
def work(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """A workload of toy size, written; the loop takes 5 documents at a time, which do not divide its 16."""
    toy = Workload(
        name="A",
        root=str(tmp_path_factory.mktemp("workload")),
        flavor="toy",
        teacher_layers=3,
        student_layers=2,
        batches=1,
        loop_documents=5,
        local_batch_size=4,
        chunk_tokens=16,
        steps=3,
        cap=24,
        tokenizer=str(workspace / "tokenizer"),
        corpus=str(workspace / "train.jsonl"),
    )
    toy.write()
    return toy


def _plain_loss(loop: HandLoop, work: Workload) -> float:
    """The objective of the first step from its definition: one document at a time, not padded."""
    total = valid = 0.0
    for ids in loop.documents[:16]:
        if len(ids) == 1:
            continue
        inputs, labels = torch.tensor([ids[:-1]]), torch.tensor(ids[1:])
        with torch.no_grad():
            z, z_teacher = (model(inputs).logits[0] for model in (loop.student, loop.teacher))  # [S, V]
        assert z.dtype == torch.float64
        p, q = z.softmax(-1), z_teacher.softmax(-1)
        kl = (q * (q / p).log()).sum()
        ce = -p[torch.arange(len(labels)), labels].log().sum()
        total += float(work.kd_weight * kl + work.ce_weight * ce)
        valid += len(labels)
    return total / valid


def test_every_form_of_the_loop_computes_the_objective(work: Workload) -> None:
    expected = _plain_loss(HandLoop(work, torch.float64), work)
    for form in FORMS:
        loss, valid = HandLoop(work).step(1, form)
        assert loss == pytest.approx(expected, rel=1e-6)
        assert valid == sum(len(ids) - 1 for ids in HandLoop(work).documents[:16])


def test_a_job_takes_the_steps_of_the_loop_whatever_its_form(
    work: Workload, rank_pool: RankPool, tmp_path: Path
) -> None:
    arguments = ["--job.config_file", str(work.config_file()), "--job.dump_folder", str(tmp_path)]
    arguments += ["--teacher.ranks", "0", "--model.name", "qwen3_block_stack"]
    (events,) = rank_pool.run(run_job, 1, args=[*arguments, "--experimental.custom_import", "blockgrow_titan"])
    loop = HandLoop(work)
    for step, (event, form) in enumerate(zip(train_events(events), FORMS, strict=True), start=1):
        loss, valid = loop.step(step, form)
        assert event["valid_tokens"] == valid
        assert event["loss"] == pytest.approx(loss, abs=1e-5)


def test_flops_are_those_that_torch_counts(work: Workload) -> None:
    length, args = 17, work.args
    loop = HandLoop(work)
    counts: dict[str, float] = {}
    for model, train in ((loop.student, True), (loop.teacher, False)):
        model.set_attn_implementation("eager")  # plain products, over the whole square
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(train):
            logits = model(torch.arange(length)[None]).logits
            if train:
                logits.sum().backward()
        for operation, count in counter.get_flop_counts()["Global"].items():
            counts[str(operation)] = counts.get(str(operation), 0) + count
    attention = counts["aten.bmm"] * (length + 1) / (2 * length)
    head = 4 * 2 * args.dim * args.vocab_size * length
    assert work.flops(length) == (counts["aten.mm"] - head + attention, head)


STEPS = """
import sys, torch
from pathlib import Path
from tools.benchmarks.pace import Pace
pace = Pace.of_environment("student")
pace.appear()
kept = torch.zeros(1000)
for step in range(1, 5):
    word = pace.wait(step)
    state = Path(f"/proc/{sys.argv[1]}/stat").read_text().split()[2]
    large = torch.zeros(2000 if step <= 2 else 9000)
    pace.ended(step, valid_tokens=step, running=state != "T", steps=word == "steps")
    del large
print("no more")
raise SystemExit(3)
"""


def test_steps_are_taken_only_when_they_may_be(tmp_path: Path) -> None:
    teacher = subprocess.Popen(["sleep", "60"])
    folder = tmp_path / "paced"
    try:
        with Paced("it", folder, [sys.executable, "-c", STEPS, str(teacher.pid)], {}) as paced:
            (folder / "pid-teacher").write_text(str(teacher.pid))
            first, second = paced.advance(3, "steps"), paced.advance(1)
            assert [step["step"] for step in (*first.steps, *second.steps)] == [1, 2, 3, 4]
            assert all(step["running"] for step in (*first.steps, *second.steps))
            assert [step["steps"] for step in (*first.steps, *second.steps)] == [True, True, True, False]
            assert first.rate == pytest.approx(6 / (first.steps[-1]["ended"] - first.steps[0]["began"]))
            assert second.steps[0]["began"] >= first.steps[-1]["ended"]
            with pytest.raises(RuntimeError, match="it ended with status 3:\nno more"):
                paced.finish()
            with pytest.raises(RuntimeError, match="it took 4 of 5 steps:\nno more"):
                paced.advance(1)
        memory = json.loads((folder / "memory-student").read_text())
        assert memory["tensors"] == 3000 * 4  # of the first two steps
        assert 0 < memory["imports"]
    finally:
        teacher.kill()
        teacher.wait()


def _window(rate: float, loss: float = 1.0) -> Window:
    step: dict[str, Any] = {"began": 5.0, "ended": 6.0, "valid_tokens": rate, "processed_tokens": 2 * rate}
    return Window([step | {"loss": loss, "step_s": 0.5, "teacher_wait_s": 0.1}])


def test_figures_are_against_the_fastest_form(work: Workload) -> None:
    rates = {
        "mask": [9, 9, 9],
        "cap": [30],
        "longest": [10, 20, 10],
        end_to_end.TUNED: [15, 15, 15],
        "colocated": [20, 20, 20],
        "separate": [30, 30, 30],
    }
    memory = {
        "loop": {"loop": {"tensors": 100 * MB, "imports": 1 * MB, "peak": 3 * MB}},
        "colocated": {"student": {"tensors": 10 * MB, "imports": 1 * MB, "peak": 3 * MB}},
        "separate": {
            "student": {"tensors": 90 * MB, "imports": 1 * MB, "peak": 3 * MB},
            "teacher": {"tensors": 30 * MB, "imports": 1 * MB, "peak": 3 * MB},
        },
    }
    measured = end_to_end.Measured({k: [_window(r) for r in v] for k, v in rates.items()}, memory, [60, 60, 60], 1e-6)
    measured.windows["cap"] = [_window(8)]
    found = {row.name: row for row in end_to_end.rows(work, measured)}
    speed = found["A: job against the fastest loop"]
    assert (speed.value, speed.bar, speed.holds) == (3.0, ">= 2.2", True)  # the median of 30/10, 30/20, 30/10
    assert speed.note.startswith("separate against longest")
    assert found["A: loop, longest"].value == 10
    assert found["A: job against the loop that keeps freed memory"].value == 2.0
    assert found["A: job against the floor"].value == 0.5
    assert (found["A: job, separate"].value, found["A: job, separate"].note[:11]) == (30, "60 by its o")
    ratio = found["A: peak of tensors, job against the loop"]
    assert (ratio.value, ratio.bar, ratio.holds) == (1.2, "<= 1", False)
    assert found["A: peak of tensors, colocated"].value == 10
    assert found["A: largest difference of a step's loss"].holds


def test_another_loss_is_no_measurement() -> None:
    losses = {"loop": [2.0, 1.5, 1.0], "colocated": [2.00001, 1.5], "separate": [2.0, 1.5]}
    assert end_to_end._loss_difference(losses) == pytest.approx(1e-5)
    with pytest.raises(RuntimeError, match="differs from the loop's by more than 0.0001"):
        end_to_end._loss_difference(losses | {"separate": [2.0, 1.501]})
    with pytest.raises(RuntimeError, match="differs"):
        end_to_end._loss_difference(losses | {"separate": [float("nan"), 1.5]})


def test_the_backward_is_put_down_to_what_it_differentiates() -> None:
    first, second = (torch.nn.Linear(64, 64) for _ in range(2))
    first.forward, second.forward = (marked(m.forward, name) for m, name in ((first, "first"), (second, "second")))
    x = torch.randn(2048, 64, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = second(first(x).exp()).square().sum()
        loss.backward()
    events = profiler.events()
    seconds = by_mark(events)
    assert set(seconds) == {"first", "second", OTHER}
    assert sum(seconds.values()) == pytest.approx(sum(event.self_cpu_time_total for event in events) / 1e6)
    of_operation = {
        name: {mark for event, mark in marks(events) if event.name == name} for name in ("aten::mm", "aten::exp")
    }
    assert of_operation == {"aten::mm": {"first", "second"}, "aten::exp": {OTHER}}  # mm: in the backward only


def test_a_profile_is_a_table_of_shares() -> None:
    seconds = {TEACHER: 1.0, ATTENTION: 0.25, FEED_FORWARD: 0.25, PRODUCTS: 0.5}
    result = {"step": 2.0, "seconds": seconds, "valid_tokens": 1963.0}
    lines = table("A", result | {"floor": {TEACHER: 0.5, STUDENT: 0.25, PRODUCTS: 0.5}}).splitlines()
    assert lines[0] == "| A: 1,963 valid tokens a step | ms | share | floor, ms |"
    assert lines[2] == "| teacher's layers | 1,000 | 50% | 500 |"
    assert lines[-2:] == [f"| {STUDENT}, together | 500 | 25% | 250 |", "| the step | 2,000 | 100% | 1,250 |"]
