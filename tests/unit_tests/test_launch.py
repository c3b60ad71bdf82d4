"""`tools/launch.py`: how a failing job ends on the console, with a shell as the rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("script", "status", "last_line"),
    [
        ('echo "Config error: growth.freeze is bad" > "$BLOCKGROW_ERROR_FILE"; exit 2', 2, "Config error: growth.freeze is bad"),
        ("exit 3", 1, "exitcode  : 3"),
        ("exit 0", 0, ""),
    ],
)  # fmt: skip
def test_ending(script: str, status: int, last_line: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / "launch.py"), "--nproc_per_node=1", "--rdzv_backend=c10d"]
    command += ["--rdzv_endpoint=localhost:0", "--no-python", "sh", "-c", script]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    assert result.returncode == status, result.stderr
    assert "launch.py" not in result.stderr  # no traceback of the agent
    if status == 2:
        assert result.stderr.splitlines()[-1] == last_line
    assert last_line in result.stderr
