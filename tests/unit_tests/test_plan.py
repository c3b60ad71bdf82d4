"""Plans: parameter counts, arithmetic and advice of ``tools/plan.py``, for configs whose files are absent."""

import copy
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockgrow_titan import planning
from blockgrow_titan.documents.dealing import MicroBatching
from blockgrow_titan.growth.schedule import Phase, schedule_of
from blockgrow_titan.model.args import FLAVORS
from blockgrow_titan.model.model import BlockStackModel
from blockgrow_titan.parse import parse_config
from blockgrow_titan.planning import (
    GIB,
    HARDWARE,
    Assumptions,
    Hardware,
    Plan,
    _validations,
    busiest_documents,
    make_plan,
    valid_share,
)
from blockgrow_titan.teacher.worlds import WorldLayout
from tools.plan import default_ngpu, main, render

REPOSITORY = Path(__file__).parents[2]
GROW_8B = "train_configs/qwen3_8b/grow_post.toml"
GIVEN = Assumptions(HARDWARE["h100"], 0.4, 972)


def plan_of(config: str, ngpu: int, *overrides: str, given: Assumptions = GIVEN) -> Plan:
    return make_plan(parse_config(["--job.config_file", str(REPOSITORY / config), *overrides]), ngpu, given)


@pytest.fixture(scope="module")
def grow_8b() -> Plan:
    return plan_of(GROW_8B, 16)


def test_parameters_are_those_of_the_module(grow_8b: Plan) -> None:
    job_config = parse_config(["--job.config_file", str(REPOSITORY / GROW_8B)])
    args = FLAVORS["8B"]
    args.update_from_config(job_config)
    for phase, planned in zip(schedule_of(job_config).phases, grow_8b.phases, strict=True):
        with torch.device("meta"):
            model = BlockStackModel(args.for_phase(phase, job_config))
        assert planned.parameters == sum(p.numel() for p in model.parameters())
        assert planned.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert planned.layers == len(model.layers)
    assert grow_8b.finished_parameters == grow_8b.phases[-1].parameters
    # embedding and head copied from the teacher; a layer as the paper's dimensions give it
    layer = 4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert grow_8b.phases[0].parameters == 2 * 151_936 * 4096 + 3 * layer + 4096


def test_memory_of_the_shards(grow_8b: Plan) -> None:
    """fp32 weights, gradients and two moments over 8 ranks; a whole bf16 copy of the teacher's head and body."""
    for phase in grow_8b.phases:
        memory = phase.memory
        assert memory.weights == pytest.approx(4 * phase.parameters / 8, rel=0.02)  # and the rotary table
        assert memory.gradients == pytest.approx(4 * phase.trainable / 8, rel=1e-3)
        assert memory.optimizer == pytest.approx(8 * phase.trainable / 8, rel=1e-3)
        assert memory.teacher_head == 2 * 151_936 * 4096
        assert memory.answer == 2 * 8192 * 4096 and memory.prefetch == 2 * memory.answer
        assert memory.peak > memory.weights + memory.gradients + memory.optimizer + memory.teacher_head
    assert grow_8b.teacher is not None and grow_8b.teacher_layers == 36
    assert grow_8b.teacher.weights == pytest.approx(2 * 7_568_405_504, rel=0.01)


def test_time_traffic_and_tokens(grow_8b: Plan) -> None:
    rate = 8 * 989e12 * 0.4
    assert grow_8b.step_tokens == 64 * 972
    assert grow_8b.bridge_bytes == 64 * 972 * (2 * 4096 + 4)
    for phase in grow_8b.phases:
        student, teacher = grow_8b.world_seconds(phase.step)
        assert (student, teacher) == pytest.approx((phase.step.student / rate, phase.step.teacher / rate))
        validation = max(phase.validation.student, phase.validation.teacher) / rate
        assert grow_8b.seconds(phase) == pytest.approx(50_000 * max(student, teacher) + 26 * validation)
        assert phase.validation.teacher == pytest.approx(phase.step.teacher * 4833 / 64)
    # 2 FLOPs a parameter of the body and token, and the two products of attention
    length = round(972 / grow_8b.valid_share)  # a row's padding, shared among its documents
    assert 972 <= length <= 974
    expected = 64 * length * (2 * 36 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 12288) + 36 * 4 * length * 4096)
    assert grow_8b.phases[0].step.teacher == pytest.approx(expected)
    assert grow_8b.phases[0].step.student < grow_8b.phases[1].step.student < grow_8b.phases[2].step.student


