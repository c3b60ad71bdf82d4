"""`tools/launch.py`: how a failing job ends on the console, with a shell as the rank."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def launch(script: str) -> list[str]:
    """One rank that is a shell script."""
    command = [sys.executable, str(ROOT / "tools" / "launch.py"), "--nproc_per_node=1", "--rdzv_backend=c10d"]
    return [*command, "--rdzv_endpoint=localhost:0", "--no-python", "sh", "-c", script]


@pytest.mark.parametrize(
    ("script", "status", "last_line"),
    [
        ('echo "Config error: growth.freeze is bad" > "$BLOCKGROW_ERROR_FILE"; exit 2', 2, "Config error: growth.freeze is bad"),
        ("exit 3", 1, "exitcode  : 3"),
        ("exit 0", 0, ""),
    ],
)  # fmt: skip
def test_ending(script: str, status: int, last_line: str) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        launch(script), env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120
    )
    assert result.returncode == status, result.stderr
    assert "launch.py" not in result.stderr  # no traceback of the agent
    if status == 2:
        assert result.stderr.splitlines()[-1] == last_line
    assert last_line in result.stderr


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_is_one_line(tmp_path: Path, name: str, status: int) -> None:
    started = tmp_path / "started"
    process = subprocess.Popen(
        launch(f"touch {started}; exec sleep 60"),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(getattr(signal, name))
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == status
    assert stderr.splitlines()[-1] == f"Stopped by {name}. The same command goes on from the last checkpoint"
    assert "Traceback" not in stderr
