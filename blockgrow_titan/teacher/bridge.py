"""The connection of one student rank and one teacher rank, and what arrives on it.

A pair of ranks is a two-member gloo group of its own, made straight from the job's store, so that connections grow with
the number of routes and a fault names its two ends. Each pair has two daemon threads:

- One sends, so that callers never wait for the network; gloo tells that a send is done only to one who waits for it.
- One posts the receive of the next header, **without a time limit**: a receive that times out closes a gloo pair for
  good, and a peer may be silent as long as it likes. The header is checked before the payload is allocated.

What arrives goes to the rank's ``Inbox``. A lost peer, an ERROR or a malformed message is logged at once from the
receiving thread, since torchrun ends the survivors within a second, is raised to whoever reads the inbox, and ends the
process a few seconds later if nobody does.
"""

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo
from torchtitan.tools.logging import logger

from blockgrow_titan.teacher.heartbeats import cause_of
from blockgrow_titan.teacher.messages import (
    MAX_TEXT_BYTES,
    BridgeError,
    Header,
    Kind,
    Limits,
    MalformedMessage,
    PeerFailed,
    PeerLost,
    check_request,
)
from blockgrow_titan.teacher.place import Peer, World
from blockgrow_titan.teacher.worlds import STUDENT

FOREVER = timedelta(days=365)
HEADER_TAG, PAYLOAD_TAG, NO_TAG = 0, 1, 2
LAST_WORDS_SECONDS = 5.0


@dataclass
class Message:
    """A received REQUEST, ANSWER or STOP."""

    pair: "Pair"
    kind: Kind
    request_id: int
    tensor: Tensor
    """ANSWER: [N, D] hidden states; REQUEST: [N] int32 token ids; on CPU, pinned if the rank has an accelerator."""
    lengths: Tensor
    """REQUEST: [B] int32 lengths; else empty."""


