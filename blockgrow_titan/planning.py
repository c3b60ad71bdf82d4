"""What a run needs and costs, before a GPU is booked (``tools/plan.py`` prints it).

The config is checked as in a run, but neither weights nor documents nor a tokenizer have to be there. Each phase's
student, and the teacher, run the largest micro-batch on tensors without data, which gives memory and FLOPs
(``infra/footprint.py``). FLOPs over the hardware's peak times the utilisation give each world's time for a step; the
longer one is the step's, since the teacher works ahead; in each world it is the busiest rank's, which matters where
documents are dealt by count and do not divide evenly. Traffic on the bridge, tokens, hours and a better division of
the ranks follow by arithmetic.

Not in the times: loading, checkpoints, growth, and student ranks that wait for the one with the longest documents.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import numpy as np
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import get_train_spec

from blockgrow_titan.checks import check_config, check_ranks
from blockgrow_titan.documents.batches import row_multiple
from blockgrow_titan.documents.dealing import micro_batching_of
from blockgrow_titan.growth.schedule import Phase, schedule_of
from blockgrow_titan.infra.footprint import (
    StudentFootprint,
    TeacherFootprint,
    fake_world,
    student_flops,
    student_footprint,
    student_on_meta,
    teacher_flops,
    teacher_footprint,
)
from blockgrow_titan.infra.parallelize import data_parallel_dims
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.teacher.check import teacher_args
from blockgrow_titan.teacher.messages import teacher_dtype
from blockgrow_titan.teacher.worlds import WorldLayout

GIB = 2**30
TOKEN_ID_BYTES = 4

USABLE = 0.9
"""Share of a GPU's memory that tensors may fill: the rest is the allocator's, the collectives' and the CUDA context's."""

LENGTH_SIGMA = 1.0
"""Documents' lengths are taken to be log-normal with this sigma."""

DRAWN_DOCUMENTS = 5_000
"""How many lengths are drawn to estimate the padding, at least."""


@dataclass(frozen=True)
class Hardware:
    """A GPU, from its data sheet."""

    flops: float
    """Dense bf16 FLOP/s, accumulated in fp32."""
    memory: float
    """Bytes."""


HARDWARE = {
    "a100-40gb": Hardware(312e12, 40 * GIB),
    "a100": Hardware(312e12, 80 * GIB),
    "h100": Hardware(989e12, 80 * GIB),
    "h200": Hardware(989e12, 141 * GIB),
    "b200": Hardware(2250e12, 180 * GIB),
    "l40s": Hardware(362e12, 48 * GIB),
    "rtx3090": Hardware(71e12, 24 * GIB),
    "rtx4090": Hardware(165e12, 24 * GIB),
}


@dataclass(frozen=True)
class Assumptions:
    """What a config does not say."""

    hardware: Hardware
    mfu: float
    """Model FLOPs utilisation of both worlds; recomputation does not count as work."""
    tokens_per_document: float
    """Mean number of predicted tokens of a document, after truncation."""


@dataclass(frozen=True)
class Work:
    """FLOPs of some documents, over all ranks of each world."""

    documents: int
    student: float
    teacher: float


@dataclass(frozen=True)
class PhasePlan:
    """One phase: what the student is, what a rank of it holds, and the work of a step and of a validation."""

    phase: Phase
    layers: int
    parameters: int
    trainable: int
    memory: StudentFootprint
    step: Work
    validation: Work
    validations: int


