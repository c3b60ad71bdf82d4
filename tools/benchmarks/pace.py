"""Lets processes that train side by side take steps in turn: ``Pace`` in each of them, ``Paced`` where they are started.

    Paced.advance(3)  ->  "go" (a pipe)  ->  Pace.wait: steps until then begin  ->  Pace.ended: "steps.jsonl"  ->  Window

Whoever is not at work waits in a read of the pipe, so that the others have the machine, and nobody has to be started
anew for each repeat. A job's separate teacher would go on with what was submitted ahead: it is stopped (SIGSTOP) while its
student waits. The steps before ``wait`` is passed for the first time are start-up; bytes of tensors are counted
from the imports until ``WARMUP_STEPS`` have been taken, and never while steps are timed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockgrow_titan.infra.footprint import TensorBytes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "BENCHMARK_PACE_FOLDER"
GO, STEPS, WARM = "go", "steps.jsonl", "warm"
WARMUP_STEPS = 2
"""The first step makes the optimizer's state; the second is the first whose memory is that of all later ones."""
POLL_SECONDS = 0.02
KEEP_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
"""What ``run_train.sh`` sets where there is no GPU."""


class Pace:
    """In a process that is measured. Bytes of tensors are counted from here on, in this thread.

    Args:
        folder: Where its ``Paced`` looks for it.
        role: Of the processes that share a folder.
    """

    def __init__(self, folder: Path, role: str) -> None:
        self.folder, self.role = folder, role
        self.word = ""
        self._until = 0
        self._started = 0.0
        self._go: Any = None
        self._imports = _resident(os.getpid(), "VmRSS")
        self._bytes: TensorBytes | None = TensorBytes()
        self._bytes.__enter__()

    @classmethod
    def of_environment(cls, role: str) -> "Pace":
        """The pace that this process was started with."""
        return cls(Path(os.environ[FOLDER]), role)

    def add(self, *tensors: Any) -> None:
        """Count tensors that were there before, or that no operation has returned."""
        if self._bytes is not None:
            self._bytes.add(*tensors)

    def write(self, name: str, value: Any) -> None:
        path = self.folder / f"{name}-{self.role}"
        path.with_suffix(".part").write_text(json.dumps(value))
        path.with_suffix(".part").rename(path)

    def appear(self) -> None:
        """Leave this process's number, so that it can be stopped and looked at."""
        self.write("pid", os.getpid())

    def wait(self, step: int) -> str:
        """Wait until a step may begin; returns the word that came with the permission."""
        if step > self._until:
            if self._go is None:
                self._go = open(self.folder / GO)
            with self._teacher_stopped():
                line = self._go.readline()
            if not line:
                raise SystemExit("the benchmark has ended")
            until, _, self.word = line.strip().partition(" ")
            self._until = int(until)
        self._started = time.perf_counter()
        return self.word

    def ended(self, step: int, **values: float) -> None:
        """Record a step: its values, when it began and when it ended (one clock for all processes)."""
        record = {"step": step, "began": self._started, "ended": time.perf_counter()} | values
        with open(self.folder / STEPS, "a") as file:
            file.write(json.dumps(record) + "\n")
        if step == WARMUP_STEPS:
            (self.folder / WARM).touch()
            self.stop_counting()

    @property
    def is_warm(self) -> bool:
        """Whether the folder's student has taken its warm-up steps."""
        return (self.folder / WARM).exists()

    def stop_counting(self) -> None:
        """End the count of bytes and write it down; without effect if it has ended."""
        if self._bytes is not None:
            self._bytes.__exit__(None, None, None)
            self.write("memory", {"tensors": self._bytes.peak, "imports": self._imports})
            self._bytes = None

    @contextlib.contextmanager
    def _teacher_stopped(self) -> Iterator[None]:
        teacher = self.folder / "pid-teacher"
        pid = int(teacher.read_text()) if self.role != "teacher" and teacher.exists() else None
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if pid is not None:
                os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True)