class Inbox:
    """Where the threads of a rank's pairs put what arrives, in order of arrival; a failure overtakes everything."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._failure: BridgeError | None = None

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def fail(self, error: BridgeError) -> None:
        """Make every later ``get`` raise ``error`` (the first one only)."""
        self._failure = self._failure or error
        self._messages.put(None)

    def get(self, timeout: float) -> Message | None:
        """The next message, or None if there is none after ``timeout`` seconds.

        Raises:
            BridgeError: If a peer is lost, has failed or sent a malformed message.
        """
        try:
            message = self._messages.get(timeout=timeout) if timeout > 0 else self._messages.get_nowait()
        except queue.Empty:
            message = None
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # not the frames of the thread that met it
        return message


class Pair:
    """One end of the connection of a student and a teacher rank. Both ends must construct it at about the same time.

    Args:
        world: This rank's world.
        peer: The other end.
        limits: Bounds of the messages.
        inbox: Where received messages go.
        device: This rank's device; buffers are pinned for an accelerator.
        timeout: For the connection to come about, not for any message.
    """

    def __init__(
        self, world: World, peer: Peer, limits: Limits, inbox: Inbox, device: torch.device, timeout: timedelta
    ) -> None:
        self.peer, self.me = peer, world.me
        self.world, self.limits, self.inbox, self.device = world, limits, inbox, device
        student, teacher = (self.me, peer) if world.role == STUDENT else (peer, self.me)
        name = f"{student.role_rank}-{teacher.role_rank}"
        self._their_end = 1 if world.role == STUDENT else 0
        try:
            store = PrefixStore(f"bridge/{name}", world.store)
            self._group: Any = ProcessGroupGloo(store, 1 - self._their_end, 2, timeout)
        except RuntimeError as error:
            raise PeerLost(f"{self.me} could not connect to {peer}: {cause_of(error)}") from error
        self._lock = threading.Lock()
        self._ending = False  # nothing more may be sent, and a broken connection is no news
        self._outbox: queue.SimpleQueue[tuple[Header, Tensor | None] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name=f"send {name}", daemon=True)
        self._receiver = threading.Thread(target=self._receive_all, name=f"receive {name}", daemon=True)
        self._sender.start()
        self._receiver.start()
        atexit.register(self.close)  # a thread that wakes while the interpreter ends would abort the process

    @property
    def ended(self) -> bool:
        """True once STOP or ERROR was sent or received, or the peer was lost: what is sent then goes nowhere."""
        return self._ending

    def send_request(self, request_id: int, ids: Tensor, lengths: Tensor) -> None:
        """Ask for hidden states; returns at once.

        Args:
            request_id: >= 0, comes back with the answer.
            ids: [N] integers on CPU, N >= 1.
            lengths: [B] integers on CPU whose sum is N.
        """
        payload = torch.cat((lengths, ids)).to(torch.int32)  # [B + N]
        self._send(Header(Kind.REQUEST, request_id, payload.dtype, tuple(payload.shape), len(lengths)), payload)

    def send_answer(self, request_id: int, hidden: Tensor) -> None:
        """Send [N, D] hidden states, from an accelerator copied to the host first; returns as soon as they are there.

        From the CPU they are sent as they are: the caller must not write to them any more.
        """
        on_host = hidden.device.type == "cpu"
        payload = hidden.contiguous() if on_host else self._empty(tuple(hidden.shape), hidden.dtype).copy_(hidden)
        self._send(Header(Kind.ANSWER, request_id, payload.dtype, tuple(payload.shape)), payload)

    def stop(self, timeout: float) -> None:
        """Send STOP and wait for the peer's reply, which does not depend on what the peer is busy with."""
        self._send(Header(Kind.STOP), None, last=True)
        self.join(timeout)
        self.close()

    def fail(self, text: str) -> None:
        """Send ERROR, why this rank ends; the peer replies with STOP. ``tell_failure`` waits for that."""
        data = bytearray(text.encode()[:MAX_TEXT_BYTES]) or bytearray(b"no reason given")
        payload = torch.frombuffer(data, dtype=torch.uint8)
        self._send(Header(Kind.ERROR, 0, payload.dtype, tuple(payload.shape)), payload, last=True)
        self._outbox.put(None)

    def join(self, timeout: float) -> None:
        """Wait for both threads, which end after STOP has gone both ways."""
        deadline = time.monotonic() + timeout
        for thread in (self._receiver, self._sender):
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End both threads, whatever the peer does; messages under way may be lost. Safe to call again."""
        with self._lock:
            self._ending = True
        self._outbox.put(None)
        if self._receiver.is_alive() or self._sender.is_alive():
            with contextlib.suppress(RuntimeError):  # a receive that times out closes the pair: here that is the point
                self._group.recv([torch.empty(1)], self._their_end, NO_TAG).wait(timedelta(milliseconds=1))
            self.join(LAST_WORDS_SECONDS)
        atexit.unregister(self.close)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def _send(self, header: Header, payload: Tensor | None, last: bool = False) -> None:
        with self._lock:
            if not self._ending:
                self._ending = last
                self._outbox.put((header, payload))

    def _send_all(self) -> None:
        """The sending thread: one message after the other, until None."""
        try:
            while (item := self._outbox.get()) is not None:
                header, payload = item
                self._group.send([header.pack()], self._their_end, HEADER_TAG).wait(FOREVER)
                if payload is not None:
                    self._group.send([payload], self._their_end, PAYLOAD_TAG).wait(FOREVER)
        except RuntimeError as error:
            self._broken(self._lost(error), gone=True)

    def _receive_all(self) -> None:
        """The receiving thread: until STOP, ERROR, a malformed message or a broken connection."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)  # pinned buffers belong to a device's context
        try:
            while self._receive():
                pass
        except (PeerLost, PeerFailed) as error:
            self._broken(error, gone=True)
        except MalformedMessage as error:
            self._broken(MalformedMessage(f"malformed message, {self.peer} -> {self.me}: {error}"), gone=False)
        except Exception as error:  # no memory for the payload, say
            text = f"{self.me}, receiving from {self.peer}: {type(error).__name__}: {error}"
            self._broken(BridgeError(text), gone=False)

    def _receive(self) -> bool:
        """Receive one message; False after the last."""
        packed = torch.empty(Header.SIZE, dtype=torch.int64)
        self._wait(packed, HEADER_TAG)
        header = Header.parse(packed, self.limits, self.me.role)
        payload = self._empty(header.shape, header.dtype)
        if header.num_bytes:
            self._wait(payload, PAYLOAD_TAG)
        match header.kind:
            case Kind.ERROR:
                raise PeerFailed(f"{self.peer} failed: {bytes(payload.tolist()).decode(errors='replace')}")
            case Kind.STOP:
                self._send(Header(Kind.STOP), None, last=True)  # the reply, if this end has not sent its own
                self._outbox.put(None)
        message = Message(self, header.kind, header.request_id, payload[header.rows :], payload[: header.rows])
        if header.kind == Kind.REQUEST:
            check_request(message.tensor, message.lengths, self.limits)
        self.inbox.put(message)
        return header.kind != Kind.STOP

    def _wait(self, buffer: Tensor, tag: int) -> None:
        try:
            self._group.recv([buffer], self._their_end, tag).wait(FOREVER)
        except RuntimeError as error:
            raise self._lost(error) from None

    def _lost(self, error: RuntimeError) -> PeerLost:
        with contextlib.suppress(RuntimeError):  # the job's store may be gone too
            if (text := self.world.failure_of(self.peer.global_rank)) is not None:
                return PeerLost(f"{self.me} lost {self.peer}, which failed: {text}")
        return PeerLost(f"{self.me} lost {self.peer}: {cause_of(error)}")

    def _broken(self, error: BridgeError, gone: bool) -> None:
        """Nothing more comes from the peer; unless it is gone, it can still be told why (``fail``)."""
        with self._lock:
            expected, self._ending = self._ending, self._ending or gone
        if isinstance(error, PeerFailed) and not expected:
            self._outbox.put((Header(Kind.STOP), None))  # the reply that the peer waits for
        if expected or gone:
            self._outbox.put(None)
        if not expected:
            logger.error(str(error))
            self.inbox.fail(error)
            self.world.doom(str(error))  # the main thread may be busy for long without a look at the inbox


