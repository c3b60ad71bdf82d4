"""Headers and their bounds; pairs that carry messages, errors and STOP between two ranks."""

import logging
import random
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchtitan.config import JobConfig
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.tools.logging import logger

from blockgrow_titan.job_config import Documents, Teacher
from blockgrow_titan.teacher import bridge
from blockgrow_titan.teacher.bridge import Inbox, connect, tell_failure
from blockgrow_titan.teacher.messages import (
    MAX_TEXT_BYTES,
    Header,
    Kind,
    Limits,
    MalformedMessage,
    PeerFailed,
    PeerLost,
    check_request,
)
from blockgrow_titan.teacher.worlds import STUDENT, TEACHER, WorldLayout, join_world

LIMITS = Limits(max_rows=4, max_length=10, max_tokens=40, vocab_size=50, hidden_size=8, dtype=torch.bfloat16)
VALID = [
    (TEACHER, Header(Kind.REQUEST, 7, torch.int32, (2 + 13,), rows=2)),
    (STUDENT, Header(Kind.ANSWER, 7, torch.bfloat16, (13, 8))),
    (STUDENT, Header(Kind.ERROR, 0, torch.uint8, (20,))),
    (TEACHER, Header(Kind.ERROR, 0, torch.uint8, (MAX_TEXT_BYTES,))),
    (STUDENT, Header(Kind.STOP)),
    (TEACHER, Header(Kind.STOP)),
]


@pytest.mark.parametrize("receiver, header", VALID)
def test_header_round_trip(receiver, header):
    assert Header.parse(header.pack(), LIMITS, receiver) == header


REQUEST, ANSWER = VALID[0][1], VALID[1][1]
FIELDS = ("magic", "version", "kind", "request_id", "dtype", "ndim", "dim0", "dim1", "rows", "bytes")


@pytest.mark.parametrize(
    "receiver, header, field, value, words",
    [
        (TEACHER, REQUEST, "magic", 0, "magic number 0x0"),
        (TEACHER, REQUEST, "version", 2, "version 2 is not 1"),
        (STUDENT, REQUEST, "kind", Kind.REQUEST, "kind 1 cannot come to a student"),
        (TEACHER, ANSWER, "kind", Kind.ANSWER, "kind 2 cannot come to a teacher"),
        (TEACHER, REQUEST, "kind", 9, "kind 9"),
        (TEACHER, REQUEST, "request_id", -1, "request id -1"),
        (TEACHER, REQUEST, "dtype", 1, "dtype torch.bfloat16 must be torch.int32"),
        (STUDENT, ANSWER, "dtype", 2, "dtype torch.float32 must be torch.bfloat16"),
        (STUDENT, ANSWER, "dtype", 77, "dtype 77"),
        (STUDENT, ANSWER, "ndim", 1, "1 dimensions"),
        (TEACHER, REQUEST, "dim0", 2 + 41, "size 43 is not 3 to 42"),
        (TEACHER, REQUEST, "dim0", 2, "size 2 is not 3 to 42"),
        (STUDENT, ANSWER, "dim0", 41, "size 41 is not 1 to 40"),
        (STUDENT, ANSWER, "dim0", 2**62, "is not 1 to 40"),
        (STUDENT, ANSWER, "dim1", 16, "hidden size 16 must be 8"),
        (STUDENT, ANSWER, "dim0", 0, "size 0 is not 1 to 40"),
        (STUDENT, ANSWER, "dim0", -1, "size -1 is not 1 to 40"),
        (TEACHER, REQUEST, "ndim", 2, "2 dimensions"),
        (TEACHER, REQUEST, "dim1", 1, "hidden size 1 must be 0"),
        (TEACHER, REQUEST, "rows", 5, "5 documents are not 1 to 4"),
        (TEACHER, REQUEST, "rows", 0, "0 documents are not 1 to 4"),
        (TEACHER, REQUEST, "rows", -1, "-1 documents are not 1 to 4"),
        (STUDENT, ANSWER, "rows", 1, "1 documents do not fit"),
        (STUDENT, ANSWER, "bytes", 1 << 50, "bytes do not fit"),
        (STUDENT, VALID[2][1], "dim0", MAX_TEXT_BYTES + 1, "is not 0 to 65536"),
        (STUDENT, VALID[2][1], "dtype", 1, "dtype torch.bfloat16 must be torch.uint8"),
        (STUDENT, VALID[2][1], "rows", 1, "1 documents do not fit"),
        (STUDENT, VALID[4][1], "dim0", 1, "size 1 is not 0 to 0"),
    ],
)
def test_header_bounds(receiver, header, field, value, words):
    packed = header.pack()
    packed[FIELDS.index(field)] = value
    with pytest.raises(MalformedMessage) as error:
        Header.parse(packed, LIMITS, receiver)
    assert words in str(error.value)


