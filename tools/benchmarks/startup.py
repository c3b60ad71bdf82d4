"""Start-up: what the imports load, and the time from ``./run_train.sh`` to the end of the first step, by phase.

The job is ``train_configs/grow_post.toml`` on two ranks, stopped after its first step. ``run_train.sh`` is told by
TRAIN_FILE to run this module on every rank: it runs ``blockgrow_titan.train`` and notes when each phase ends. The
phases of the student's rank 0 add up to the whole time; of the teacher's rank they are shown where it has them.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # on the ranks this module must load nothing before the clock runs
    from tools.benchmarks.rows import Row

ROOT = Path(__file__).resolve().parents[2]
SUBJECT = "startup"
MARKS_FOLDER = "BLOCKGROW_STARTUP_MARKS"
RANKS = 2

NOT_NEEDED = (
    *("transformers", "datasets", "pandas", "pyarrow", "matplotlib", "scipy", "sklearn", "PIL", "wandb"),
    *("torch._inductor.compile_fx", "blockgrow_titan.hf", "blockgrow_titan.report"),
)
"""Packages and modules that no run of the tiny config uses."""

PHASES = {
    "launcher": "run_train.sh and torchrun, until the rank's process is there",
    "imports": "of torch, torchtitan and this package",
    "worlds": "config, rendezvous, checks, process group of the role",
    "model and documents": "torchtitan's Trainer: mesh, tokenizer, index of the documents, model, optimizer",
    "teacher": "the client, which waits until the teacher's rank has loaded; embedding and head from its files",
    "validator and checkpointer": "validation documents, identity of the data",
    "first validation": "of the student as it starts",
    "first step": "",
}


def after(statement: str, expression: str) -> Any:
    """The value of an expression, as JSON can hold it, in a new interpreter after a statement."""
    code = f"{statement}\nimport json, sys, time\nprint(json.dumps({expression}))"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def loaded_without_need(statement: str) -> list[str]:
    """Those of ``NOT_NEEDED`` that are loaded after a statement."""
    return after(statement, f"[name for name in {NOT_NEEDED!r} if name in sys.modules]")


def import_seconds(statement: str) -> float:
    """Processor seconds of a statement in a new interpreter: what else runs disturbs them less than it does wall time."""
    return after(statement, "time.process_time()")


def launch(folder: str) -> dict[str, dict[str, float]]:
    """Run the job up to its first step: phase -> seconds, for each role, and the student's "whole time"."""
    environment = os.environ | {
        "NGPU": str(RANKS),
        "CONFIG_FILE": str(ROOT / "train_configs/grow_post.toml"),
        "TRAIN_FILE": "tools.benchmarks.startup",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        MARKS_FOLDER: folder,
    }
    started = time.time()
    done = subprocess.run(
        [str(ROOT / "run_train.sh"), "--job.dump_folder", f"{folder}/dump"],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"run_train.sh ended with status {done.returncode}:\n{done.stdout[-2000:]}")
    marks = {path.name.partition(".")[0]: json.loads(path.read_text()) for path in Path(folder).glob("*.marks.json")}
    return {role: phase_seconds(started, ends) for role, ends in marks.items()}


def phase_seconds(started: float, ends: dict[str, float]) -> dict[str, float]:
    """Phase -> seconds, and "whole time", from when the phases that a rank has ended."""
    times = [started, *(ends[name] for name in PHASES if name in ends)]
    names = [name for name in PHASES if name in ends]
    seconds = {name: end - begin for name, begin, end in zip(names, times[:-1], times[1:], strict=True)}
    return seconds | {"whole time": times[-1] - started}


def run() -> Iterator["Row"]:
    from tools.benchmarks.rows import REPEATS, Row, at_most

    for name, statement in (
        ("import blockgrow_titan", "import blockgrow_titan"),
        ("the entry point", "import blockgrow_titan.train, blockgrow_titan.trainer"),
    ):
        needless = loaded_without_need(statement)
        yield at_most(SUBJECT, f"{name}: modules without need", len(needless), "", 0, ", ".join(needless))
    for name, statement in (
        ("torch alone", "import torch"),
        ("torch, torchtitan and the entry point", "import blockgrow_titan.train, blockgrow_titan.trainer"),
    ):
        seconds = statistics.median(import_seconds(statement) for _ in range(REPEATS))
        yield Row(SUBJECT, f"imports: {name}", seconds, "s", note="processor time")

    runs = []
    for _ in range(REPEATS + 1):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(launch(folder))
    del runs[0]  # files come from the disk
    for name, what in (*PHASES.items(), ("whole time", "from run_train.sh to the end of the first step")):
        seconds = statistics.median(run["student"][name] for run in runs)
        if all(name in run.get("teacher", {}) for run in runs) and name != "whole time":
            teacher = statistics.median(run["teacher"][name] for run in runs)
            what += f"{'; ' if what else ''}teacher's rank: {teacher:.2f} s"
        yield Row(SUBJECT, f"phase: {name}", seconds, "s", note=what)


def _process_start() -> float:
    """When this process began, seconds since the epoch, to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


class Marks:
    """When each phase of this rank ended, written at the end."""

    def __init__(self) -> None:
        self.ends: dict[str, float] = {"launcher": _process_start()}

    def mark(self, phase: str) -> None:
        self.ends[phase] = time.time()

    def after(self, owner: Any, name: str, phase: str) -> None:
        """Mark a phase when a function of a module or class returns."""
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.ends.setdefault(phase, time.time())
            return result

        setattr(owner, name, call)

    def write(self, role: str) -> None:
        path = Path(os.environ[MARKS_FOLDER], f"{role}.marks.json")
        path.write_text(json.dumps(self.ends))


def trace() -> None:
    """The entry point of a rank."""
    marks = Marks()
    import blockgrow_titan.train as entry
    import blockgrow_titan.trainer as trainer

    marks.mark("imports")
    world: list[str] = []
    original_run = entry.run

    def run_role(job_config: Any, joined: Any, resume_step: int) -> None:
        world.append(joined.role)
        marks.mark("worlds")
        original_run(job_config, joined, resume_step)

    setattr(entry, "run", run_role)  # noqa: B010
    student = trainer.GrowthTrainer
    marks.after(student, "build_lr_schedulers", "model and documents")
    marks.after(student, "_copy_from_teacher", "teacher")
    marks.after(student, "_build_checkpointer", "validator and checkpointer")
    marks.after(student, "_validate", "first validation")
    marks.after(student, "train_step", "first step")
    setattr(student, "should_continue_training", lambda self: self.step < 1)  # noqa: B010
    setattr(student, "_finish", lambda self: self.teacher.close())  # noqa: B010

    entry.main()
    marks.write(world[0])


if __name__ == "__main__":
    trace()