def test_what_is_printed(grow_8b: Plan) -> None:
    text = "\n".join(render(grow_8b, GROW_8B, "h100"))
    assert "16 GPUs (8 for the student, 8 for the teacher)" in text
    for value in ("1,823,503,104", "2,402,342,400", "2,981,181,696", "9,331,200,000", "55,987,200,000"):
        assert value in text, value
    assert re.search(r"^ +0 .* teacher +\d", text, re.MULTILINE) and re.search(
        r"^ +2 .* student +\d", text, re.MULTILINE
    )
    assert "validations, counted" in text and "micro-batch: training.local_batch_size is 1" in text


def test_freezing_and_joint_work() -> None:
    """A frozen block costs no weight gradient; joint training is the grow run's last phase from the start."""
    grow, frozen, joint = (plan_of(f"train_configs/{name}_post.toml", 2) for name in ("grow", "freeze", "joint"))
    assert frozen.phases[2].step.student < grow.phases[2].step.student
    assert frozen.phases[2].memory.optimizer < grow.phases[2].memory.optimizer
    assert joint.phases[0].step == grow.phases[2].step
    assert joint.phases[0].memory == grow.phases[2].memory
    assert "training.mixed_precision_param is float32" in "\n".join(render(grow, "x", "h100"))


def test_a_better_division_is_found(grow_8b: Plan) -> None:
    """With one teacher rank for seven students the teacher bounds every step; the advice is the best of all."""
    lopsided = dataclasses.replace(grow_8b, layout=WorldLayout(14, 2))
    best = lopsided.best_layout()
    times = {
        teachers: sum(lopsided.seconds(phase, WorldLayout(16 - teachers, teachers)) for phase in lopsided.phases)
        for teachers in range(1, 16)
    }
    assert best == WorldLayout(16 - min(times, key=times.__getitem__), min(times, key=times.__getitem__))
    assert f"teacher.ranks = {best.num_teachers} ({best.num_students} student ranks)" in "\n".join(
        render(lopsided, "x", "h100")
    )
    assert "no other division of 16 ranks saves more than 3%" in "\n".join(render(grow_8b, "x", "h100"))


@pytest.mark.parametrize(("students", "teachers"), [(8, 8), (7, 9), (9, 7), (3, 13), (14, 2), (4, 0)])
def test_the_busiest_rank_of_each_world(students: int, teachers: int) -> None:
    """Against the deal of as many steps as even out a student's turns: 64 equal documents, one a micro-batch."""
    layout, steps = WorldLayout(students, teachers), 60
    deal = MicroBatching("count", 1, 10).deal([10] * 64, students)
    asked = [0] * students
    served = [0] * max(1, teachers)
    for _ in range(steps):
        for student in range(students):
            serving = layout.teachers_of(student)
            for _ in [batch for batch in deal[student] if batch and serving]:
                served[serving[asked[student] % len(serving)]] += 1
                asked[student] += 1
    busiest = max(map(len, deal))
    assert busiest_documents(layout, 64, True) == (busiest, pytest.approx(max(served) / steps))


def test_equal_work_for_the_ranks() -> None:
    """Unless dealt by count, a rank has its share of the work, but not less than one document."""
    assert busiest_documents(WorldLayout(6, 4), 64, False) == (pytest.approx(64 / 6), pytest.approx(2 * 64 / 6))
    assert busiest_documents(WorldLayout(9, 0), 64, False)[0] == pytest.approx(64 / 9)
    assert busiest_documents(WorldLayout(100, 0), 64, False)[0] == 1
    assert busiest_documents(WorldLayout(2, 2), 0, False) == (0, 0)


