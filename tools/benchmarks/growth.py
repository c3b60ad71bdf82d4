"""What a growth costs: the time of the rebuild, what it sends, the memory it takes, and whether that comes back.

A job grows by one block at a time. Only the phase hooks are measured (rebuild the model, optimizer and learning rate,
rewire, log); the validation that follows is not. In the first growths, each after a few steps, the hooks' time is taken,
in units of the median step before them. In ten more, tensor bytes and collectives are counted:

    peak            the most that is alive during the hooks, over the training state of the deeper model: weights, rotary
                    table, gradients and AdamW's moments, as they are once it has taken a step
    peak of weights the same of a growth right after another one, before any step: there are no gradients or moments, so
                    that only the two models' weights count, over those of the deeper one
    left over       what is alive after the hooks and is not the deeper model's weights or rotary table

The teacher, on the same rank, is left out.
"""

import gc
import statistics
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from blockgrow_titan.growth.hooks import run_hooks
from blockgrow_titan.infra.footprint import TensorBytes
from blockgrow_titan.model.init import named_parameters
from tools.benchmarks.jobs import QWEN3_VOCAB, arguments, record_reports, synchronize, with_trainer, write_teacher
from tools.benchmarks.ranks import run_ranks
from tools.benchmarks.rows import REPEATS, Row, at_most

SUBJECT = "growth"
STEPS = 3
"""Steps before each growth whose time is taken, after one to warm up."""
COUNTED_GROWTHS = 10

# vocabulary -> flavor, documents a step, layers of the teacher
WORKLOADS = {4096: ("tiny", 16, 8), QWEN3_VOCAB: ("tiny_qwen3_vocab", 4, 2)}


class Collectives(TorchDispatchMode):
    """Counts collectives and the bytes of their inputs while the mode is on."""

    NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in self.NAMESPACES and "wait" not in func.__name__:
            self.calls += 1
            self.bytes += sum(value.nbytes for value in tree_iter(args) if isinstance(value, torch.Tensor))
        return func(*args, **(kwargs or {}))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of this rank's parameters and buffers."""
    return sum(_local(tensor).nbytes for tensor in (*model.parameters(), *model.buffers()))


def state_bytes(model: torch.nn.Module) -> int:
    """Bytes of this rank's training state: ``weight_bytes``, and for what trains a gradient and AdamW's two moments."""
    return weight_bytes(model) + 3 * sum(_local(p).nbytes for p in model.parameters() if p.requires_grad)


def training_tensors(trainer: Any) -> list[torch.Tensor]:
    """Everything that a trainer's model and optimizer hold on this rank."""
    (model,), (optimizer,) = trainer.model_parts, trainer.optimizers.optimizers
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.parameters(), *model.buffers(), *gradients, *moments]


def rebuild(trainer: Any, phase: Any) -> None:
    """``GrowthTrainer.grow`` without the validation."""
    old, trainer.phase = trainer.phase, phase
    trainer.step = phase.first_step
    run_hooks(trainer.hooks, trainer, old, phase)
    synchronize()


def _timed(trainer: Any, phase: Any, batches: Any, reports: list[Any]) -> dict[str, float]:
    """Train the steps before ``phase``, then grow into it."""
    reports.clear()
    for step in range(phase.first_step - 1 - STEPS, phase.first_step):
        trainer.step = step
        trainer.train_step(batches)
    step_s = statistics.median(report.step_s for report in reports[1:])
    started = time.perf_counter()
    rebuild(trainer, phase)
    return {"step_s": step_s, "rebuild_s": time.perf_counter() - started}


def _teachers_tensors(trainer: Any) -> list[torch.Tensor]:
    """The weights of the teacher on this rank, and the student's copy of its head."""
    client = trainer.teacher
    return [*client.teacher.model.parameters(), *client.teacher.model.buffers(), client.head_weight]


def _counted(trainer: Any, phase: Any, batches: Any, memory: TensorBytes, others: int, train: bool) -> dict[str, float]:
    """Grow into ``phase``, after a step if ``train``, and count."""
    if train:
        trainer.step = phase.first_step - 1
        trainer.train_step(batches)
    gone = [weakref.ref(trainer.model_parts[0]), weakref.ref(trainer.optimizers)]
    carried = {fqn for fqn, _ in named_parameters(trainer.model_parts[0])}
    memory.reset_peak()
    with Collectives() as collectives:
        rebuild(trainer, phase)
    gc.collect()
    (model,) = trainer.model_parts
    return {
        "peak": memory.peak - others,
        "left": memory.live - others - weight_bytes(model),
        "weights": weight_bytes(model),
        "state": state_bytes(model),
        "collectives": collectives.calls,
        "sent": collectives.bytes,
        "carried": sum(_local(param).nbytes for fqn, param in named_parameters(model) if fqn in carried),
        "alive": sum(reference() is not None for reference in gone),
    }