def test_fuzzed_headers_are_refused_or_within_bounds():
    rng = random.Random(0)
    values = [-(2**63), -1, 0, 1, 2, 3, 4, 5, 8, 13, 26, 40, 60, 208, 2**31, 2**40, 2**63 - 1]
    accepted = 0
    for _ in range(4000):
        receiver, header = rng.choice(VALID)
        packed = header.pack()
        for _ in range(rng.randint(0, 4)):
            packed[rng.randrange(Header.SIZE)] = rng.choice(values)
        try:
            parsed = Header.parse(packed, LIMITS, receiver)
        except MalformedMessage:
            continue
        accepted += 1
        assert torch.equal(parsed.pack(), packed)
        assert parsed.num_bytes <= max(MAX_TEXT_BYTES, 4 * (4 + 40), 2 * 40 * 8)
    assert 0 < accepted < 4000


@pytest.mark.parametrize(
    ("micro_batching", "validate", "rows", "tokens"),
    [("packed", False, 96, 96), ("balanced", True, 200, 200), ("count", True, 10, 200), ("count", False, 4, 96)],
)
def test_limits_of_a_job(micro_batching, validate, rows, tokens):
    """The larger of the two splits; one-token documents may fill a micro-batch that is cut by tokens."""
    config: Any = JobConfig()
    config.teacher, config.documents = Teacher(dtype="float32"), Documents(micro_batching=micro_batching)
    config.training.local_batch_size, config.training.seq_len = 4, 24
    config.validation.local_batch_size, config.validation.seq_len, config.validation.enable = 10, 20, validate
    limits = Limits.of_job(config, Qwen3ModelArgs(vocab_size=50, dim=8))
    assert limits == Limits(rows, 24, tokens, 50, 8, torch.float32)


@pytest.mark.parametrize(
    "ids, lengths, words",
    [
        ([1, 2, 3], [2, 2], "lengths sum to 4, but there are 3 ids"),
        ([1, 2, 3], [4, -1], "lengths -1 to 4 are not 0 to 10"),
        ([1] * 12, [11, 1], "lengths 1 to 11 are not 0 to 10"),
        ([1, 50, 3], [3], "ids 1 to 50 are not below 50"),
        ([1, -1, 3], [3], "ids -1 to 3 are not below 50"),
    ],
)
def test_request_bounds(ids, lengths, words):
    with pytest.raises(MalformedMessage) as error:
        check_request(torch.tensor(ids, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), LIMITS)
    assert words in str(error.value)


def test_inbox_keeps_the_order_and_lets_a_failure_overtake():
    inbox = Inbox()
    assert inbox.get(0.0) is None and inbox.get(0.01) is None
    inbox.put("first")  # type: ignore[arg-type]
    inbox.put("second")  # type: ignore[arg-type]
    assert inbox.get(0.0) == "first"
    inbox.fail(PeerLost("gone"))
    inbox.fail(PeerLost("gone too"))
    for _ in range(3):
        with pytest.raises(PeerLost, match="^gone$"):
            inbox.get(0.0)


def _next(inbox: Inbox) -> bridge.Message:
    """The next message; a rank that never gets one is ended by the pool."""
    while (message := inbox.get(1.0)) is None:
        pass
    return message


def _config(dump_folder: str) -> Any:
    config: Any = JobConfig()
    config.teacher = Teacher()
    config.comm.heartbeat_timeout_seconds = 60
    config.job.dump_folder = dump_folder
    return config


def _pairs(rank: int, layout: WorldLayout, store: dist.Store, dump_folder: str) -> tuple:
    world = join_world(_config(dump_folder), layout, store, rank)
    layout = world.layout
    if world.role == STUDENT:
        peers = [layout.global_rank(TEACHER, t) for t in layout.teachers_of(world.role_rank)]
    else:
        peers = [layout.global_rank(STUDENT, s) for s in layout.students_of(world.role_rank)]
    return world, *connect(world, peers, LIMITS, torch.device("cpu"), 60.0)


def _logged(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records if record.levelno >= logging.ERROR]


def _talk(rank: int, world_size: int, store: dist.Store, dump_folder: str) -> dict:
    """Rank 0 asks, rank 1 answers in the opposite order; both see every number arrive as it was sent; then STOP."""
    world, (pair,), inbox = _pairs(rank, WorldLayout(1, 1), store, dump_folder)
    threads = [pair._sender, pair._receiver]
    ids, lengths = torch.tensor([4, 5, 6, 49, 8]), torch.tensor([3, 0, 2])
    hidden = torch.arange(5 * 8, dtype=torch.bfloat16).view(5, 8) / 3
    if world.role == STUDENT:
        for request_id in range(3):
            pair.send_request(request_id, ids + request_id - 2, lengths)
        answers = [_next(inbox) for _ in range(3)]
        assert [a.request_id for a in answers] == [2, 1, 0]
        for answer in answers:
            assert answer.tensor.dtype == torch.bfloat16 and torch.equal(answer.tensor, hidden + answer.request_id)
        pair.stop(60.0)
        assert _next(inbox).kind == Kind.STOP  # the reply
    else:
        requests = [_next(inbox) for _ in range(3)]
        for request_id, request in enumerate(requests):
            assert request.kind == Kind.REQUEST and request.request_id == request_id
            assert torch.equal(request.tensor, ids.int() + request_id - 2)
            assert torch.equal(request.lengths, lengths.int())
        for request in reversed(requests):
            pair.send_answer(request.request_id, hidden + request.request_id)
        assert _next(inbox).kind == Kind.STOP
        pair.join(60.0)
        pair.send_answer(9, hidden)  # too late: goes nowhere
    world.close()
    return {"ended": pair.ended, "threads": [thread.is_alive() for thread in threads], "peer": str(pair.peer)}


