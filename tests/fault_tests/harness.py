"""Jobs of the fork server's ranks: launched, killed, launched again, and compared with an undisturbed run.

    bench = FaultBench(server, workspace, folder)
    case = bench.case("two students and a teacher")            # its undisturbed run is made once
    outcome = bench.disturb(case, [Kill("checkpoint's metadata", rank=0, call=2)], folder / "run")
    outcome.lost                                               # [] if the run ended as the undisturbed one

The ranks of a launch get what torchrun would give them: environment, store, an output of their own. Unlike torchrun,
nobody sends a signal to the survivors of a killed rank: they have to notice it themselves. Only when a rank dies before it
is connected with the others, so that none of them could, they get the SIGTERM that torchrun sends at once.
"""

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.fault_tests.comparing import differences
from tests.fault_tests.fork_server import ForkedRank, ForkServer
from tests.fault_tests.points import UNCONNECTED, Kill
from tests.unit_tests.jobs import arguments

HOST = "127.0.0.1"
BOUND_SECONDS = 15.0  # from the death of a rank to the end of the job
LAUNCH_SECONDS = 120.0
ORPHAN_SECONDS = 10.0  # a loader's worker looks after its parent every 5 s
MAX_LAUNCHES = 4
LOG_LINES = 25
NOISE = re.compile("nanobind|leaked|skipped remainder")  # at the end of an interpreter whose modules were frozen

COMMON: dict[str, Any] = {
    "growth__phase_steps": [3, 4],
    "training__steps": 7,
    "training__local_batch_size": 4,
    "validation__freq": 2,
    "checkpoint__interval": 1,
    "checkpoint__keep_latest_k": 3,
    "teacher__prefetch": 3,
    "metrics__enable_tensorboard": True,
}
ASYNC: dict[str, Any] = {"checkpoint__async_mode": "async"}
KEEP_ALL: dict[str, Any] = {"checkpoint__interval": 2, "checkpoint__keep_latest_k": 0}
KEEP: dict[str, Any] = {"growth__optimizer_at_growth": "keep", "growth__lr_at_growth": "continue"}
REWIND: dict[str, Any] = {"growth__data_at_growth": "rewind"}


@dataclass(frozen=True)
class Layout:
    """Ranks of a job, and fields of its config."""

    num_students: int
    num_teachers: int
    overrides: dict[str, Any]

    @property
    def world_size(self) -> int:
        return self.num_students + self.num_teachers

    def role_of(self, rank: int) -> str:
        return f"student {rank}" if rank < self.num_students else f"teacher {rank - self.num_students}"


LAYOUTS: dict[str, Layout] = {
    "1 student, colocated teacher": Layout(1, 0, REWIND),
    "1 student, 1 teacher": Layout(1, 1, ASYNC | KEEP),
    "2 students, colocated teacher": Layout(2, 0, ASYNC | REWIND),
    "2 students, 1 teacher": Layout(2, 1, KEEP | KEEP_ALL),
    "1 student, 2 teachers that share a copy": Layout(1, 2, {"teacher__shard_degree": 2} | ASYNC),
}


@dataclass
class Launch:
    """What became of one launch."""

    ranks: list[ForkedRank]
    ended_after: float
    """Seconds from the first rank's end to the last one's."""
    hung: list[int] = field(default_factory=list)
    """Ranks that had to be killed."""
    orphans: list[int] = field(default_factory=list)
    """Processes of the ranks that outlived them, killed too."""

    @property
    def statuses(self) -> list[int]:
        return [int(rank.status) if rank.status is not None else -signal.SIGKILL for rank in self.ranks]

    @property
    def output(self) -> str:
        """The end of each rank's output."""
        parts = []
        for number, rank in enumerate(self.ranks):
            lines = [line for line in rank.output.splitlines() if not NOISE.search(line)][-LOG_LINES:]
            parts.append("\n".join([f"---- rank {number}, status {rank.status}", *lines]))
        return "\n".join(parts)


@dataclass
class Case:
    """A kind of job with its undisturbed run."""

    name: str
    layout: Layout
    folder: Path
    calls: list[dict[str, int]]
    """For each rank, how often it comes to each point."""


@dataclass
class Outcome:
    """What became of a run with faults."""

    launches: list[Launch]
    lost: list[str]
    """What differs from the undisturbed run, and every rank that did not end as it should."""

    @property
    def text(self) -> str:
        return "\n".join(self.lost) + "".join(f"\n==== launch {n}\n{x.output}" for n, x in enumerate(self.launches, 1))

    @property
    def slowest_end(self) -> float:
        """Seconds from a death to the end of its job, at most."""
        return max((launch.ended_after for launch in self.launches[:-1]), default=0.0)


