"""A teacher that is never waited for: its step beside the student's, and what the bridge between them carries.

    student-only    the trainer's own steps; the teacher's answers are already in memory
    teacher-only    the same micro-batches, all asked for at once; the student does nothing but collect
    both            the real job, teacher in its own world, ``teacher.prefetch`` micro-batches ahead

The three take turns in one job, on one rank and one thread each. Where both hide behind one another, a step takes the
longer of the two. On one rank (colocated) it takes their sum.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.tools.utils import device_type

from blockgrow_titan.infra.footprint import TensorBytes
from blockgrow_titan.teacher.bridge import Pair, connect
from blockgrow_titan.teacher.messages import Header, Kind, Limits
from blockgrow_titan.teacher.worlds import STUDENT, TEACHER, World, WorldLayout, rendezvous
from tools.benchmarks.jobs import arguments, record_reports, synchronize, with_trainer, write_teacher
from tools.benchmarks.ranks import run_ranks
from tools.benchmarks.rows import REPEATS, Row, at_most, median_ratio

SUBJECT = "overlap"
STEPS = 4
"""Steps of a turn that count; one before them warms up, and the look-ahead reaches into one after them."""

# workload -> blocks of the student, layers of the teacher
WORKLOADS = {"teacher slower": (1, 16), "about equal": (1, 8), "teacher faster": (3, 8)}
HIDDEN_SIZE = 1024
MESSAGE_BYTES = [2**16, 2**18, 2**20, 2**22, 2**24, 2**25, 2**26, 2**27]


class Replayed:
    """A teacher's client whose answers are in memory, in the order in which they will be asked for."""

    def __init__(self, client: Any, answers: list[torch.Tensor]) -> None:
        self.client, self.answers, self.asked = client, answers, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def submit(self, *args: Any, **kwargs: Any) -> int:
        self.asked += 1
        return self.asked - 1

    def result(self, ticket: int) -> torch.Tensor:
        return self.answers[ticket]

    def pop_wait_seconds(self) -> float:
        return 0.0


def _rest(batches: Iterator[tuple[dict[str, Any], torch.Tensor]]) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """A trainer's micro-batches until there are no more."""
    try:
        yield from batches
    except DataloaderExhaustedError:
        return


def _micro_batches(trainer: Any, first_step: int, last_step: int) -> list[Any]:
    """What the trainer's loader gives for these steps."""
    trainer.dataloader.first_step, trainer.dataloader.last_step = first_step, last_step
    return list(trainer.dataloader)


class Turns:
    """Bursts of one trainer's steps, over the same documents each time."""

    def __init__(self, trainer: Any, steps: int) -> None:
        self.trainer, self.steps, self.client = trainer, steps, trainer.teacher
        self.reports = record_reports(trainer)
        self.batches = _micro_batches(trainer, 1, steps + 2)
        self.counted = _micro_batches(trainer, 2, steps + 1)
        self.answers = self._ask(self.batches)

    def _ask(self, batches: list[Any]) -> list[torch.Tensor]:
        """The teacher's answers to all micro-batches, which are submitted before the first is taken."""
        self.trainer.teacher = self.client
        teacher = self.trainer.job_config.teacher
        saved, teacher.prefetch = teacher.prefetch, len(batches)
        answers = [self.client.result(inputs["ticket"]) for inputs, _ in _rest(self.trainer.batch_generator(batches))]
        teacher.prefetch = saved
        synchronize()
        self.client.pop_wait_seconds()
        return answers

    def teacher_only(self) -> dict[str, float]:
        """Seconds a step of the teacher alone."""
        started = time.perf_counter()
        self._ask(self.counted)
        return {"teacher": (time.perf_counter() - started) / self.steps}

    def student_only(self) -> dict[str, float]:
        """Seconds a step of the student alone."""
        return {"student": self._train(Replayed(self.client, self.answers))["both"]}

    def both(self) -> dict[str, float]:
        """Seconds a step of the job as it is, and the seconds of it that the student waited."""
        return self._train(self.client)

    def _train(self, client: Any) -> dict[str, float]:
        trainer = self.trainer
        trainer.teacher, trainer.step = client, 0
        batches = trainer.batch_generator(self.batches)
        self.reports.clear()
        for _ in range(1 + self.steps):
            trainer.step += 1
            trainer.train_step(batches)
        reports = self.reports[1:]
        for inputs, _ in _rest(batches):  # what the look-ahead had asked for
            client.result(inputs["ticket"])
        client.pop_wait_seconds()
        return {
            "both": statistics.median(report.step_s for report in reports),
            "wait": statistics.median((report.teacher_wait_s or 0.0) / report.step_s for report in reports),
        }