def test_messages_and_stop(rank_pool, tmp_path):
    student, teacher = rank_pool.run(_talk, 2, dump_folder=str(tmp_path))
    for report in (student, teacher):
        assert report["ended"] and report["threads"] == [False, False]
    assert student["peer"].startswith("teacher rank 0 (global rank 1, host ")
    assert teacher["peer"].startswith("student rank 0 (global rank 0, host ")


def _fault(rank: int, world_size: int, store: dist.Store, dump_folder: str, fault: str) -> dict:
    """Rank 0, the student, misbehaves; ranks 1 and 2 are teachers. What the inboxes raise, and what is logged."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    world, pairs, inbox = _pairs(rank, WorldLayout(1, 2), store, dump_folder)
    raised: list[str] = []
    if world.role == STUDENT:
        for pair in pairs:
            if fault == "header":
                pair._group.send([torch.full((Header.SIZE,), 3)], pair._their_end, bridge.HEADER_TAG).wait()
            elif fault == "payload":
                pair.send_request(0, torch.tensor([3, LIMITS.vocab_size]), torch.tensor([2]))
        if fault == "failure":
            tell_failure(pairs, "ValueError: no more disk")
            assert all(pair.ended for pair in pairs)
    if world.role == TEACHER or fault != "failure":
        try:
            _next(inbox)
        except (MalformedMessage, PeerFailed) as error:
            raised.append(f"{type(error).__name__}: {error}")
        if world.role == TEACHER:
            tell_failure(pairs, raised[0])
    store.add("done", 1)
    while store.add("done", 0) < world_size:
        threading.Event().wait(0.01)
    for pair in pairs:
        pair.close()
        assert not pair._sender.is_alive() and not pair._receiver.is_alive()
    world.close()
    logger.removeHandler(handler)
    return {"raised": raised, "logged": _logged(records)}


@pytest.mark.parametrize(
    "fault, kind, words",
    [
        (
            "header",
            "MalformedMessage",
            ("malformed message, student rank 0", " -> teacher rank {t}", "magic number 0x3"),
        ),
        ("payload", "MalformedMessage", ("student rank 0 (global rank 0, host ", "ids 3 to 50 are not below 50")),
        ("failure", "PeerFailed", ("student rank 0 (global rank 0, host ", "failed: ValueError: no more disk")),
    ],
)
def test_faults_name_their_pair(rank_pool, tmp_path, fault, kind, words):
    student, *teachers = rank_pool.run(_fault, 3, dump_folder=str(tmp_path), fault=fault)
    for number, report in enumerate(teachers):
        (text,) = report["raised"]
        assert text.startswith(kind)
        for word in words:
            assert word.format(t=number) in text
        assert report["logged"] == [text.removeprefix(f"{kind}: ")]
    if fault != "failure":  # the first teacher's text, whichever that is
        assert student["raised"][0].startswith("PeerFailed: teacher rank ") and words[-1] in student["raised"][0]


def _close(rank: int, world_size: int, store: dist.Store, dump_folder: str) -> tuple[list[bool], str]:
    """Rank 0 closes its end while rank 1 says nothing. Threads alive at this end, and what its inbox raises."""
    world, (pair,), inbox = _pairs(rank, WorldLayout(1, 1), store, dump_folder)
    error = ""
    if rank == 0:
        pair.close()
        pair.send_request(0, torch.tensor([1]), torch.tensor([1]))  # goes nowhere
    else:
        try:
            _next(inbox)
        except PeerLost as lost:
            error = str(lost)
        pair.close()
    world.close()
    return [pair._sender.is_alive(), pair._receiver.is_alive()], error


def test_close_ends_the_threads_whatever_the_peer_does(rank_pool, tmp_path):
    (first_threads, nothing), (second_threads, error) = rank_pool.run(_close, 2, dump_folder=str(tmp_path))
    assert first_threads == second_threads == [False, False] and nothing == ""
    assert error.startswith("teacher rank 0 (global rank 1") and "lost student rank 0 (global rank 0" in error


def _failed_before_connecting(rank: int, world_size: int, store: dist.Store, dump_folder: str) -> str:
    world = join_world(_config(dump_folder), WorldLayout(1, 1), store, rank)
    try:
        if world.role == TEACHER:
            world.report_failure("ValueError: no such folder")
            return ""
        connect(world, [1], LIMITS, torch.device("cpu"), 60.0)
        return "connected"
    except PeerFailed as error:
        return str(error)
    finally:
        world.close()


def test_failure_before_connecting(rank_pool, tmp_path):
    text, _ = rank_pool.run(_failed_before_connecting, 2, dump_folder=str(tmp_path))
    assert text.startswith("teacher rank 0 (global rank 1") and text.endswith("failed: ValueError: no such folder")
