"""What somebody else's connections do to the ports of a job: to gloo's, and to that of torchrun's store.

Port scanners, health checks and mistyped addresses connect and wait, connect and go, or send what is no message. No job
may fail or change by that, neither while its ranks connect nor later. Nothing here keeps out whoever speaks gloo's or the
store's own language: neither asks who connects.
"""

import os
import socket
import threading
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from blockgrow_titan.teacher.bridge import Inbox, Pair
from blockgrow_titan.teacher.messages import Kind, Limits
from blockgrow_titan.teacher.place import World
from blockgrow_titan.teacher.worlds import STUDENT, WorldLayout

LIMITS = Limits(max_rows=4, max_length=100, max_tokens=400, vocab_size=50, hidden_size=8, dtype=torch.float32)
WORDS = {
    "nothing": b"",
    "half a number": b"\x07\x00\x00",
    "a number": b"\x07" + bytes(7),
    "a request of the web": b"GET / HTTP/1.1\r\nHost: job\r\n\r\n",
    "a megabyte": bytes(range(256)) * 4096,
}


def listening(pid: int) -> set[int]:
    """The ports of this machine that a process listens on."""
    connections = psutil.Process(pid).net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def intrude(ports: set[int]) -> list[socket.socket]:
    """For each port and each of ``WORDS`` a connection that says it and stays, and one that says it and goes."""
    stay = []
    for port in sorted(ports):
        for word in WORDS.values():
            for stays in (True, False):
                stray = socket.create_connection(("127.0.0.1", port), timeout=10)
                stray.setblocking(False)
                try:
                    stray.send(word)
                except OSError:  # the other end has had enough
                    pass
                if stays:
                    stay.append(stray)
                else:
                    stray.close()
    return stay


def _talk(rank: int, world_size: int, store: dist.Store, store_port: int, while_connecting: bool) -> list[int]:
    """Ask and answer over a pair that strangers disturb, from rank 1's process; how many ports they found."""
    layout = WorldLayout(1, 1)
    world = World(layout, layout.role_of(rank), 0, 1, rank, store, "localhost")
    store.set(f"pid/{rank}", str(os.getpid()))
    inbox, strays, found = Inbox(), [], []
    before = listening(os.getpid())
    if rank == 1 and while_connecting:
        other = int(store.get("pid/0"))
        while not (ports := listening(other) - {store_port} - _known(store, 0)):
            threading.Event().wait(0.01)
        strays, found = intrude(ports | {store_port}), [len(ports)]
    elif rank == 0:
        store.set("before/0", " ".join(map(str, sorted(before))))
    pair = Pair(world, world.peer(1 - rank), LIMITS, inbox, torch.device("cpu"), timedelta(seconds=60))
    if not while_connecting:
        _meet(store, "connected", world_size)
        if rank == 1:
            ports = listening(os.getpid()) | listening(int(store.get("pid/0")))
            strays, found = intrude(ports | {store_port}), [len(ports)]
        _meet(store, "disturbed", world_size)
    ids = torch.arange(40) % 50
    hidden = torch.arange(40 * 8, dtype=torch.float32).view(40, 8)
    for number in range(20):
        if world.role == STUDENT:
            pair.send_request(number, ids, torch.tensor([40]))
            answer = _next(inbox)
            assert answer.request_id == number and torch.equal(answer.tensor, hidden + number)
        else:
            request = _next(inbox)
            assert torch.equal(request.tensor, ids.int())
            pair.send_answer(request.request_id, hidden + request.request_id)
    if world.role == STUDENT:
        pair.stop(60.0)
    else:
        assert _next(inbox).kind == Kind.STOP
        pair.join(60.0)
        pair.close()
    assert store.add("alive", 1) <= world_size
    for stray in strays:
        stray.close()
    return found


def _known(store: dist.Store, rank: int) -> set[int]:
    return set(map(int, store.get(f"before/{rank}").split()))


def _next(inbox: Inbox) -> Any:
    while (message := inbox.get(1.0)) is None:
        pass
    return message


def _meet(store: dist.Store, name: str, world_size: int) -> None:
    store.add(name, 1)
    while store.add(name, 0) < world_size:
        threading.Event().wait(0.01)


@pytest.mark.parametrize("while_connecting", [True, False])
def test_strangers_change_nothing(rank_pool: Any, while_connecting: bool) -> None:
    rank_pool.run(_idle, 1)  # starts the store
    port = rank_pool._store.port
    student, teacher = rank_pool.run(_talk, 2, store_port=port, while_connecting=while_connecting)
    assert student == [] and teacher[0] >= 1


def _idle(rank: int, world_size: int, store: dist.Store) -> None:
    pass


def test_the_interface_is_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair is made as here, straight from the store."""
    before = listening(os.getpid())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group = ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    connections = psutil.Process().net_connections("tcp")
    ours = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port not in before}
    assert ours == {"127.0.0.1"}
    del group
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    with pytest.raises(RuntimeError, match="no_such_interface"):
        ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
