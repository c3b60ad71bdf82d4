"""`stopping.py`: what a rank does about a SIGTERM and about a launcher that is gone, also when its main thread is stuck."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blockgrow_titan import stopping

ROOT = Path(__file__).resolve().parents[2]
# A rank whose main thread never comes back to Python: a signal handler would never run.
RANK = """
import ctypes
import stopping  # without the package around it, which would import torch
stopping.watch()
print("watching", flush=True)
while True:
    ctypes.CDLL(None).sleep(1000)
"""


@pytest.fixture
def rank(tmp_path: Path):
    """Starts a rank under a launcher whose folder is ``tmp_path``; killed at the end."""
    processes = []

    def begin(**env: str) -> subprocess.Popen[str]:
        variables = {stopping.LAUNCH_FOLDER: str(tmp_path), "PYTHONPATH": str(ROOT / "blockgrow_titan")} | env
        process = subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "watching\n"
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def test_a_sigterm_without_a_request_ends_the_rank(rank) -> None:
    process = rank()
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in process.stderr.read()


def test_a_sigterm_that_comes_with_a_request_does_not(rank, tmp_path: Path) -> None:
    """Whichever of the two comes first; a second request ends it."""
    process = rank()
    process.terminate()
    (tmp_path / "stop").touch()  # within the grace
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    (tmp_path / "stop_now").touch()
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM


def test_a_rank_ends_when_its_launcher_is_gone(rank) -> None:
    process = rank(**{stopping.LAUNCHER_PID: "1"})  # its parent is this test: the launcher was another
    assert process.wait(30) == 1
    assert "its launcher is gone" in process.stderr.read()


def test_requests_and_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(stopping.LAUNCH_FOLDER, raising=False)
    monkeypatch.delenv(stopping.STOP_FILE, raising=False)
    stopping.note("ending", "nobody listens")
    assert not stopping.stop_requested() and not stopping.has_note("ending")
    monkeypatch.setenv(stopping.LAUNCH_FOLDER, str(tmp_path))
    assert not stopping.stop_requested()
    stopping.note("ending", "Saved at\nstep 3")
    assert stopping.has_note("ending") and (tmp_path / "ending").read_text() == "Saved at step 3\n"
    assert [path.name for path in tmp_path.iterdir()] == ["ending"]
    (tmp_path / "stop").touch()
    assert stopping.stop_requested()
    monkeypatch.setenv(stopping.STOP_FILE, str(tmp_path / "elsewhere"))  # of a whole cluster job
    assert not stopping.stop_requested()
    (tmp_path / "elsewhere").touch()
    assert stopping.stop_requested()
