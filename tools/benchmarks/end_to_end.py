"""A whole job against the loop that a user would write by hand with transformers: valid tokens per second, and memory.

    workload A   vocabulary 4,096: teacher of 8 layers, student of 3; the loop takes a step's 16 documents at once
    workload B   vocabulary 151,936: both of 2 layers; the loop takes 2 documents at a time

Both train the same weights on the same documents, capped at 256 tokens, with the same objective, clipping and AdamW, fp32
on two cores; that the loss of every step is the same to 1e-4 is a condition of the measurement. The job is started by the
launcher on a TOML config, with the environment of ``run_train.sh``, which keeps freed memory, in two layouts: colocated,
one rank with two threads; separate, student and teacher of one thread each. The loop (``hand_loop.py``) has two threads
and is written in three forms, of which the fastest counts; what one of them gains from that environment is beside it.

All of them stay alive and take their steps in turn (``pace.py``); a repeat is one window of steps of each, all on the
same documents. The clock runs from a window's first step to the end of its last, with everything that a job does in
between, and leaves out start-up and the two steps of warm-up, during which bytes of tensors are counted. Where a form of
the loop takes long and its rank is clear, it has one window only.

    python -m tools.benchmarks end_to_end
    python -m tools.benchmarks.end_to_end A         one workload
"""

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tools.benchmarks.hand_loop import FORMS
from tools.benchmarks.pace import KEEP_FREED, WARMUP_STEPS, Paced, Window, paced_job
from tools.benchmarks.rows import REPEATS, Row, at_least, at_most, median_ratio
from tools.benchmarks.workloads import LARGE_VOCABULARY, ProductRate, Workload

