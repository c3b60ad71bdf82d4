"""Print what a run needs and costs, before a GPU is booked: memory, work, traffic and time of each phase.

    python -m tools.plan train_configs/qwen3_8b/grow_post.toml --ngpu 16 --hardware h100

No GPU, weights, documents or tokenizer are needed. ``blockgrow_titan/planning.py`` says how the figures come about.
"""

import argparse
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's package, however the file is run
from tools.environment import enter  # noqa: E402

if __name__ == "__main__":
    enter(__file__)

from blockgrow_titan.infra import device  # noqa: E402, F401  (before torchtitan: see there)

from torchtitan.tools.logging import logger  # noqa: E402  # isort: skip

from blockgrow_titan.documents.dealing import micro_batching_of  # noqa: E402
from blockgrow_titan.metrics import plural  # noqa: E402
from blockgrow_titan.parse import parse_config  # noqa: E402
from blockgrow_titan.planning import GIB, HARDWARE, USABLE, Assumptions, Plan, make_plan  # noqa: E402

BALANCED = 0.97  # a division of the ranks that saves less than 3% is not worth a change


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Right-aligned columns under their headers."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
    return ["  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in (headers, *rows)]


def gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def render(plan: Plan, name: str, hardware: str) -> list[str]:
    """The plan as lines for the console."""
    sections = (
        assumption_lines(plan, name, hardware),
        student_lines(plan),
        memory_lines(plan),
        work_lines(plan),
        run_lines(plan),
        balance_lines(plan),
    )
    return [line for section in sections for line in (*section, "")][:-1]


def assumption_lines(plan: Plan, name: str, hardware: str) -> list[str]:
    layout, given, training = plan.layout, plan.assumptions, plan.job_config.training
    world = f"{layout.num_students} for the student, {layout.num_teachers} for the teacher"
    if not layout.num_teachers:
        world = "the teacher on the student's" if plan.teacher else "no teacher"
    lines = [
        f"Plan of {name}: {plural(layout.world_size, 'GPU')} ({world})",
        f"  {hardware}: {given.hardware.flops / 1e12:,.0f} TFLOP/s (bf16, dense), {given.hardware.memory / GIB:.0f} GiB; "
        f"assumed utilisation (MFU) {given.mfu:.2f}",
        f"  global batch of {training.global_batch_size} documents of at most {training.seq_len:,} tokens, for each rank in "
        f"{micro_batching_of(plan.job_config, 'train', math.inf)}",
        f"  assumed mean of {given.tokens_per_document:,.0f} tokens a document; {plan.valid_share:.0%} of the micro-batches' "
        "tokens are then valid",
    ]
    if training.mixed_precision_param != "bfloat16":
        lines.append(
            f"  training.mixed_precision_param is {training.mixed_precision_param}: the rate above is bf16's, so the "
            "times below are too short"
        )
    return lines


def student_lines(plan: Plan) -> list[str]:
    headers = ("phase", "steps", "blocks", "layers", "total parameters", "active", "trainable")
    rows = [
        (
            str(p.phase.index),
            f"{p.phase.first_step:,}-{p.phase.last_step:,}",
            str(p.phase.active_blocks),
            str(p.layers),
            f"{plan.finished_parameters:,}",
            f"{p.parameters:,}",
            f"{p.trainable:,}",
        )
        for p in plan.phases
    ]
    return [
        "Student (total: of the finished one; active: in the phase, embedding and head included)",
        *table(headers, rows),
    ]


def memory_lines(plan: Plan) -> list[str]:
    config = plan.job_config
    headers = ("phase", "weights", "gradients", "optimizer", "teacher head", "answer", "activations", "loss", "peak")
    rows = []
    for p in plan.phases:
        m = p.memory
        parts = (m.weights, m.gradients, m.optimizer, m.teacher_head, m.answer, m.activations, m.loss, m.peak)
        rows.append((str(p.phase.index), *map(gib, parts)))
    lines = [
        f"Memory of a student GPU in GiB, with the largest micro-batch ({config.training.local_batch_size} x "
        f'{config.training.seq_len:,} valid tokens, activation checkpointing "{config.activation_checkpoint.mode}")',
        *table(headers, rows),
        "  activations: what the layers keep for the backward, and gathered weights; loss: logits of "
        f"{config.distill.chunk_tokens:,} tokens (distill.chunk_tokens)",
        "  and the head's gradient. The peak may be in the loss, the backward, the optimizer's step or a validation",
    ]
    if waiting := plan.phases[-1].memory.prefetch:
        lines.append(
            f"  answers that wait in host memory, a student rank: up to {gib(waiting)} GiB (teacher.prefetch = "
            f"{config.teacher.prefetch})"
        )
    if plan.teacher is not None:
        where = "a teacher GPU" if plan.layout.num_teachers else "the teacher on each student GPU, on top of the above,"
        lines.append(
            f"Memory of {where} in GiB ({plural(plan.teacher_layers, 'layer')}, {config.teacher.dtype}, one copy on "
            f"{plural(config.teacher.shard_degree, 'GPU')}): weights {gib(plan.teacher.weights)}, peak "
            f"{gib(plan.teacher.peak)}"
        )
    return lines


def work_lines(plan: Plan) -> list[str]:
    headers = (
        "phase",
        "tokens",
        "student TFLOP",
        "teacher TFLOP",
        "student s",
        "teacher s",
        "step s",
        "bound by",
        "bridge GB/s",
    )
    rows = []
    for p in plan.phases:
        student, teacher = plan.world_seconds(p.step)
        step = max(student, teacher)
        rows.append(
            (
                str(p.phase.index),
                f"{plan.step_tokens:,.0f}",
                f"{p.step.student / 1e12:,.1f}",
                f"{p.step.teacher / 1e12:,.1f}",
                f"{student:.3f}",
                f"{teacher:.3f}" if teacher else "-",
                f"{step:.3f}",
                "teacher" if teacher > student else "student",
                f"{plan.bridge_bytes / step / 1e9:.2f}" if teacher else "-",
            )
        )
    lines = ["Work of a step (valid tokens; model FLOPs, recomputation not counted)", *table(headers, rows)]
    if plan.bridge_bytes:
        routes = len(plan.layout.routes())
        lines.append(
            f"  bridge: {plan.bridge_bytes / 1e6:,.1f} MB a step (token ids to the teacher, hidden states back), over "
            f"{plural(routes, 'pair')} of ranks"
        )
    return lines


def run_lines(plan: Plan) -> list[str]:
    headers = ("phase", "steps", "tokens", "active-layer tokens", "hours", "GPU-hours")
    rows = []
    totals = [0.0] * 5
    for p in plan.phases:
        tokens, hours = p.phase.steps * plan.step_tokens, plan.seconds(p) / 3600
        values = [p.phase.steps, tokens, tokens * p.layers, hours, hours * plan.layout.world_size]
        totals = [a + b for a, b in zip(totals, values, strict=True)]
        rows.append((str(p.phase.index), *_run_cells(values)))
    rows.append(("all", *_run_cells(totals)))
    validations = sum(p.validations for p in plan.phases)
    counted = any(p.validation.student for p in plan.phases)
    return [
        "Run",
        *table(headers, rows),
        f"  {plural(validations, 'validation')}, "
        + ("counted" if counted else "not in the times: the set's size is unknown"),
    ]


def _run_cells(values: Sequence[float]) -> tuple[str, ...]:
    steps, tokens, active, hours, gpu_hours = values
    return f"{steps:,.0f}", f"{tokens:,.0f}", f"{active:,.0f}", f"{hours:,.2f}", f"{gpu_hours:,.1f}"


def balance_lines(plan: Plan) -> list[str]:
    lines = ["What to change"]
    training, memory = plan.job_config.training, plan.assumptions.hardware.memory
    limit = USABLE * memory
    colocated = plan.teacher is not None and not plan.layout.num_teachers
    student_peak = max(p.memory.peak for p in plan.phases) + (plan.teacher.peak if plan.teacher and colocated else 0)
    if student_peak > limit:
        lines.append(
            f"  does not fit: a student GPU needs {gib(student_peak)} GiB of {gib(memory)}, of which {USABLE:.0%} can be "
            "filled. Lower training.local_batch_size, training.seq_len or distill.chunk_tokens, use "
            '[activation_checkpoint] mode = "full", or add student ranks'
        )
    if plan.teacher is not None and not colocated and plan.teacher.peak > limit:
        lines.append(
            f"  does not fit: a teacher GPU needs {gib(plan.teacher.peak)} GiB of {gib(memory)}. Raise teacher.shard_degree"
        )
    if plan.largest_micro_batch > 0:
        whole = plan.largest_micro_batch == plan.rank_documents
        more = "" if plan.job_config.documents.micro_batching == "packed" else " but pad more"
        lines.append(
            f"  micro-batch: training.local_batch_size is {training.local_batch_size}; there is memory for "
            f"{plan.largest_micro_batch}, {'which holds' if whole else f'and {plan.rank_documents} would hold'} all that a "
            f"student rank has in a step. Larger micro-batches launch fewer kernels{more}"
        )
    if plan.teacher is None or colocated:
        return lines
    best = plan.best_layout()
    now, then = (sum(plan.seconds(p, layout) for p in plan.phases) / 3600 for layout in (plan.layout, best))
    if then < BALANCED * now:
        lines.append(
            f"  balance: teacher.ranks = {best.num_teachers} ({best.num_students} student ranks) would take {then:,.2f} h "
            f"instead of {now:,.2f} h; plan it with --teacher.ranks {best.num_teachers} for its memory"
        )
    else:
        lines.append(
            f"  balance: no other division of {plan.layout.world_size} ranks saves more than {1 - BALANCED:.0%}"
        )
    return lines


def default_ngpu(teacher_ranks: int) -> int:
    """NGPU, else twice the teacher's ranks, else two."""
    return int(os.environ.get("NGPU") or 0) or (2 * teacher_ranks if teacher_ranks > 0 else 2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.plan",
        description="Print what a run needs and costs, before a GPU is booked: parameters, memory of each GPU, work and "
        "bridge traffic of a step, time and GPU-hours of each phase, and how to divide the ranks better. Needs no GPU, "
        "weights, documents or tokenizer; where the teacher's files are absent, its dimensions are the flavor's.",
        epilog="Further arguments override fields of the config, for example --training.local_batch_size 2.",
    )
    parser.add_argument("config", metavar="CONFIG", help="the job's TOML file")
    parser.add_argument("--ngpu", type=int, help="ranks of the whole job (default: $NGPU, else twice teacher.ranks)")
    parser.add_argument("--hardware", choices=HARDWARE, default="h100", help="the GPU (default: %(default)s)")
    parser.add_argument(
        "--mfu", type=float, default=0.4, help="model FLOPs utilisation of both worlds (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens-per-document",
        type=float,
        default=972,
        help="mean of predicted tokens, at most seq_len - 1 are taken (default: %(default)s, FineWeb-Edu's in the paper)",
    )
    options, overrides = parser.parse_known_args(arguments)
    if not 0 < options.mfu <= 1:
        parser.error(f"--mfu is {options.mfu}; it must be above 0 and at most 1")
    if not options.tokens_per_document >= 1:  # nan neither
        parser.error(f"--tokens-per-document is {options.tokens_per_document}; it must be at least 1")
    if options.ngpu is not None and options.ngpu < 1:
        parser.error(f"--ngpu is {options.ngpu}; it must be at least 1")
    logging.basicConfig(level=logging.WARNING, format="note: %(message)s", stream=sys.stderr)
    logger.setLevel(logging.WARNING)
    try:
        job_config = parse_config(["--job.config_file", options.config, *overrides])
        ngpu = options.ngpu or default_ngpu(job_config.teacher.ranks)
        tokens = min(options.tokens_per_document, job_config.training.seq_len - 1)
        plan = make_plan(job_config, ngpu, Assumptions(HARDWARE[options.hardware], options.mfu, tokens))
    except (ValueError, NotImplementedError) as error:
        print(f"Config error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print("\n".join(render(plan, options.config, options.hardware)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
