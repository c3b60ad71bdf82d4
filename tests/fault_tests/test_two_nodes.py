"""Two nodes: what is trained is what one node trains, and the loss of a node, or of the network, ends the other."""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault_tests.harness import BOUND_SECONDS
from tests.fault_tests.nodes import Network, Nodes, two_networks
from tests.fault_tests.report import FaultReport

STEPS = 4
SPREAD = (
    "--teacher.ranks",
    "1",
    "--validation.no-enable",
    "--training.steps",
    str(STEPS),
    "--growth.phase_steps",
    "2",
    "1",
    "1",
)
LONG = (
    "--teacher.ranks",
    "1",
    "--validation.no-enable",
    "--training.steps",
    "3000",
    "--growth.phase_steps",
    "1000",
    "1000",
    "1000",
)
COMPARED = 3  # steps of a long run
HEARTBEAT_TIMEOUT = 5


def losses(events: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    return [tuple(event[name] for name in ("step", "loss", "ce", "kl", "grad_norm", "lr")) for event in events]


@pytest.fixture(scope="module")
def start_of_the_long_run(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, ...]]:
    """The losses of its first steps, on one node."""
    with Nodes(tmp_path_factory.mktemp("one_node"), (2,), LONG) as job:
        job.wait_for_step(COMPARED)
        return losses(job.steps())[:COMPARED]


@pytest.fixture
def networks() -> Iterator[tuple[Network, Network]]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(two_networks())
        except OSError as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        yield made


def test_two_nodes_train_what_one_node_trains(tmp_path: Path, fault_report: FaultReport) -> None:
    """Students 0 and 1 on the first node, student 2 and the teacher on the second."""
    found = []
    for name, ranks in (("two", (2, 2)), ("one", (4,))):
        folder = tmp_path / name
        folder.mkdir()
        with Nodes(folder, ranks, SPREAD) as job:
            assert job.end() == [0] * len(ranks)
            found.append(losses(job.steps()))
    assert len(found[0]) == STEPS and found[0] == found[1]
    fault_report.line(
        "Two nodes", job="3 students, 1 teacher on 2 + 2 ranks", compared_with="4 ranks of one node", lost="nothing"
    )


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_launcher_ends_the_other_node(
    tmp_path: Path, fault_report: FaultReport, start_of_the_long_run: list[tuple[float, ...]], lost: int
) -> None:
    """The student is on the first node, which holds the store, the teacher on the second."""
    with Nodes(tmp_path, (1, 1), LONG) as job:
        job.wait_for_step(COMPARED)
        killed = time.monotonic()
        job.launchers[lost].kill()
        statuses = job.end(BOUND_SECONDS)
        seconds = time.monotonic() - killed
        lines = job.console(1 - lost).splitlines()
        assert losses(job.steps())[:COMPARED] == start_of_the_long_run
    assert statuses[1 - lost] == 1
    gone = f"{('student', 'teacher')[lost]} rank 0 (global rank {lost}, host {socket.gethostname()})"
    # The store of the first node may be missed before its rank is.
    assert lines[-1].startswith("Failed: ")
    assert f" lost {gone}" in lines[-1] or (  # and why: it may have told, or the connection just closed
        lost == 0 and "lost the job's store on localhost, the first node: " in lines[-1]
    )
    node = ("first", "second")[lost]
    fault_report.fault(f"SIGKILL to the launcher of the {node} node", where="1 + 1 ranks on two nodes", seconds=seconds)


def test_a_cut_network_is_named_on_both_sides(
    tmp_path: Path,
    fault_report: FaultReport,
    networks: tuple[Network, Network],
    start_of_the_long_run: list[tuple[float, ...]],
) -> None:
    """Two namespaces are two machines, but for the disk. Nothing tells a rank that its peer can no longer be reached."""
    arguments = (*LONG, "--comm.heartbeat_timeout_seconds", str(HEARTBEAT_TIMEOUT))
    with Nodes(tmp_path, (1, 1), arguments, networks) as job:
        job.wait_for_step(COMPARED)
        cut = time.monotonic()
        networks[1].cut()
        statuses = job.end(HEARTBEAT_TIMEOUT + BOUND_SECONDS)
        seconds = time.monotonic() - cut
        first, second = (job.console(node).splitlines()[-1] for node in range(2))
        assert losses(job.steps())[:COMPARED] == start_of_the_long_run
    assert statuses == [1, 1]
    assert "no sign of life of teacher rank 0 (global rank 1, host machine-2) for " in first
    assert f"no answer of the job's store on {networks[0].address}, the first node, for " in second
    fault_report.fault("the network between two nodes cut", where="1 + 1 ranks on two nodes", seconds=seconds)
