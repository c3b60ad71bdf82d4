"""Jobs of several nodes on this machine: a launcher (``tools/launch.py``) for each, with the ranks of one node.

Each node may have a network namespace and a host name of its own (``two_networks``), as if it were another machine.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.fault_tests.fork_server import ROOT
from tests.integration_tests.features import SHORT, free_port

CONFIG = ROOT / "train_configs" / "grow_post.toml"
LAUNCHER = ROOT / "tools" / "launch.py"
LAUNCH_SECONDS = 240.0


@dataclass(frozen=True)
class Network:
    """Where a node is."""

    address: str
    interface: str
    namespace: str
    host: str

    @property
    def prefix(self) -> list[str]:
        """A command that starts its arguments there."""
        renamed = ["unshare", "--uts", "sh", "-c", f'hostname {self.host} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.namespace, *renamed]

    def cut(self) -> None:
        """Take the link down: nothing comes or goes any more, and nobody is told."""
        subprocess.run(["ip", "-n", self.namespace, "link", "set", self.interface, "down"], check=True)


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[Network, Network]]:
    """Two network namespaces with a link between them.

    Raises:
        OSError: If this machine or user cannot make them; the text says why.
    """
    name = f"blockgrow{os.getpid()}"
    networks = [Network(f"10.77.0.{n}", f"link{n}", f"{name}-{n}", f"machine-{n}") for n in (1, 2)]
    first, second = networks
    commands = [["ip", "netns", "add", network.namespace] for network in networks]
    ends = [["name", n.interface, "netns", n.namespace] for n in networks]
    commands += [["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]]]
    for n in networks:
        commands += [["ip", "-n", n.namespace, "address", "add", f"{n.address}/24", "dev", n.interface]]
        commands += [["ip", "-n", n.namespace, "link", "set", interface, "up"] for interface in (n.interface, "lo")]
    try:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
        yield first, second
    finally:
        for network in networks:
            subprocess.run(["ip", "netns", "delete", network.namespace], capture_output=True)


class Nodes:
    """One job, started on one node or more; as a context, whatever is left of it is killed at the end.

    Args:
        folder: An empty folder; the dump folder and the nodes' consoles are in it.
        ranks: Of each node.
        arguments: Overrides of the config.
        networks: Where the nodes are; None: on this machine as it is.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Sequence[int],
        arguments: Sequence[str],
        networks: Sequence[Network] | None = None,
    ) -> None:
        self.folder, self.ranks, self.arguments, self.networks = folder, ranks, arguments, networks
        self.launchers: list[psutil.Popen] = []
        self.started: set[psutil.Process] = set()

    def __enter__(self) -> "Nodes":
        host = self.networks[0].address if self.networks else "localhost"
        endpoint = f"{host}:{free_port()}"
        for node in range(len(self.ranks)):
            self.launchers.append(self._start(node, endpoint))
        return self

    def _start(self, node: int, endpoint: str) -> psutil.Popen:
        rendezvous = [
            "--nnodes",
            str(len(self.ranks)),
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            endpoint,
            "--rdzv_id",
            "1",
        ]
        where = ["--rdzv_conf", f"is_host={int(node == 0)}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        prefix: list[str] = []
        if self.networks:
            network = self.networks[node]
            where += ["--local_addr", network.address]
            environment |= {"GLOO_SOCKET_IFNAME": network.interface}
            prefix = network.prefix
        command = [*prefix, sys.executable, str(LAUNCHER), *rendezvous, *where]
        command += ["--nproc_per_node", str(self.ranks[node]), "--role", "rank", "--tee", "3"]
        command += ["-m", "blockgrow_titan.train", "--job.config_file", str(CONFIG)]
        command += ["--job.dump_folder", str(self.folder / "dump"), *SHORT, *self.arguments]
        with open(self.folder / f"node-{node}.log", "w") as output:
            return psutil.Popen(
                command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def __exit__(self, *_: object) -> None:
        self._look()
        for process in (*self.launchers, *self.started):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self.launchers, timeout=30)

    def console(self, node: int) -> str:
        return (self.folder / f"node-{node}.log").read_text(errors="replace")

    def steps(self) -> list[dict[str, Any]]:
        """The train lines of ``metrics.jsonl`` so far."""
        path = self.folder / "dump" / "metrics.jsonl"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == "train"]

    def wait_for_step(self, step: int) -> None:
        """Wait until the job has trained so far."""
        deadline = time.monotonic() + LAUNCH_SECONDS
        while len(self.steps()) < step:
            ended = [launcher for launcher in self.launchers if launcher.poll() is not None]
            assert not ended and time.monotonic() < deadline, self._consoles()
            time.sleep(0.2)
        self._look()

    def end(self, seconds: float = LAUNCH_SECONDS) -> list[int]:
        """Wait until all nodes have ended, with every process that they have started; their exit statuses."""
        deadline = time.monotonic() + seconds
        while any(launcher.poll() is None for launcher in self.launchers):
            assert time.monotonic() < deadline, f"a node still runs after {seconds:g} s\n{self._consoles()}"
            self._look()
            time.sleep(0.2)
        _, left = psutil.wait_procs(self.started, timeout=max(0.0, deadline - time.monotonic()))
        assert not left, f"left behind: {left}\n{self._consoles()}"
        return [launcher.wait() for launcher in self.launchers]

    def _look(self) -> None:
        """Take note of the processes that the launchers have started; torchrun gives each rank a session of its own."""
        for launcher in self.launchers:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.started |= set(launcher.children(recursive=True))

    def _consoles(self) -> str:
        return "\n".join(f"---- node {node}\n{self.console(node)[-6000:]}" for node in range(len(self.ranks)))