def connect(
    world: World, peer_ranks: Sequence[int], limits: Limits, device: torch.device, timeout: float
) -> tuple[list[Pair], Inbox]:
    """Connect this rank with its peers of the other world; every one of them must call it too.

    A peer may take as long as it needs to arrive (a data set to prepare, weights to read): only a failure that it has
    reported ends the wait, and the watchdog (``heartbeats.py``) that of a peer without a sign of life.

    Args:
        world: This rank's world.
        peer_ranks: Global ranks of the peers, from the layout's ``teachers_of`` or ``students_of``.
        limits: Bounds of the messages.
        device: This rank's device.
        timeout: Seconds for one connection to come about.

    Raises:
        BridgeError: If a peer fails or is lost before it is connected.
    """
    # Two rounds, so that no end sits in the time-limited handshake of one pair while its peer waits for a third rank.
    for flag in ("ready", "connecting"):
        world.flag(flag)
        for rank in peer_ranks:
            _await_flag(world, rank, flag)
    inbox = Inbox()
    limit = timedelta(seconds=timeout)
    return [Pair(world, world.peer(rank), limits, inbox, device, limit) for rank in peer_ranks], inbox


def tell_failure(pairs: Sequence[Pair], text: str) -> None:
    """Tell all peers why this rank ends, as far as they can be told within a few seconds."""
    deadline = time.monotonic() + LAST_WORDS_SECONDS
    for pair in pairs:
        pair.fail(text)
    for pair in pairs:
        pair.join(max(0.0, deadline - time.monotonic()))
    for pair in pairs:
        pair.close()


def _await_flag(world: World, rank: int, flag: str) -> None:
    began, told, pause = time.monotonic(), 0, 0.01
    while not world.has_flag(flag, rank):
        if (text := world.failure_of(rank)) is not None:
            raise PeerFailed(f"{world.peer(rank)} failed: {text}")
        if time.monotonic() - began > 30 * (told + 1):
            told += 1
            logger.info(f"Waiting for {world.peer(rank)} to be ready ({30 * told} s so far)")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