class Window:
    """Some steps in a row."""

    steps: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """From the beginning of the first step to the end of the last."""
        return self.steps[-1]["ended"] - self.steps[0]["began"]

    @property
    def rate(self) -> float:
        """Valid tokens per second."""
        return sum(step["valid_tokens"] for step in self.steps) / self.seconds


class Paced:
    """A job or a loop that was started to be measured. Use it as a context: at its end, no process is left.

    Args:
        name: For errors.
        folder: An empty folder of its own.
        command: What to start.
        environment: Variables beyond this process's own.
    """

    def __init__(self, name: str, folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name, self.folder = name, folder
        self.taken = 0
        folder.mkdir(parents=True)
        os.mkfifo(folder / GO)
        self._go = os.open(folder / GO, os.O_RDWR)  # for reading too: nobody needs to have opened the other end
        self._log = open(folder / "log", "w")
        self._process = subprocess.Popen(
            command,
            env={**os.environ, FOLDER: str(folder), "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )

    def __enter__(self) -> "Paced":
        return self

    def __exit__(self, *exc: Any) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.terminate()
        self._process.wait()
        os.close(self._go)
        self._log.close()

    def advance(self, steps: int, word: str = "", timeout: float = 900) -> Window:
        """Take some steps, and wait for them.

        Raises:
            RuntimeError: If the process has ended instead, or takes too long.
        """
        first, self.taken = self.taken, self.taken + steps
        os.write(self._go, f"{self.taken} {word}\n".encode())
        limit = time.monotonic() + timeout
        while len(done := self._steps()) < self.taken:
            if self._process.poll() not in (None, 0) or time.monotonic() > limit:
                raise RuntimeError(f"{self.name} took {len(done)} of {self.taken} steps:\n{self._end_of_log()}")
            time.sleep(POLL_SECONDS)
        return Window(done[first:])

    def finish(self, timeout: float = 60) -> None:
        """Wait for the end, after the last step; raises ``RuntimeError`` if that is a failure."""
        if status := self._process.wait(timeout):
            raise RuntimeError(f"{self.name} ended with status {status}:\n{self._end_of_log()}")

    def memory(self) -> dict[str, dict[str, int]]:
        """Role -> bytes: "tensors" at most, resident "imports", resident at most ("peak", up to now)."""
        found = {}
        for path in self.folder.glob("memory-*"):
            role = path.name.partition("-")[2]
            pid = json.loads((self.folder / f"pid-{role}").read_text())
            found[role] = json.loads(path.read_text()) | {"peak": _resident(pid, "VmHWM")}
        return found

    def _pids(self) -> list[int]:
        return [json.loads(path.read_text()) for path in self.folder.glob("pid-*") if path.suffix != ".part"]

    def _steps(self) -> list[dict[str, Any]]:
        path = self.folder / STEPS
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def _end_of_log(self) -> str:
        self._log.flush()
        return (self.folder / "log").read_text()[-3000:]


def paced_job(
    name: str, folder: Path, config_file: Path, ranks: int, threads: int, arguments: Sequence[str] = ()
) -> Paced:
    """Start a job as ``run_train.sh`` does; its config must import ``tools.benchmarks.paced_job``."""
    command = [sys.executable, str(ROOT / "tools/launch.py"), f"--nproc_per_node={ranks}", "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint=localhost:0", "-m", "blockgrow_titan.train", "--job.config_file", str(config_file)]
    settings = ["--job.dump_folder", str(folder / "dump")]
    settings += ["--comm.heartbeat_timeout_seconds", "86400"]  # a teacher that is stopped between steps is not lost
    return Paced(name, folder, [*command, *settings, *arguments], {"OMP_NUM_THREADS": str(threads)} | KEEP_FREED)


def _resident(pid: int, field: str) -> int:
    """Bytes of a field of /proc/PID/status, 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return 0