def turns(
    rank: int, world_size: int, command_line: list[str], steps: int, repeats: int
) -> dict[str, list[float]] | None:
    """On a student's rank: median seconds a step of each kind of burst, by repeat; None on a teacher's rank."""

    def measure(trainer: Any) -> dict[str, list[float]]:
        bursts = Turns(trainer, steps)
        seconds: dict[str, list[float]] = {"student": [], "teacher": [], "both": [], "wait": []}
        for turn in range(1 + repeats):
            for burst in (bursts.student_only, bursts.teacher_only, bursts.both):
                for name, value in burst().items():
                    if turn:
                        seconds[name].append(value)
        return seconds

    return with_trainer(measure, command_line)


def job(folder: Path, blocks: int, teacher_layers: int, teacher_ranks: int, **overrides: Any) -> list[str]:
    """The command line of a workload: 8 documents a step, capped at 256 tokens, vocabulary 4,096."""
    path = folder / f"teacher_{teacher_layers}"
    if not path.exists():
        write_teacher(path, teacher_layers)
    common = {
        "teacher__path": path,
        "teacher__ranks": teacher_ranks,
        "block_stack__num_blocks": blocks,
        "growth__phase_steps": [1000],
        "growth__active_blocks": [blocks],
        "training__steps": 1000,
        "training__local_batch_size": 2,
        "training__global_batch_size": 8,
    }
    return arguments(folder, **(common | overrides))


def _separate(folder: Path, name: str) -> Iterator[Row]:
    blocks, layers = WORKLOADS[name]
    command_line = job(folder, blocks, layers, teacher_ranks=1)
    times = run_ranks(f"{__name__}:turns", 2, command_line=command_line, steps=STEPS, repeats=REPEATS)[0]
    longer = [max(pair) for pair in zip(times["student"], times["teacher"], strict=True)]
    note = "student {student:.3f} s, teacher {teacher:.3f} s, both {both:.3f} s".format(**_medians(times))
    ratio = median_ratio(times["both"], longer)
    yield at_most(SUBJECT, f"{name}: step / the longer of student-only and teacher-only", ratio, "x", 1.15, note)
    wait = statistics.median(times["wait"])
    figure = f"{name}: teacher_wait_s / step"
    if _medians(times)["teacher"] < _medians(times)["student"]:
        yield at_most(SUBJECT, figure, wait, "", 0.05)
    else:
        yield Row(SUBJECT, figure, wait, "")


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def _colocated(folder: Path) -> Iterator[Row]:
    blocks, layers = WORKLOADS["teacher faster"]
    command_line = job(folder, blocks, layers, teacher_ranks=0)
    times = run_ranks(f"{__name__}:turns", 1, command_line=command_line, steps=STEPS, repeats=REPEATS)[0]
    both = [a + b for a, b in zip(times["student"], times["teacher"], strict=True)]
    note = "student {student:.3f} s, teacher {teacher:.3f} s, both {both:.3f} s".format(**_medians(times))
    ratio = median_ratio(times["both"], both)
    yield at_most(SUBJECT, "colocated: step / student-only plus teacher-only", ratio, "x", 1.05, note)


class CountedGroup:
    """A pair's process group that counts the bytes it is given to send."""

    def __init__(self, group: Any) -> None:
        self.group, self.sent = group, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def send(self, tensors: list[torch.Tensor], *args: Any) -> Any:
        self.sent += sum(tensor.nbytes for tensor in tensors)
        return self.group.send(tensors, *args)