def grow(rank: int, world_size: int, command_line: list[str], timed: int) -> dict[str, list[dict[str, float]]]:
    """A job's growths on one rank: "timed" the first ones, "trained" and "bare" by turns the others."""

    def measure(trainer: Any) -> dict[str, list[dict[str, float]]]:
        results: dict[str, list[dict[str, float]]] = {"timed": [], "trained": [], "bare": []}
        reports = record_reports(trainer)
        batches = trainer.batch_generator(trainer.dataloader)
        phases = trainer.schedule.phases[1:]
        for phase in phases[:timed]:
            results["timed"].append(_timed(trainer, phase, batches, reports))
        with TensorBytes() as memory:
            memory.add(*_teachers_tensors(trainer))
            others = memory.live
            memory.add(*training_tensors(trainer))
            for turn, phase in enumerate(phases[timed:]):
                kind = "bare" if turn % 2 else "trained"
                results[kind].append(_counted(trainer, phase, batches, memory, others, kind == "trained"))
        return results

    result = with_trainer(measure, command_line)
    assert result is not None, f"rank {rank} of {world_size} is not the student's"
    return result


def job(folder: Path, vocab_size: int, timed: int, **overrides: Any) -> list[str]:
    """The command line of a job with ``timed`` growths and ``COUNTED_GROWTHS`` more, its teacher on the same ranks."""
    flavor, documents, layers = WORKLOADS[vocab_size]
    path = folder / f"teacher_{vocab_size}"
    if not path.exists():
        write_teacher(path, layers, vocab_size)
    phases = 1 + timed + COUNTED_GROWTHS
    common = {
        "model__flavor": flavor,
        "teacher__path": path,
        "teacher__ranks": 0,
        "teacher__prefetch": 0,
        "block_stack__num_blocks": phases,
        "growth__phase_steps": [1 + STEPS] * phases,
        "growth__active_blocks": list(range(1, 1 + phases)),
        "training__steps": phases * (1 + STEPS),
        "training__local_batch_size": 4,
        "training__global_batch_size": documents,
    }
    return arguments(folder, **(common | overrides))


def rows(name: str, by_rank: list[dict[str, list[dict[str, float]]]]) -> Iterator[Row]:
    """The figures of a workload: times of rank 0, the largest of the others over ranks and growths."""

    def largest(kind: str, numerator: str, denominator: str) -> float:
        return max(growth[numerator] / growth[denominator] for rank in by_rank for growth in rank[kind])

    timed = by_rank[0]["timed"]
    counted = [growth for rank in by_rank for growth in (*rank["trained"], *rank["bare"])]
    steps = statistics.median(growth["rebuild_s"] / growth["step_s"] for growth in timed)
    note = f"{statistics.median(g['rebuild_s'] for g in timed):.3f} s, a step {timed[0]['step_s']:.2f} to {timed[-1]['step_s']:.2f} s"  # fmt: skip
    yield at_most(SUBJECT, f"{name}: time of the rebuild", steps, "steps", 3, note)
    peak = largest("trained", "peak", "state")
    yield at_most(SUBJECT, f"{name}: peak / training state of the deeper model", peak, "x", 1.3)
    weights = largest("bare", "peak", "weights")
    yield at_most(SUBJECT, f"{name}: peak of weights / weights of the deeper model", weights, "x", 1.3)
    left = max(growth["left"] / growth["weights"] for growth in counted)
    yield at_most(SUBJECT, f"{name}: left over after a growth / weights", left, "x", 0.01)
    gained = max(rank["bare"][-1]["left"] - rank["bare"][0]["left"] for rank in by_rank) / counted[-1]["weights"]
    yield at_most(SUBJECT, f"{name}: more left over after the last growth than after the second / weights", gained, "x", 0.001)  # fmt: skip
    alive = sum(growth["alive"] for growth in counted)
    yield at_most(SUBJECT, f"{name}: old models and optimizers alive after {COUNTED_GROWTHS} growths", alive, "", 0)
    if len(by_rank) > 1:
        sent = sum(growth["sent"] for growth in counted)
        calls = sum(growth["collectives"] for growth in counted)
        carried = max(growth["carried"] for growth in counted) / 2**20
        note = f"in {calls:.0f} collectives; up to {carried:.1f} MiB carried on a rank"
        yield at_most(SUBJECT, f"{name}: bytes sent", sent, "B", 0, note)


def run() -> Iterator[Row]:
    """All figures of the subject."""
    for vocab_size in WORKLOADS:
        for world_size in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                command_line = job(Path(folder), vocab_size, REPEATS)
                results = run_ranks(f"{__name__}:grow", world_size, command_line=command_line, timed=REPEATS)
            yield from rows(f"vocabulary {vocab_size:,}, {world_size} rank{'s'[: world_size - 1]}", results)