class FaultBench:
    """Runs jobs at toy size.

    Args:
        server: Where the ranks come from.
        workspace: What the jobs read (``tests/unit_tests/jobs.py``).
        folder: For the undisturbed runs and the ranks' outputs.
    """

    def __init__(self, server: ForkServer, workspace: Path, folder: Path) -> None:
        self.server, self.workspace, self.folder = server, workspace, folder
        self._cases: dict[str, Case] = {}
        self._launches = 0
        (folder / "logs").mkdir()

    def case(self, name: str) -> Case:
        """A layout with its undisturbed run, which is made on first use."""
        if name not in self._cases:
            layout, folder = LAYOUTS[name], self.folder / f"undisturbed{len(self._cases)}"
            counts = [str(self.folder / f"counts{len(self._cases)}-{rank}.json") for rank in range(layout.world_size)]
            launch = self.launch(self.arguments(layout, folder), layout.world_size, counts=counts)
            assert launch.statuses == [0] * layout.world_size, f"undisturbed run of '{name}'\n{launch.output}"
            calls = [json.loads(Path(file).read_text()) for file in counts]
            self._cases[name] = Case(name, layout, folder, calls)
        return self._cases[name]

    def arguments(self, layout: Layout, folder: Path, **overrides: Any) -> list[str]:
        """The command line of a layout's job in ``folder``."""
        return arguments(
            self.workspace,
            folder,
            **(COMMON | layout.overrides | {"teacher__ranks": layout.num_teachers} | overrides),
        )

    def launch(
        self,
        args: list[str],
        world_size: int,
        kills: Sequence[Kill] = (),
        counts: Sequence[str] | None = None,
        seconds: float = LAUNCH_SECONDS,
        prepare: str | None = None,
        prepare_arguments: dict[str, Any] | None = None,
        store: dist.TCPStore | None = None,
        **environment: str,
    ) -> Launch:
        """Start the ranks of a job and wait until all have ended, by themselves if they can.

        Args:
            args: The command line.
            world_size: Ranks.
            kills: Faults.
            counts: A file for each rank's calls of all points, or None.
            seconds: What is not done by then is killed; so is what still runs 15 s after another rank's failure.
            prepare: See ``ranks.run``.
            prepare_arguments: See ``ranks.run``.
            store: The job's store; a new one if None.
            environment: More variables of the ranks.
        """
        self._launches += 1
        store = store or new_store()
        shared = os.environ | {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        shared |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        shared |= {"OMP_NUM_THREADS": "1"} | environment
        ranks = []
        for rank in range(world_size):
            work = {"arguments": args, "kills": list(kills), "counts": counts[rank] if counts else None}
            work |= {"prepare": prepare, "prepare_arguments": prepare_arguments}
            log = self.folder / "logs" / f"launch{self._launches}-rank{rank}.log"
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(self.server.start("tests.fault_tests.ranks:run", work, shared | numbers, log))
        return self._watch(ranks, seconds, tell_survivors=any(kill.point in UNCONNECTED for kill in kills))

    def _watch(self, ranks: list[ForkedRank], seconds: float, tell_survivors: bool) -> Launch:
        deadline = time.monotonic() + seconds
        while running := [rank for rank in ranks if rank.status is None]:
            if failures := [rank.ended_at for rank in ranks if rank.status]:
                deadline = min(deadline, min(failures) + BOUND_SECONDS)
                for rank in running if tell_survivors else ():
                    os.kill(rank.pid, signal.SIGTERM)
                tell_survivors = False
            if not self.server.wait_any(running, deadline - time.monotonic()):
                break
        hung = [number for number, rank in enumerate(ranks) if rank.status is None]
        for number in hung:
            os.kill(ranks[number].pid, signal.SIGUSR1)  # the stacks of its threads go to its output
        if hung:
            time.sleep(1.0)
        for number in hung:
            os.kill(ranks[number].pid, signal.SIGKILL)
        self.server.wait(ranks, 30.0)
        ends = [rank.ended_at for rank in ranks]
        return Launch(ranks, max(ends) - min(ends), hung, _end_orphans([rank.pid for rank in ranks]))

    def disturb(
        self,
        case: Case,
        faults: Sequence[Sequence[Kill]],
        folder: Path,
        seconds: float = LAUNCH_SECONDS,
        keep_store: bool = False,
    ) -> Outcome:
        """Run the case's job with faults, launching it again until it is complete; compare it with the undisturbed run.

        Args:
            case: What to run.
            faults: The kills of the first launch, of the second, and so on.
            folder: Its dump folder.
            seconds: For one launch.
            keep_store: Whether all launches have one store, as torchrun's restarts; else each has its own.
        """
        layout, launches, lost = case.layout, [], []
        store = new_store() if keep_store else None
        args = self.arguments(layout, folder)
        for kills in [*faults, *[()] * MAX_LAUNCHES]:
            launch = self.launch(args, layout.world_size, kills, seconds=seconds, store=store)
            launches.append(launch)
            lost += [f"{layout.role_of(rank)} did not end by itself" for rank in launch.hung]
            lost += [f"process {pid} was left behind" for pid in launch.orphans]
            if launch.statuses == [0] * layout.world_size:
                break
            complete = (folder / "summary.json").exists()
            lost += [  # a teacher's rank is done once its students have told it to stop
                f"{layout.role_of(rank)} ended with status 0 beside a failed rank"
                for rank, status in enumerate(launch.statuses[: layout.num_students])
                if status == 0 and not complete
            ]
            if not kills:
                lost.append("a launch without a fault failed")
                break
        return Outcome(launches, lost + differences(folder, case.folder))


def new_store() -> dist.TCPStore:
    """A store that outlives the ranks, as that of torchrun's agent."""
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def _end_orphans(sessions: Sequence[int]) -> list[int]:
    """Wait until no process of these sessions is left; kill and return those that stay."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while (left := _members(sessions)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _members(sessions: Sequence[int]) -> list[int]:
    """The processes of these sessions, those that only wait to be reaped left out."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, _, _, session = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[:4]
            except (OSError, ValueError):  # it has just ended
                continue
            if int(session) in sessions and state != "Z":
                found.append(int(entry))
    return found
