"""Functions on several ranks, each a process of its own with one thread, as in a job on this machine.

    run_ranks("tools.benchmarks.overlap:student_and_teacher", 2, steps=20)  ->  what each rank returned, by rank

The function is called as ``function(rank, world_size, **arguments)`` with torchrun's variables set (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Arguments and results must be JSON.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    return TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False).port


def run_ranks(function: str, world_size: int, threads: int = 1, timeout: float = 1800, **arguments: Any) -> list[Any]:
    """Call a function on every rank.

    Args:
        function: ``module:name``.
        world_size: Processes.
        threads: OMP_NUM_THREADS of each.
        timeout: Seconds for all.
        arguments: Of the function.

    Returns:
        What the function returned, by rank.

    Raises:
        RuntimeError: If a rank fails; the text holds the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        common = os.environ | {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        processes = []
        for rank in range(world_size):
            command = [sys.executable, "-m", "tools.benchmarks.ranks", function, json.dumps(arguments)]
            with open(f"{folder}/{rank}.log", "w") as log:
                processes.append(
                    subprocess.Popen(
                        [*command, f"{folder}/{rank}.json"],
                        env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                    )
                )
        try:
            statuses = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, status in enumerate(statuses):
            if status:
                tail = Path(f"{folder}/{rank}.log").read_text()[-2000:]
                raise RuntimeError(f"{function}: rank {rank} ended with status {status}:\n{tail}")
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(world_size)]


def main() -> None:
    function, arguments, out = sys.argv[1:]
    import blockgrow_titan.infra.device  # noqa: F401  (before torchtitan: see there)

    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), **json.loads(arguments)
    )
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