@dataclass(frozen=True)
class Plan:
    """A job's ranks and phases."""

    job_config: JobConfig
    layout: WorldLayout
    assumptions: Assumptions
    phases: tuple[PhasePlan, ...]
    finished_parameters: int
    """Of the student with all of ``block_stack.num_blocks``."""
    hidden_size: int
    teacher: TeacherFootprint | None
    teacher_layers: int
    valid_share: float
    """Valid tokens among those of the micro-batches."""
    largest_micro_batch: int
    """Documents of ``training.seq_len`` tokens that fit on the GPUs in the last phase, at most ``rank_documents``."""

    @property
    def by_count(self) -> bool:
        """Whether micro-batches are cut by documents; else by tokens."""
        return self.job_config.documents.micro_batching == "count"

    @property
    def rank_documents(self) -> int:
        """The ``training.local_batch_size`` from which on a student rank has its whole step in one micro-batch."""
        training = self.job_config.training
        documents = -(-training.global_batch_size // self.layout.num_students)
        if self.by_count:
            return documents
        return max(1, math.ceil(documents * self.assumptions.tokens_per_document / training.seq_len))

    @property
    def step_tokens(self) -> float:
        """Valid tokens of a step."""
        return self.job_config.training.global_batch_size * self.assumptions.tokens_per_document

    @property
    def bridge_bytes(self) -> float:
        """Bytes of a step between the worlds: token ids one way, hidden states the other."""
        width = self.hidden_size * teacher_dtype(self.job_config).itemsize + TOKEN_ID_BYTES
        return self.step_tokens * width if self.layout.num_teachers else 0.0

    def world_seconds(self, work: Work, layout: WorldLayout | None = None) -> tuple[float, float]:
        """Time of some work in each world; a colocated teacher's is the student's."""
        layout = layout or self.layout
        seconds_per_flop = 1 / (self.assumptions.hardware.flops * self.assumptions.mfu * max(1, work.documents))
        of_student, of_teacher = busiest_documents(layout, work.documents, self.by_count)
        if not layout.num_teachers:
            return of_student * (work.student + work.teacher) * seconds_per_flop, 0.0
        return of_student * work.student * seconds_per_flop, of_teacher * work.teacher * seconds_per_flop

    def seconds(self, phase: PhasePlan, layout: WorldLayout | None = None) -> float:
        """Time of a phase's steps and validations."""
        step = max(self.world_seconds(phase.step, layout))
        validation = max(self.world_seconds(phase.validation, layout))
        return phase.phase.steps * step + phase.validations * validation

    def best_layout(self) -> WorldLayout:
        """The division of the same ranks that takes least time, among those that the config's other degrees allow."""
        degree, parallelism = self.job_config.teacher.shard_degree, self.job_config.parallelism
        replicate, shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
        candidates = [
            WorldLayout(students, self.layout.world_size - students)
            for students in range(self.layout.world_size - degree, 0, -degree)
            if students % replicate == 0 and shard in (-1, students // replicate)
        ]
        return min(candidates, key=lambda layout: sum(self.seconds(phase, layout) for phase in self.phases))


@cache
def busiest_documents(layout: WorldLayout, documents: int, by_count: bool) -> tuple[float, float]:
    """How many of some documents the busiest rank of each world gets, in the mean over many steps.

    By count students take them in turn; else they get equal work (``documents/dealing.py``), but no less than a document.
    Each deals its own in turn to the teachers that serve it.
    """

    def of_student(student: int) -> float:
        in_turn = len(range(student, documents, layout.num_students))
        return in_turn if by_count else max(documents / layout.num_students, min(1, in_turn))

    students, teachers = layout.num_students, layout.num_teachers
    if students >= teachers:  # the first teacher serves the most students, and of them those with the most documents
        return of_student(0), sum(of_student(s) for s in range(0, students, teachers)) if teachers else 0.0
    # of the students with equally many teachers the first has the most documents: student 0, or the first with one fewer
    return of_student(0), max(of_student(s) / len(layout.teachers_of(s)) for s in (0, teachers % students))


def valid_share(job_config: JobConfig, mean: float, student_ranks: int) -> float:
    """Share of valid tokens in the micro-batches of some steps, dealt as in a run, whose documents are drawn.

    Args:
        job_config: The job's config, with the number of documents of a global batch.
        mean: Tokens of a document, in the mean.
        student_ranks: Ranks that the documents are dealt to.
    """
    training = job_config.training
    rng = np.random.default_rng(0)
    location = np.log(mean) - LENGTH_SIGMA**2 / 2
    steps = -(-DRAWN_DOCUMENTS // training.global_batch_size)
    drawn = rng.lognormal(location, LENGTH_SIGMA, size=(steps, training.global_batch_size))
    micro_batching = micro_batching_of(job_config, "train", math.inf)
    multiple = row_multiple(job_config, training.seq_len)
    valid = processed = 0
    for lengths in np.clip(drawn, 1, training.seq_len).astype(int).tolist():
        valid += sum(lengths)
        for micro_batches in micro_batching.deal(lengths, student_ranks):
            for micro_batch in filter(None, micro_batches):
                tokens = [lengths[i] for i in micro_batch]
                rows, length = (1, sum(tokens)) if micro_batching.kind == "packed" else (len(tokens), max(tokens))
                processed += rows * -(-length // multiple) * multiple
    return valid / processed


def make_plan(job_config: JobConfig, ngpu: int, assumptions: Assumptions) -> Plan:
    """Measure every phase of a job on tensors without data.

    Args:
        job_config: The parsed config; its ``comm.mode`` becomes that of a dry run.
        ngpu: Ranks of the whole job.
        assumptions: What the config does not say.

    Raises:
        ValueError, NotImplementedError: For every reason of ``check_config``, and if the ranks do not fit.
    """
    job_config.comm.mode = "fake_backend"  # absent teacher and documents are warnings
    check_config(job_config, needs_tokenizer=False)
    training, teacher = job_config.training, job_config.teacher
    layout = WorldLayout.plan(ngpu, teacher.ranks, bool(teacher.path), teacher.shard_degree)
    check_ranks(job_config, layout.num_students)
    if training.global_batch_size == -1:
        training.global_batch_size = training.local_batch_size * layout.num_students
    args = cast(BlockStackArgs, get_train_spec(job_config.model.name).model_args[job_config.model.flavor])
    teacher_model = teacher_args(job_config, args) if teacher.path else None
    args.update_from_config(job_config)

    holders = layout.num_teachers or layout.num_students
    teacher_memory, per_document = _teacher_memory(job_config, teacher_model, holders)
    share = valid_share(job_config, assumptions.tokens_per_document, layout.num_students)
    with fake_world(0, layout.num_students):
        student = _Student(job_config, args, layout.num_students)
        flops = _Flops(job_config, args, teacher_model, assumptions.tokens_per_document, share)
        phases: list[PhasePlan] = []
        for phase in schedule_of(job_config).phases:
            validations = _validations(job_config, phase)
            if phases and student.args_of(phase) == student.args_of(phases[-1].phase):
                phases.append(replace(phases[-1], phase=phase, validations=validations))
                continue
            layers, memory = phase.active_blocks * args.layers_per_block, student.footprint(phase)
            step, validation = flops.of_step(phase), flops.of_validation(phase)
            phases.append(PhasePlan(phase, layers, *student.parameters(phase), memory, step, validation, validations))
        last = phases[-1]
        further = max(1, student.footprint(last.phase, training.local_batch_size + 1).peak - last.memory.peak)
        finished, _ = student.parameters(replace(last.phase, active_blocks=job_config.block_stack.num_blocks))
    capacity = USABLE * assumptions.hardware.memory
    largest = training.local_batch_size + (capacity - last.memory.peak) // further
    if teacher_memory is not None and layout.num_teachers:
        largest = min(largest, teacher_memory.documents + (capacity - teacher_memory.peak) // per_document)
    elif teacher_memory is not None:
        room = capacity - last.memory.peak - teacher_memory.peak
        largest = training.local_batch_size + room // (further + per_document)
    plan = Plan(
        job_config=job_config,
        layout=layout,
        assumptions=assumptions,
        phases=tuple(phases),
        finished_parameters=finished,
        hidden_size=args.dim,
        teacher=teacher_memory,
        teacher_layers=0 if teacher_model is None else teacher_model.n_layers,
        valid_share=share,
        largest_micro_batch=max(0, int(largest)),
    )
    return replace(plan, largest_micro_batch=min(plan.largest_micro_batch, plan.rank_documents))


def _teacher_memory(
    job_config: JobConfig, args: Qwen3ModelArgs | None, holders: int
) -> tuple[TeacherFootprint | None, int]:
    """What a rank of the teacher holds, and what a further document of its largest request would add to that."""
    if args is None:
        return None, 0
    with fake_world(0, holders):
        memory = teacher_footprint(job_config, args, holders)
        more = teacher_footprint(job_config, args, holders, documents=memory.documents + 1)
    return memory, max(1, more.peak - memory.peak)


def _validations(job_config: JobConfig, phase: Phase) -> int:
    """How many a phase has: at its start, every ``validation.freq`` steps, and at its last step."""
    if not job_config.validation.enable:
        return 0
    freq, last = job_config.validation.freq, phase.last_step
    return 1 + last // freq - (phase.first_step - 1) // freq + (last % freq > 0)


@dataclass(frozen=True)
class _Student:
    """The student of each phase, sharded over the ranks of the ``fake_world`` that is there."""

    job_config: JobConfig
    args: BlockStackArgs
    ranks: int

    def args_of(self, phase: Phase) -> BlockStackArgs:
        return self.args.for_phase(phase, self.job_config)

    def parameters(self, phase: Phase) -> tuple[int, int]:
        """All and trainable ones."""
        dims = data_parallel_dims(self.job_config, self.ranks)
        return student_on_meta(self.job_config, self.args_of(phase), dims)[1:]

    def footprint(self, phase: Phase, documents: int | None = None) -> StudentFootprint:
        dims = data_parallel_dims(self.job_config, self.ranks)
        return student_footprint(self.job_config, self.args_of(phase), dims, documents=documents)


@dataclass(frozen=True)
class _Flops:
    """Work of a job's micro-batches, all of them of the mean shape."""

    job_config: JobConfig
    args: BlockStackArgs
    teacher: Qwen3ModelArgs | None
    tokens_per_document: float
    valid_share: float

    def _of_documents(self, count: int, phase: Phase, train: bool) -> Work:
        rows = self.job_config.training.local_batch_size
        length = min(round(self.tokens_per_document / self.valid_share), self.job_config.training.seq_len)
        valid = min(round(rows * self.tokens_per_document), rows * length)
        args = self.args.for_phase(phase, self.job_config)
        student = student_flops(self.job_config, args, rows, length, valid_tokens=valid, train=train)
        teacher = 0 if self.teacher is None else teacher_flops(self.teacher, rows, length)
        return Work(count, count * student / rows, count * teacher / rows)

    def of_step(self, phase: Phase) -> Work:
        return self._of_documents(self.job_config.training.global_batch_size, phase, train=True)

    def of_validation(self, phase: Phase) -> Work:
        """Nothing where the config does not say how many documents there are."""
        validation = self.job_config.validation
        known = validation.enable and validation.dataset == "fineweb_edu"
        return self._of_documents(self.job_config.documents.held_out_documents if known else 0, phase, train=False)