def test_uneven_divisions_and_fixed_degrees(grow_8b: Plan) -> None:
    """Of ten teachers of six students, two serve a student each and alone: 10 documents, where eight of eight have 8."""
    by_count = copy.deepcopy(grow_8b.job_config)
    by_count.documents.micro_batching = "count"
    bound = dataclasses.replace(grow_8b, job_config=by_count, phases=grow_8b.phases[:1])  # by the teacher
    step = bound.phases[0].step
    slower = bound.world_seconds(step, WorldLayout(6, 10))[1]
    assert slower == pytest.approx(10 / 8 * bound.world_seconds(step)[1])
    assert max(bound.world_seconds(step, bound.best_layout())) <= max(bound.world_seconds(step))
    for field, value, students in (
        ("data_parallel_replicate_degree", 4, {4, 8, 12}),
        ("data_parallel_shard_degree", 2, {2}),
    ):
        held = dataclasses.replace(bound, job_config=copy.deepcopy(bound.job_config))
        setattr(held.job_config.parallelism, field, value)
        assert held.best_layout().num_students in students


def test_equal_phases_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    footprint = planning.student_footprint

    def counted(*arguments: Any, **keywords: Any) -> Any:
        measured.append(1)
        return footprint(*arguments, **keywords)

    monkeypatch.setattr(planning, "student_footprint", counted)
    phases = ("--growth.phase_steps", "60", "60", "60", "--growth.active_blocks", "3", "3", "3")
    plan = plan_of("train_configs/joint_post.toml", 2, *phases)
    assert len(measured) == 2  # the second: one more document, for the largest micro-batch
    assert [p.phase.first_step for p in plan.phases] == [1, 61, 121]
    assert plan.phases[0].memory == plan.phases[2].memory


@pytest.mark.parametrize(("ngpu", "kind", "whole"), [(1, "packed", 13), (2, "packed", 13), (2, "count", 16)])
def test_the_largest_micro_batch_fits(ngpu: int, kind: str, whole: int) -> None:
    """Student and teacher of that many documents fit on the GPU, and those of one document more do not."""
    overrides = ("--teacher.ranks", str(ngpu - 1), "--validation.local_batch_size", "1")
    small = ("--distill.chunk_tokens", "64", "--growth.active_blocks", "3", "--growth.phase_steps", "180")

    def planned(documents: int, memory: float) -> Plan:
        given = Assumptions(Hardware(165e12, memory), 0.4, 200)
        batch = ("--training.local_batch_size", str(documents), "--documents.micro_batching", kind)
        return plan_of("train_configs/grow_post.toml", ngpu, *overrides, *small, *batch, given=given)

    most = planned(4, memory := 0.25 * GIB).largest_micro_batch
    assert 4 < most < whole
    for documents, fits in ((most, True), (most + 1, False)):
        assert ("does not fit" not in "\n".join(render(planned(documents, memory), "x", "small"))) == fits
    assert planned(4, GIB).largest_micro_batch == whole  # all of a step: 16 documents, of 200 in 256 tokens


def test_one_gpu_colocated() -> None:
    """The teacher's time adds to the student's, and its memory to the student's GPU."""
    small = Hardware(165e12, 24 * GIB)
    plan = plan_of(
        "train_configs/qwen3_0.6b/grow_post.toml", 1, "--teacher.ranks", "0", given=Assumptions(small, 0.4, 700)
    )
    phase = plan.phases[-1]
    student, teacher = plan.world_seconds(phase.step)
    assert (student, teacher) == pytest.approx(((phase.step.student + phase.step.teacher) / (165e12 * 0.4), 0.0))
    assert plan.bridge_bytes == 0
    text = "\n".join(render(plan, "x", "rtx4090"))
    assert "1 GPU (the teacher on the student's)" in text and "on top of the above" in text
    assert "does not fit" not in text  # it is what the config is made for
    tight = dataclasses.replace(
        plan, assumptions=Assumptions(Hardware(165e12, 4 * GIB), 0.4, 700), largest_micro_batch=0
    )
    assert "does not fit: a student GPU needs" in "\n".join(render(tight, "x", "small"))


def test_without_a_teacher() -> None:
    plan = plan_of("train_configs/teacher.toml", 1)
    assert plan.teacher is None and plan.phases[0].step.teacher == 0 and plan.phases[0].memory.teacher_head == 0
    text = "\n".join(render(plan, "x", "h100"))
    assert "1 GPU (no teacher)" in text
    assert "not in the times: the set's size is unknown" in text


