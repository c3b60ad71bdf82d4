"""What every unit test shares: the device override before torchtitan, one thread, the pool of ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import blockgrow_titan.infra.device  # noqa: F401  must precede the first import of torchtitan
from tests.unit_tests.rank_pool import RankPool

if TYPE_CHECKING:
    from tests.fault_tests.harness import FaultBench

# Sums come out alike here and in the pool's ranks, which have one thread too, and the ranks keep the cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Rank processes for distributed tests: `rank_pool.run(fn, world_size, **kwargs)` gives the results by rank."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a toy job reads: tokenizer, documents, teachers, base config (`tests/unit_tests/jobs.py`)."""
    from tests.unit_tests.jobs import make_workspace

    return make_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="session")
def fault_bench(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator["FaultBench"]:
    """Jobs whose ranks are killed at chosen points and started again (`tests/fault_tests/harness.py`)."""
    from tests.fault_tests.fork_server import ForkServer
    from tests.fault_tests.harness import FaultBench

    server = ForkServer()
    yield FaultBench(server, workspace, tmp_path_factory.mktemp("faults"))
    server.close()
