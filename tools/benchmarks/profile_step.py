"""Where the time of a training step goes: torch.profiler over some steps of a colocated job, by what the work is for.

    python -m tools.benchmarks.profile_step A     vocabulary 4,096: teacher of 8 layers, student of 3
    python -m tools.benchmarks.profile_step B     vocabulary 151,936: both of 2 layers

The workloads are those of ``end_to_end``, on one rank with two threads. Operations are put down to the innermost of the
marks that they run under; those of the backward to the mark of the forward operation that they differentiate. The floor
is what the matrix products of the valid tokens alone would take, at a rate measured in the same process.
"""

import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from tools.benchmarks import end_to_end
from tools.benchmarks.ranks import run_ranks
from tools.benchmarks.workloads import ProductRate, Workload

WARMUP_STEPS, STEPS, THREADS = 2, 3, 2
MARK = "mark: "
TEACHER, ATTENTION, FEED_FORWARD = "teacher's layers", "student's attention", "student's feed-forward"
PRODUCTS, SOFTMAX = "loss: matrix products of the heads", "loss: softmaxes and gradient of the logits"
OPTIMIZER, CLIP, FSDP = "optimizer", "clipping", "FSDP (gather, reduce, copies)"
OTHER, BETWEEN = "other operations (norms, embedding, residuals)", "Python between operations"
STUDENT, STEP = "student's attention and feed-forward", "benchmark's step"
_BACKWARD = "autograd::engine::evaluate_function"


def marked(function: Callable[..., Any], mark: str) -> Callable[..., Any]:
    """The function, with its work put down to ``mark``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(MARK + mark):
            return function(*args, **kwargs)

    return run


def own_mark(event: FunctionEvent) -> str | None:
    """What an event itself says its work is for."""
    name = event.name
    if name.startswith(MARK):
        return name.removeprefix(MARK)
    if name.startswith("ChunkedDistillation"):  # the autograd node, forward and backward
        return SOFTMAX
    if name.startswith("Optimizer.step#"):
        return OPTIMIZER
    return FSDP if name.startswith(("FSDP::", "c10d::", "gloo:")) else None


def mark_of(event: FunctionEvent) -> str | None:
    """The innermost mark that an event runs under."""
    at: FunctionEvent | None = event
    while at is not None:
        if (mark := own_mark(at)) is not None:
            return mark
        at = at.cpu_parent
    return None


def marks(events: Iterable[FunctionEvent]) -> list[tuple[FunctionEvent, str]]:
    """What each of one thread's events is for."""
    events = sorted(events, key=lambda event: event.time_range.start)
    forward = {e.sequence_nr: mark_of(e) for e in events if e.sequence_nr >= 0 and not _differentiates(e)}
    found = []
    for event in events:
        mark = mark_of(event)
        if mark is None and (node := _differentiates(event)) is not None:
            mark = forward.get(node.sequence_nr)
        if mark == SOFTMAX and event.name in ("aten::mm", "aten::addmm_", "aten::addmm"):
            mark = PRODUCTS
        found.append((event, mark or OTHER))
    return found