def test_padding_is_that_of_drawn_lengths() -> None:
    """By count, documents padded to the longest; balanced, of near-equal length; packed, none but that of the multiple."""

    def share(kind: str, documents: int, multiple: int = 1) -> float:
        changes = ("--documents.micro_batching", kind, "--training.local_batch_size", str(documents))
        changes += ("--documents.pad_to_multiple_of", str(multiple))
        return valid_share(parse_config(["--job.config_file", str(REPOSITORY / GROW_8B), *changes]), 972, 8)

    assert share("count", 1) == 1.0
    shares = [share("count", documents) for documents in (2, 4, 8)]
    assert shares == sorted(shares, reverse=True) and 0.3 < shares[-1] < 0.45
    lengths = np.minimum(np.random.default_rng(1).lognormal(np.log(972) - 0.5, 1.0, size=(20_000, 8)), 8192)
    assert shares[-1] == pytest.approx(lengths.mean() / lengths.max(axis=1).mean(), rel=0.05)
    assert shares[-1] < share("balanced", 8) < 1.0 == share("packed", 8)
    assert 0.98 < share("packed", 1, multiple=128) < 1.0


def test_words_for_each_way_of_cutting() -> None:
    printed = {}
    for kind in ("packed", "balanced", "count"):
        plan = plan_of("train_configs/teacher.toml", 1, "--documents.micro_batching", kind)
        printed[kind] = "\n".join(render(plan, "x", "h100"))
        assert f"{plan.valid_share:.0%} of the micro-batches' tokens are then valid" in printed[kind]
    assert re.search(r"for each rank in packed micro-batches of at most [\d,]+ tokens", printed["packed"])
    assert re.search(r"for each rank in micro-batches of \d+ documents", printed["count"])
    assert "pad more" in printed["balanced"] and "pad more" in printed["count"] and "pad more" not in printed["packed"]


@pytest.mark.parametrize(
    ("first", "last", "freq", "expected"),
    [(1, 50_000, 2_000, 26), (50_001, 100_000, 2_000, 26), (1, 5, 2, 4), (6, 9, 4, 3), (6, 7, 10, 2)],
)
def test_validations_of_a_phase(first: int, last: int, freq: int, expected: int) -> None:
    """Against a loop over the steps: at the start, at every multiple and at the last step."""
    job_config = parse_config(["--job.config_file", str(REPOSITORY / GROW_8B), "--validation.freq", str(freq)])
    loop = 1 + sum(step % freq == 0 or step == last for step in range(first, last + 1))
    assert _validations(job_config, Phase(0, first, last, 1, 0)) == loop == expected


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(REPOSITORY / "train_configs/grow_post.toml")
    assert main([config, "--ngpu", "4", "--hardware", "a100", "--training.local_batch_size", "2"]) == 0
    assert "4 GPUs (2 for the student, 2 for the teacher)" in capsys.readouterr().out
    refused = {
        ("--placement", "up"): "--placement, up",
        ("--ngpu", "4", "--teacher.ranks", "4"): "teacher.ranks = 4 leaves no student rank",
        ("--block_stack.placement", "up"): 'block_stack.placement is "up"',
        ("--training.enable_cpu_offload",): "training.enable_cpu_offload is true, which a plan does not cover",
    }
    for arguments, words in refused.items():
        assert main([config, *arguments]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("Config error: ") and words in error
    for arguments in (("--mfu", "0"), ("--mfu", "1.5"), ("--ngpu", "0"), ("--tokens-per-document", "0")):
        with pytest.raises(SystemExit):
            main([config, *arguments])
        assert arguments[0] in capsys.readouterr().err


def test_ranks_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NGPU", raising=False)
    assert (default_ngpu(8), default_ngpu(-1), default_ngpu(0)) == (16, 2, 2)
    monkeypatch.setenv("NGPU", "12")
    assert default_ngpu(8) == 12


def test_as_a_program(tmp_path: Path) -> None:
    """From another folder, as a file: what is absent is noted, and nothing is written."""
    config = str(REPOSITORY / GROW_8B)
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "plan.py"), config],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k not in ("NGPU", "PYTHONPATH")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "2,981,181,696" in done.stdout and "16 GPUs" in done.stdout
    notes = done.stderr.splitlines()
    assert all(note.startswith("note: ") for note in notes), done.stderr
    assert any('teacher.path = "./assets/hf/Qwen3-8B-Base": there is no file or folder' in note for note in notes)
    assert not list(tmp_path.iterdir())
