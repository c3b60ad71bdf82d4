"""`run_train.sh`: what it starts, with stand-ins for python3, nvidia-smi and nproc that only print or count."""

import os
import subprocess
from pathlib import Path

import pytest

from tools.benchmarks.pace import KEEP_FREED

ROOT = Path(__file__).resolve().parents[2]

# `python3 -P ...` is the question whether the environment has the package; anything else is the job.
PYTHON = """#!/bin/sh
[ "$1" = -P ] && exit 0
printf '%s\\n' "argv: $*" "OMP_NUM_THREADS=$OMP_NUM_THREADS" "PYTHONPATH=$PYTHONPATH" "LOCAL_RANK=$LOCAL_RANK" \
    "PYTORCH_ALLOC_CONF=$PYTORCH_ALLOC_CONF" "malloc: ${MALLOC_MMAP_MAX_:-unset} ${MALLOC_TRIM_THRESHOLD_:-unset}"
exit "${STATUS:-0}"
"""


@pytest.fixture
def run(tmp_path: Path):
    """Runs the script in an empty folder that has `a.toml` and `b.toml`; GPUS and CORES are what the machine has."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    gpus = 'for i in $(seq "${GPUS:-0}"); do echo "GPU $i: some (UUID: GPU-1-1)"; echo "  MIG 1g"; done'
    for name, text in {
        "python3": PYTHON,
        "nvidia-smi": f"#!/bin/sh\n{gpus}\n",
        "nproc": '#!/bin/sh\necho "${CORES:-2}"\n',
    }.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    for name in ("a.toml", "b.toml"):
        (tmp_path / name).touch()

    def start(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "run_train.sh", *arguments],
            env={"PATH": f"{binaries}:{os.defpath}:/usr/local/bin"} | env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    return start


TORCHRUN = (
    f"argv: {ROOT}/tools/launch.py --nproc_per_node={{}} --rdzv_backend c10d --rdzv_endpoint=localhost:0 "
    "--max_restarts=0 --local-ranks-filter {} --role rank --tee 3 -m {} --job.config_file {}"
)


def test_defaults_and_overrides(run) -> None:
    lines = run(CONFIG_FILE="a.toml").stdout.splitlines()
    assert TORCHRUN.format(2, 0, "blockgrow_titan.train", "a.toml") in lines
    assert "OMP_NUM_THREADS=1" in lines and f"PYTHONPATH={ROOT}" in lines
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in lines
    assert f"malloc: {' '.join(KEEP_FREED.values())}" in lines
    assert lines[0].startswith(f"+ OMP_NUM_THREADS=1 python3 {ROOT}/tools/launch.py ")
    lines = run(
        "--training.steps", "1", "a b",
        CONFIG_FILE="b.toml", NGPU="3", LOG_RANK="0,2", TRAIN_FILE="my.train", CORES="8", PYTHONPATH="/x",
    ).stdout.splitlines()  # fmt: skip
    assert TORCHRUN.format(3, "0,2", "my.train", "b.toml") + " --training.steps 1 a b" in lines
    assert "OMP_NUM_THREADS=2" in lines and f"PYTHONPATH={ROOT}:/x" in lines
    assert "OMP_NUM_THREADS=5" in run(CONFIG_FILE="a.toml", OMP_NUM_THREADS="5").stdout
    assert " --max_restarts=3 " in run(CONFIG_FILE="a.toml", MAX_RESTARTS="3").stdout
    assert "malloc: unset unset" in run(CONFIG_FILE="a.toml", GPUS="2").stdout
    assert "malloc: 65536 -1" in run(CONFIG_FILE="a.toml", MALLOC_MMAP_MAX_="65536").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--job.config_file", "a.toml", "--x.y", "1"],
        ["--x.y", "1", "--job.config-file", "a.toml"],
        ["--job.config_file=a.toml", "--x.y", "1"],
        ["--job.config-file=a.toml", "--x.y", "1"],
    ],
)
def test_config_file_argument_wins(run, arguments: list[str]) -> None:
    lines = run(*arguments, CONFIG_FILE="b.toml").stdout.splitlines()
    assert TORCHRUN.format(2, 0, "blockgrow_titan.train", "a.toml") + " --x.y 1" in lines


@pytest.mark.parametrize(
    "env, ranks",
    [
        ({}, 2),
        ({"GPUS": "1"}, 2),
        ({"GPUS": "8"}, 8),
        ({"GPUS": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,5"}, 4),
        ({"GPUS": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,-1,4"}, 3),
        ({"GPUS": "8", "CUDA_VISIBLE_DEVICES": "GPU-1-1,GPU-2-1,GPU-3-1"}, 3),
        ({"GPUS": "8", "CUDA_VISIBLE_DEVICES": ""}, 2),
        ({"GPUS": "8", "NGPU": "1"}, 1),
    ],
)
def test_number_of_ranks(run, env: dict[str, str], ranks: int) -> None:
    assert f" --nproc_per_node={ranks} " in run(CONFIG_FILE="a.toml", **env).stdout


def test_comm_mode_is_one_process(run) -> None:
    lines = run("--x.y", "1", CONFIG_FILE="a.toml", COMM_MODE="fake_backend", NGPU="4").stdout.splitlines()
    assert "argv: -m blockgrow_titan.train --job.config_file a.toml --x.y 1 --comm.mode=fake_backend" in lines
    assert "LOCAL_RANK=0" in lines


def test_exit_status_is_the_job_s(run) -> None:
    assert run(CONFIG_FILE="a.toml", STATUS="7").returncode == 7


@pytest.mark.parametrize(
    "arguments, env, message",
    [
        (
            ["--job.config_file", "c.toml"],
            {},
            "config file 'c.toml' does not exist; set --job.config_file or CONFIG_FILE",
        ),
        ([], {"CONFIG_FILE": "/c.toml"}, "config file '/c.toml' does not exist; set --job.config_file or CONFIG_FILE"),
        (["--job.config_file"], {}, "--job.config_file needs a file name after it"),
        (["--job.config_file=a.toml"], {"NGPU": "two"}, "NGPU is 'two', must be a positive number of ranks"),
        (["--job.config_file=a.toml"], {"NGPU": "0"}, "NGPU is '0', must be a positive number of ranks"),
        (["--job.config_file=a.toml"], {"MAX_RESTARTS": "-1"}, "MAX_RESTARTS is '-1', must be a number, 0 or more"),
    ],
)
def test_errors_are_one_line(run, arguments: list[str], env: dict[str, str], message: str) -> None:
    result = run(*arguments, **env)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", f"run_train.sh: {message}\n")


def test_help(run) -> None:
    result = run("--job.config_file", "c.toml", "--help")
    assert result.returncode == 0 and result.stdout.startswith("Usage: ") and "NGPU" in result.stdout