SUBJECT = "end_to_end"
THREADS = 2
LAYOUTS = {"colocated": (1, THREADS, 0), "separate": (2, THREADS // 2, 1)}
"""Ranks of the job, threads of a rank, ``teacher.ranks``."""
SAME_LOSS = 1e-4
TUNED = "longest, freed memory kept"
"""A second process of the loop: one of its forms, with the environment of ``run_train.sh``."""
BARS = {"A": (2.2, 1.0), "B": (3.0, 0.5)}
"""Valid tokens per second against the loop's, at least; bytes of tensors against the loop's, at most."""


def workload(name: str, folder: Path) -> Workload:
    """Workload A or B, to be written into an existing folder."""
    if name == "A":
        batches = 3
        return Workload(
            name="A",
            root=str(folder),
            flavor="tiny",
            teacher_layers=8,
            student_layers=3,
            batches=batches,
            loop_documents=16,
            local_batch_size=8,
            chunk_tokens=192,
            steps=batches * (1 + REPEATS) + 1,
        )
    return Workload(
        name="B",
        root=str(folder),
        flavor=LARGE_VOCABULARY,
        teacher_layers=2,
        student_layers=2,
        batches=1,
        loop_documents=2,
        local_batch_size=8,
        chunk_tokens=192,
        steps=WARMUP_STEPS + REPEATS + 1,
    )


@dataclass
class Measured:
    """What one workload gave: windows by layout of the job and by form of the loop, in the order of the repeats."""

    windows: dict[str, list[Window]] = field(default_factory=dict)
    memory: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """Of "loop" and each layout: what ``Paced.memory`` returns."""
    floor: list[float] = field(default_factory=list)
    """Valid tokens per second if nothing but the products of the valid tokens took time."""
    loss_difference: float = 0.0

    def rate(self, name: str) -> float:
        return statistics.median(self.rates(name))

    def rates(self, name: str) -> list[float]:
        return [window.rate for window in self.windows[name]]

    def tensors(self, name: str) -> int:
        """Bytes of tensors at most, over all processes of a layout or of the loop."""
        return sum(process["tensors"] for process in self.memory[name].values())


def run() -> Iterator[Row]:
    """Measure both workloads."""
    for name in BARS:
        yield from run_workload(name)


def run_workload(name: str) -> Iterator[Row]:
    """Measure one of the workloads."""
    with tempfile.TemporaryDirectory(prefix="blockgrow_benchmark_") as folder:
        work = workload(name, Path(folder))
        work.write()
        once = ("mask", "cap") if work.batches == 1 else ()
        yield from rows(work, measure(work, once))


def start(work: Workload) -> dict[str, Paced]:
    """Start the loop and the job in both layouts; they load while the first waits for its first step."""
    config = work.config_file()
    loop = [sys.executable, "-m", "tools.benchmarks.hand_loop", str(work.folder / "workload.json")]
    environment = {"OMP_NUM_THREADS": str(THREADS)}
    started = {
        "loop": Paced("the loop", work.folder / "loop", loop, environment),
        TUNED: Paced("the tuned loop", work.folder / "tuned_loop", loop, environment | KEEP_FREED),
    }
    for layout, (ranks, threads, teachers) in LAYOUTS.items():
        arguments = ["--teacher.ranks", str(teachers)]
        started[layout] = paced_job(f"the {layout} job", work.folder / layout, config, ranks, threads, arguments)
    return started


def measure(work: Workload, once: tuple[str, ...] = (), repeats: int = REPEATS) -> Measured:
    """Take the warm-up steps, then ``repeats`` windows of every layout and form, in turn; forms ``once`` have one.

    Raises:
        RuntimeError: If a process fails, or a step's loss is not the loop's.
    """
    measured = Measured({name: [] for name in (*FORMS, TUNED, *LAYOUTS)})
    documents = work.lengths()
    tokens = sum(documents)
    layer, head = (sum(parts) for parts in zip(*map(work.flops, documents), strict=True))
    torch.set_num_threads(THREADS)
    product_rate = ProductRate(work.args)
    losses: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        started = start(work)
        for paced in started.values():
            stack.enter_context(paced)
        for name, paced in started.items():
            warm = paced.advance(work.steps - repeats * work.batches - 1, "longest")
            losses[name] = [step["loss"] for step in warm.steps]
        for turn in range(repeats):
            measured.floor.append(tokens / product_rate.seconds(layer, head))
            for form in FORMS:
                if form not in once or turn == 0:
                    _advance(started["loop"], work, form, form, measured, losses["loop"])
            _advance(started[TUNED], work, TUNED, "longest", measured, losses[TUNED])
            for layout in LAYOUTS:
                _advance(started[layout], work, layout, layout, measured, losses[layout])
        measured.memory = {name: paced.memory() for name, paced in started.items()}
        for layout in LAYOUTS:  # up to here no job has ended, so none has disturbed another or got out of sight
            started[layout].advance(1)
            started[layout].finish()
    measured.loss_difference = _loss_difference(losses)
    return measured


def _advance(paced: Paced, work: Workload, name: str, word: str, measured: Measured, losses: list[float]) -> None:
    window = paced.advance(work.batches, word)
    measured.windows[name].append(window)
    losses += [step["loss"] for step in window.steps]


def _loss_difference(losses: Mapping[str, list[float]]) -> float:
    """The largest difference between a job's step and the loop's; raises ``RuntimeError`` if that is too large."""
    differences = [
        abs(ours - theirs) for layout in LAYOUTS for ours, theirs in zip(losses[layout], losses["loop"], strict=False)
    ]
    if not all(difference <= SAME_LOSS for difference in differences):
        raise RuntimeError(f"a step's loss differs from the loop's by more than {SAME_LOSS:g}: {losses}")
    return max(differences)


def rows(work: Workload, measured: Measured) -> Iterator[Row]:
    """The figures of a workload."""
    speed, memory = BARS[work.name]
    layout = max(LAYOUTS, key=measured.rate)
    form = max(FORMS, key=measured.rate)
    ratio = median_ratio(measured.rates(layout), measured.rates(form))
    settings = (
        f"{layout} against {form}; local_batch_size {work.local_batch_size}, chunk_tokens {work.chunk_tokens}, "
        f"prefetch {work.prefetch}"
    )
    yield at_least(SUBJECT, f"{work.name}: job against the fastest loop", ratio, "x", speed, settings)
    for name in LAYOUTS:
        yield Row(SUBJECT, f"{work.name}: job, {name}", measured.rate(name), "valid tok/s", note=_job(measured, name))
    for name, text in FORMS.items():
        windows = len(measured.windows[name])
        note = text if windows > 1 else f"{text}; one window only"
        yield Row(SUBJECT, f"{work.name}: loop, {name}", measured.rate(name), "valid tok/s", note=note)
    yield Row(SUBJECT, f"{work.name}: loop, {TUNED}", measured.rate(TUNED), "valid tok/s")
    tuned = median_ratio(measured.rates(layout), measured.rates(TUNED))
    yield Row(SUBJECT, f"{work.name}: job against the loop that keeps freed memory", tuned, "x")
    floor = statistics.median(measured.floor)
    yield Row(
        SUBJECT,
        f"{work.name}: job against the floor",
        median_ratio(measured.rates(layout), measured.floor),
        "x",
        note=f"{floor:,.0f} valid tok/s if only the valid tokens' matrix products took time",
    )
    yield at_most(
        SUBJECT,
        f"{work.name}: peak of tensors, job against the loop",
        measured.tensors(layout) / measured.tensors("loop"),
        "x",
        memory,
        layout,
    )
    for name in (*LAYOUTS, "loop"):
        resident = ", ".join(
            f"{role} {p['peak'] / 1e6:,.0f} MB resident, {p['imports'] / 1e6:,.0f} of it imports"
            for role, p in measured.memory[name].items()
        )
        yield Row(SUBJECT, f"{work.name}: peak of tensors, {name}", measured.tensors(name) / 1e6, "MB", note=resident)
    yield at_most(
        SUBJECT, f"{work.name}: largest difference of a step's loss", measured.loss_difference, "nats", SAME_LOSS
    )


def _job(measured: Measured, layout: str) -> str:
    steps = [step for window in measured.windows[layout] for step in window.steps]
    valid, processed, seconds, wait = (
        sum(step[name] for step in steps) for name in ("valid_tokens", "processed_tokens", "step_s", "teacher_wait_s")
    )
    return f"{valid / seconds:,.0f} by its own step_s, teacher wait {wait / seconds:.0%}, {valid / processed:.0%} valid"


def main(names: list[str]) -> None:
    from tools.benchmarks.__main__ import machine, table

    print(f"{machine()}\n", flush=True)
    for name in names or BARS:
        print(table(list(run_workload(name))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