def bridge(rank: int, world_size: int, message_bytes: list[int], repeats: int) -> dict[str, Any]:
    """Round trips of a small request and a large answer, over a ``Pair`` and over gloo's bare send and receive in turn.

    The bare receive has one buffer for all, a ``Pair`` a new one for each answer: on CPU, first touching the pages of a
    large one takes about as long as its way. Pinned buffers are kept by torch's allocator.

    Returns:
        On the student's rank "pair" and "raw": by size, the seconds of each round trip. On the teacher's rank "sent",
        the bytes that its pair sent, and "copied", the largest share of an answer that was allocated to send it.
    """
    store, _, _ = rendezvous()
    role = STUDENT if rank == 0 else TEACHER
    world = World(WorldLayout(1, 1), role, 0, 1, rank, store, "localhost")
    store.set(f"host/{rank}", world.host)
    world.start_heartbeat()
    device = torch.device(device_type, 0) if device_type != "cpu" else torch.device("cpu")
    rows = [size // (4 * HIDDEN_SIZE) for size in message_bytes]
    limits = Limits(1, max(rows), max(rows), vocab_size=1000, hidden_size=HIDDEN_SIZE, dtype=torch.float32)
    (pair,), inbox = connect(world, [1 - rank], limits, device, 60.0)
    raw: Any = ProcessGroupGloo(PrefixStore("raw", store), rank, 2, timedelta(seconds=60))
    try:
        if role == STUDENT:
            return _ask_bridge(pair, inbox, raw, rows, repeats)
        return _serve_bridge(pair, inbox, raw, rows, repeats)
    finally:
        pair.stop(60.0)
        world.close()


def _ask_bridge(pair: Pair, inbox: Any, raw: Any, rows: list[int], repeats: int) -> dict[str, Any]:
    times: dict[str, list[list[float]]] = {"pair": [], "raw": []}
    for count in rows:
        ids, lengths = torch.zeros(count, dtype=torch.int64), torch.tensor([count])
        asked, answer = torch.zeros(count, dtype=torch.int32), torch.empty(count, HIDDEN_SIZE)
        for values in times.values():
            values.append([])
        for turn in range(1 + repeats):
            started = time.perf_counter()
            pair.send_request(turn, ids, lengths)
            message = inbox.get(60.0)
            assert message is not None and len(message.tensor) == count
            pair_s = time.perf_counter() - started
            del message
            started = time.perf_counter()
            raw.send([asked], 1, 0).wait()
            raw.recv([answer], 1, 0).wait()
            raw_s = time.perf_counter() - started
            if turn:
                times["pair"][-1].append(pair_s)
                times["raw"][-1].append(raw_s)
    return times


def _serve_bridge(pair: Pair, inbox: Any, raw: Any, rows: list[int], repeats: int) -> dict[str, Any]:
    counted = pair._group = CountedGroup(pair._group)
    sent, copied = 0, 0.0
    for count in rows:
        answer = torch.zeros(count, HIDDEN_SIZE, device=pair.device)
        host, asked = answer.cpu(), torch.empty(count, dtype=torch.int32)
        for turn in range(1 + repeats):
            request = inbox.get(60.0)
            assert request is not None and request.kind == Kind.REQUEST
            if turn:
                pair.send_answer(request.request_id, answer)
            else:
                with TensorBytes() as memory:
                    memory.add(answer)
                    memory.reset_peak()
                    pair.send_answer(request.request_id, answer)
                copied = max(copied, memory.peak / answer.nbytes - 1)
            raw.recv([asked], 0, 0).wait()
            sent = counted.sent  # the student has its answer, and cannot say STOP, which is replied to, before the next
            raw.send([host], 0, 0).wait()
    return {"sent": sent, "copied": copied}


def _bridge(message_bytes: list[int]) -> Iterator[Row]:
    asked, served = run_ranks(f"{__name__}:bridge", 2, message_bytes=message_bytes, repeats=REPEATS)
    for size, pair, raw in zip(message_bytes, asked["pair"], asked["raw"], strict=True):
        name = f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
        rate = size / statistics.median(pair) / 1e9
        note = f"{median_ratio(raw, pair):.2f} of gloo's bare send and receive"
        yield Row(SUBJECT, f"bridge: answers of {name}", rate, "GB/s", note=note)
    payload = (1 + REPEATS) * sum(message_bytes)
    headers = (1 + REPEATS) * len(message_bytes) * 8 * Header.SIZE
    yield at_most(SUBJECT, "bridge: bytes sent / headers and valid hidden states", served["sent"] / (payload + headers), "x", 1)  # fmt: skip
    if device_type == "cpu":
        yield at_most(SUBJECT, "bridge: answers copied to be sent", served["copied"], "x", 0)


def run() -> Iterator[Row]:
    """All figures of the subject."""
    with tempfile.TemporaryDirectory() as folder:
        for name in WORKLOADS:
            yield from _separate(Path(folder), name)
        yield from _colocated(Path(folder))
    yield from _bridge(MESSAGE_BYTES)