def by_mark(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Seconds by mark, of one thread's events."""
    seconds: dict[str, float] = defaultdict(float)
    for event, mark in marks(events):
        seconds[mark] += event.self_cpu_time_total / 1e6
    return dict(seconds)


def _differentiates(event: FunctionEvent) -> FunctionEvent | None:
    """The backward's node that an event runs in."""
    at: FunctionEvent | None = event
    while at is not None and not at.name.startswith(_BACKWARD):
        at = at.cpu_parent
    return at


def profiled(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Run a job for ``run_ranks`` and profile its last steps.

    Returns:
        Of the mean step "valid_tokens", "seconds" by mark, "step" in all, and "floor", which ``floor`` returns.
    """
    from torchtitan.models.qwen3.model.model import Attention, FeedForward

    from blockgrow_titan import trainer as trainer_module
    from blockgrow_titan.parse import parse_config
    from blockgrow_titan.teacher.model import TeacherModel
    from blockgrow_titan.teacher.worlds import rendezvous
    from blockgrow_titan.train import launch

    trainer, utils = trainer_module.GrowthTrainer, trainer_module.dist_utils
    TeacherModel.hidden_states = marked(TeacherModel.hidden_states, TEACHER)  # type: ignore[method-assign]
    utils.clip_grad_norm_ = marked(utils.clip_grad_norm_, CLIP)
    train_step, profiler = trainer.train_step, profile(activities=[ProfilerActivity.CPU])

    def step(self: Any, data_iterator: Any) -> None:
        if self.step == WARMUP_STEPS + 1:
            for module in self.model_parts[0].modules():
                if isinstance(module, Attention | FeedForward):
                    mark = ATTENTION if isinstance(module, Attention) else FEED_FORWARD
                    module.forward = marked(module.forward, mark)
            profiler.start()
        with record_function(STEP):
            train_step(self, data_iterator)
        if self.step == WARMUP_STEPS + STEPS:
            profiler.stop()

    trainer.train_step = step  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        work = end_to_end.workload(name, Path(folder))
        work.write()
        steps = str(WARMUP_STEPS + STEPS)
        arguments = ["--job.config_file", str(work.config_file()), "--job.dump_folder", f"{folder}/dump"]
        arguments += ["--teacher.ranks", "0", "--training.steps", steps, "--growth.phase_steps", steps]
        arguments += ["--model.name", "qwen3_block_stack", "--experimental.custom_import", "tools.benchmarks.workloads"]
        launch(parse_config(arguments), *rendezvous())
        return _summary(profiler.events(), work)


def _summary(events: Iterable[FunctionEvent], work: Workload) -> dict[str, Any]:
    steps = [event for event in events if event.name == STEP]
    assert len(steps) == STEPS
    total = sum(event.cpu_time_total for event in steps) / 1e6
    seconds = by_mark(event for event in events if event.thread == steps[0].thread and event.name != STEP)
    seconds[BETWEEN] = total - sum(seconds.values())
    return {"step": total / STEPS, "seconds": {mark: spent / STEPS for mark, spent in seconds.items()}} | floor(work)


def floor(work: Workload) -> dict[str, Any]:
    """Mean seconds of a step's products at the rate measured now, by mark."""
    lengths = work.lengths()
    rate = ProductRate(work.args)
    layers, head = (sum(parts) / work.batches for parts in zip(*map(work.flops, lengths), strict=True))
    teacher = layers * work.teacher_layers / (work.teacher_layers + 3 * work.student_layers)
    floors = {
        TEACHER: rate.seconds(teacher, 0),
        STUDENT: rate.seconds(layers - teacher, 0),
        PRODUCTS: rate.seconds(0, head),
    }
    return {"valid_tokens": sum(lengths) / work.batches, "floor": floors}


def table(name: str, result: dict[str, Any]) -> str:
    """A workload's profile as Markdown."""
    step, floors = result["step"], dict(result["floor"])
    lines = [
        f"| {name}: {result['valid_tokens']:,.0f} valid tokens a step | ms | share | floor, ms |",
        "|---|---:|---:|---:|",
    ]
    for mark, seconds in sorted(result["seconds"].items(), key=lambda item: -item[1]):
        least = f"{1000 * floors[mark]:,.0f}" if mark in floors else ""
        lines.append(f"| {mark} | {1000 * seconds:,.0f} | {seconds / step:.0%} | {least} |")
    lines.append(
        f"| {STUDENT}, together | {1000 * _student(result):,.0f} | {_student(result) / step:.0%} | {1000 * floors[STUDENT]:,.0f} |"
    )
    lines.append(f"| the step | {1000 * step:,.0f} | 100% | {1000 * sum(floors.values()):,.0f} |")
    return "\n".join(lines)


def _student(result: dict[str, Any]) -> float:
    return sum(result["seconds"].get(mark, 0.0) for mark in (ATTENTION, FEED_FORWARD))


def main(names: Sequence[str]) -> None:
    for name in names or ("A", "B"):
        (result,) = run_ranks("tools.benchmarks.profile_step:profiled", 1, threads=THREADS, name=name)
        print(table(name, result), end="\n\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
