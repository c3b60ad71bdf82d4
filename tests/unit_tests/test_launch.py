"""`tools/launch.py`: how a job ends on the console, with a shell as the rank."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tools.launch import first_cause

ROOT = Path(__file__).resolve().parents[2]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def launch(script: str, ranks: int = 1) -> list[str]:
    """Ranks that are a shell script; torchrun makes one $ of two."""
    command = [sys.executable, str(ROOT / "tools" / "launch.py"), f"--nproc_per_node={ranks}", "--rdzv_backend=c10d"]
    return [*command, "--rdzv_endpoint=localhost:0", "--no-python", "sh", "-c", script]


NOTE = 'echo "{}" > "$BLOCKGROW_LAUNCH_FOLDER/{}"; '


@pytest.mark.parametrize(
    ("script", "status", "last_line"),
    [
        (NOTE.format("Config error: growth.freeze is bad", "config_error") + "exit 2", 2, "Config error: growth.freeze is bad"),
        ("exit 3", 1, "Failed: rank 0: ended with exit status 3"),
        (NOTE.format("student rank 0 (global rank 0, host h)", "rank-0") + "kill -9 $$$$", 1, "Failed: student rank 0 (global rank 0, host h): killed by SIGKILL"),
        ("exit 0", 0, None),
    ],
)  # fmt: skip
def test_ending(script: str, status: int, last_line: str | None) -> None:
    result = subprocess.run(
        launch(script), env=ENV, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120
    )
    assert result.returncode == status, result.stderr
    assert "launch.py" not in result.stderr and "Traceback" not in result.stderr  # no traceback of the agent
    if last_line is not None:
        assert result.stderr.splitlines()[-1] == last_line


def failure(path: Path, exitcode: int, message: str | None, timestamp: int) -> ProcessFailure:
    """As torchrun makes it of a rank's error file, if there is one, and its exit status."""
    if message is not None:
        text = {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(timestamp)}}
        path.write_text(json.dumps({"message": text}))
    made = ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file=str(path))
    made.timestamp = timestamp
    return made


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([(1, "PeerLost: lost teacher rank 0", 5), (-9, None, 6)], 1),
        ([(143, None, 5), (-9, None, 5), (1, "RuntimeError: Connection closed by peer", 4)], 1),
        ([(-9, None, 35), (1, "RankLost: no sign of life of student rank 0", 5)], 1),  # hung, then killed by torchrun
        ([(-15, None, 5), (1, "ValueError: bad", 5)], 1),
        ([(1, "RuntimeError: Connection closed by peer [::1]:1", 5), (1, "ValueError: bad", 6)], 1),
        ([(1, "ValueError: late", 9), (1, "ValueError: early", 6)], 1),
        ([(1, "PeerFailed: teacher rank 0 failed: ValueError: x", 6)], 0),
    ],
)
def test_the_first_cause_is_named(tmp_path: Path, failures: list[tuple[int, str | None, int]], first: int) -> None:
    ranks = {rank: failure(tmp_path / str(rank), *values) for rank, values in enumerate(failures)}
    assert first_cause(ranks) == first


def heed_signals() -> None:
    """In the launched process: a test run in the background, or under nohup, has it ignore some."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def start(script: str, started: Path, ranks: int = 1) -> subprocess.Popen[str]:
    """A launch whose ranks have come so far as to touch ``started``."""
    process = subprocess.Popen(
        launch(script, ranks),
        env=ENV,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.05)
    return process


WHEN_ASKED = 'while [ ! -e "$BLOCKGROW_LAUNCH_FOLDER/stop" ]; do sleep 0.05; done; '


@pytest.mark.parametrize(
    ("name", "ending", "status"),
    [
        ("SIGINT", "Saved at step 3 of 9", 0),
        ("SIGHUP", "Saved at step 3 of 9", 0),
        ("SIGTERM", "Not saved, since this run saves no checkpoints", 143),
    ],
)
def test_a_signal_asks_the_ranks_to_stop(tmp_path: Path, name: str, ending: str, status: int) -> None:
    script = f"touch {tmp_path}/started; {WHEN_ASKED}{NOTE.format(ending, 'ending')}exit 0"
    process = start(script, tmp_path / "started")
    process.send_signal(getattr(signal, name))
    lines = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == status
    assert lines[0] == f"{name}: the job finishes its step and saves. A second signal ends it at once"
    assert lines[-1] == ending


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    process = start(f"touch {tmp_path}/started; exec sleep 60", tmp_path / "started", ranks=2)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None and process.stderr.readline().startswith("SIGTERM: the job finishes")
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "Stopped by SIGINT. The same command goes on from the last checkpoint"
    assert "Traceback" not in stderr
    assert not psutil.wait_procs(ranks, timeout=5)[1]
