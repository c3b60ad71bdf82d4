"""Signals, dead and hung processes in jobs that ``run_train.sh`` has started: how soon they end, and what they leave."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from blockgrow_titan.checkpoint import saved_steps
from blockgrow_titan.events import METRICS_FILE, read_events
from tests.fault_tests.report import FaultReport
from tests.integration_tests.features import GROW, SLURM, free_port
from tests.integration_tests.run_tests import kill
from tests.unit_tests.resuming import assert_same_checkpoint, undated
from tests.unit_tests.test_launch import heed_signals

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 15.0  # seconds within which a job must have ended once one of its processes has
SLOW = ("--training.steps", "2000", "--growth.phase_steps", "1000", "500", "500")  # never comes to its end


class Job:
    """A launch and all of its processes."""

    def __init__(self, folder: Path, command: tuple[str, ...], env: dict[str, str]) -> None:
        self.dump, self.log = folder / "dump", folder / "launch.log"
        self.metrics = self.dump / METRICS_FILE
        with open(self.log, "a") as output:
            self.launcher = psutil.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=heed_signals,
            )
        self.processes: list[psutil.Process] = []

    def wait_for_step(self, step: int) -> None:
        """Until a step has been trained; its processes are known from then on."""
        deadline = time.monotonic() + 180
        while not any(e["event"] == "train" and e["step"] >= step for e in read_events(str(self.metrics))):
            assert self.launcher.poll() is None and time.monotonic() < deadline, self.last_lines()
            time.sleep(0.1)
        self.processes = self.launcher.children(recursive=True)

    def rank(self, global_rank: int) -> psutil.Process:
        """A rank's process."""
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK") == str(global_rank) and process.ppid() == self.launcher.pid:
                    return process
        raise AssertionError(f"no rank {global_rank} among {self.processes}")

    def wait(self, seconds: float) -> tuple[int, float]:
        """The exit status and the seconds until the last process has ended; fails if one is left."""
        began = time.monotonic()
        status = self.launcher.wait(seconds)
        left = psutil.wait_procs(self.processes, timeout=max(0.1, seconds - (time.monotonic() - began)))[1]
        assert not left, f"status {status}, but left behind: {left}"
        return status, time.monotonic() - began

    def last_lines(self, number: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-number:])

    @property
    def last_line(self) -> str:
        return self.last_lines(1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """``start(*overrides, ranks=2, folder="job", **env)`` launches a job; whatever is left of it is killed at the end."""
    jobs: list[Job] = []

    def begin(*overrides: str, ranks: int = 2, folder: str = "job", launcher: tuple[str, ...] = (), **env: str) -> Job:
        (tmp_path / folder).mkdir(exist_ok=True)
        config = ("--job.config_file", "train_configs/grow_post.toml", *GROW)
        dump = ("--job.dump_folder", str(tmp_path / folder / "dump"), "--validation.no-enable")
        command = (*(launcher or ("./run_train.sh",)), *config, *dump, *overrides)
        jobs.append(Job(tmp_path / folder, command, {"NGPU": str(ranks)} | env))
        return jobs[-1]

    yield begin
    for job in jobs:
        with contextlib.suppress(psutil.NoSuchProcess):
            kill([job.launcher, *job.launcher.children(recursive=True)])
        kill(job.processes)


def test_a_preempted_run_saves_however_long_that_takes(
    start: Callable[..., Job], fault_report: FaultReport, tmp_path: Path
) -> None:
    """torchrun would kill its ranks 30 s after a SIGTERM. Started again, the run ends as if nothing had been."""
    rare = ("--checkpoint.interval", "1000")
    job = start(*rare, TRAIN_FILE="tests.fault_tests.slow_save", SLOW_SAVE_SECONDS="40")
    job.wait_for_step(1)
    job.launcher.send_signal(signal.SIGTERM)
    undisturbed = start(*rare, folder="undisturbed")
    status, _ = job.wait(150)
    assert status == 0, job.last_lines()
    step = saved_steps(str(job.dump / "checkpoint"))[-1]  # the last of a phase may be there too
    assert job.last_line == f"Saved at step {step} of 9; resume with the same command"
    for job in (undisturbed, start(*rare)):
        assert job.wait(150)[0] == 0, job.last_lines()
    ours, theirs = (
        [e for e in undated(read_events(str(tmp_path / folder / "dump" / METRICS_FILE))) if e["event"] != "checkpoint"]
        for folder in ("job", "undisturbed")
    )
    assert ours == theirs
    assert_same_checkpoint(tmp_path / "job" / "dump", tmp_path / "undisturbed" / "dump", 9)
    fault_report.fault("SIGTERM to run_train.sh, a save of 40 s", where="2 ranks, resumed")


def test_a_second_signal_ends_all_at_once(start: Callable[..., Job], fault_report: FaultReport) -> None:
    job = start(*SLOW, TRAIN_FILE="tests.fault_tests.slow_save", SLOW_SAVE_SECONDS="100")
    job.wait_for_step(1)
    job.launcher.send_signal(signal.SIGINT)
    time.sleep(3)  # in the save
    job.launcher.send_signal(signal.SIGINT)
    status, seconds = job.wait(LIMIT)
    assert status == 128 + signal.SIGINT, job.last_lines()
    assert job.last_line == "Stopped by SIGINT. The same command goes on from the last checkpoint"
    fault_report.fault("Ctrl-C twice, the second in a save", where="2 ranks", seconds=seconds)


def test_a_cluster_job_saves_before_its_time_is_up(start: Callable[..., Job], fault_report: FaultReport) -> None:
    """Slurm's signal comes to the batch script alone; two nodes learn of it through the file that it makes."""
    cluster = {
        "PATH": f"{SLURM}{os.pathsep}{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "localhost,localhost",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "11",
        "PORT": str(free_port()),
    }
    job = start(*SLOW, "--checkpoint.interval", "1000", ranks=1, launcher=("./multinode.slurm",), **cluster)
    job.wait_for_step(1)
    job.launcher.send_signal(signal.SIGTERM)
    status, seconds = job.wait(60)
    assert status == 0, job.last_lines()
    (step,) = saved_steps(str(job.dump / "checkpoint"))
    assert f"Saved at step {step} of 2000; resume with the same command" in job.last_lines()
    assert not (ROOT / ".stop-11").exists()
    fault_report.fault("SIGTERM to multinode.slurm", where="2 nodes of 1 rank", seconds=seconds)


@pytest.mark.parametrize(("ranks", "victim", "name"), [(3, 1, "student rank 1"), (2, 1, "teacher rank 0")])
def test_a_killed_rank_ends_the_job_and_is_named(
    start: Callable[..., Job], fault_report: FaultReport, ranks: int, victim: int, name: str
) -> None:
    job = start(*SLOW, "--teacher.ranks", "1", ranks=ranks)
    job.wait_for_step(2)
    job.rank(victim).kill()
    status, seconds = job.wait(LIMIT)
    assert status == 1, job.last_lines()
    assert job.last_line.startswith(f"Failed: {name} (global rank {victim}, host "), job.last_lines()
    assert job.last_line.endswith("): killed by SIGKILL"), job.last_lines()
    fault_report.fault(f"SIGKILL of {name}", where=f"{ranks} ranks", seconds=seconds)


def test_a_hung_rank_is_named_after_the_timeout(start: Callable[..., Job], fault_report: FaultReport) -> None:
    job = start(*SLOW, "--teacher.ranks", "1", "--comm.heartbeat_timeout_seconds", "5", ranks=3)
    job.wait_for_step(2)
    job.rank(1).suspend()
    status, seconds = job.wait(5 + LIMIT + 30)  # torchrun kills the suspended process after 30 s
    assert status == 1, job.last_lines()
    assert "no sign of life of student rank 1 (global rank 1, host " in job.last_line, job.last_lines()
    fault_report.fault("SIGSTOP of student rank 1, timeout 5 s", where="3 ranks", seconds=seconds)


def test_no_rank_outlives_its_launcher(start: Callable[..., Job], fault_report: FaultReport) -> None:
    job = start(*SLOW)
    job.wait_for_step(2)
    job.launcher.kill()
    status, seconds = job.wait(LIMIT)
    assert status == -signal.SIGKILL
    fault_report.fault("SIGKILL of the launcher (torchrun's agent)", where="2 ranks", seconds=seconds)


def test_a_sigterm_of_torchrun_itself_saves_nothing(start: Callable[..., Job], fault_report: FaultReport) -> None:
    """Without the launcher there is no stop request: torchrun's SIGTERM means that a peer died."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d")
    module = ("--rdzv_endpoint=localhost:0", "-m", "blockgrow_titan.train")
    job = start(*SLOW, "--checkpoint.interval", "1000", launcher=(*torchrun, *module))
    job.wait_for_step(2)
    job.launcher.send_signal(signal.SIGTERM)
    status, seconds = job.wait(LIMIT)
    assert status != 0 and saved_steps(str(job.dump / "checkpoint")) == []
    fault_report.fault("SIGTERM to a plain torchrun", where="2 ranks", seconds=seconds)
