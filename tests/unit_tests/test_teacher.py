"""The client against the server in every layout, with transformers as the reference, and everything that may go wrong."""

import os
import signal
import threading
from unittest import mock

import blockgrow_titan.infra.device  # noqa: F401  # isort: skip  (before torchtitan, in spawned processes too)

import pytest
import torch
import torch.distributed as dist
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import JobConfig

from blockgrow_titan.job_config import Documents, Teacher
from blockgrow_titan.teacher import server
from blockgrow_titan.teacher.bridge import Inbox, Message
from blockgrow_titan.teacher.client import SeparateTeacher, build_teacher_client
from blockgrow_titan.teacher.layout import HEAD
from blockgrow_titan.teacher.messages import BridgeError, Kind, PeerLost
from blockgrow_titan.teacher.server import serve
from blockgrow_titan.teacher.worlds import STUDENT, TEACHER, WorldLayout, join_world
from tests.unit_tests.tiny_teachers import DIM, SEQ_LEN, VOCAB, make_teachers

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict:
    return make_teachers(tmp_path_factory.mktemp("teachers"))


def _config(folder: str, dump_folder: str, micro_batching: str = "packed", **teacher) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = dump_folder
    config.training.seq_len = SEQ_LEN
    config.training.local_batch_size = 4
    config.documents = Documents(micro_batching=micro_batching)
    config.comm.heartbeat_timeout_seconds = 60  # type: ignore[attr-defined]
    config.teacher = Teacher(path=folder, **({"dtype": "float32", "timeout_seconds": 60} | teacher))
    return config


def _batches(student: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A student's micro-batches: uneven, one without a label, one with gaps, and not the same number for everyone."""
    generator = torch.Generator().manual_seed(100 + student)
    batches = []
    for number in range(4 + student):
        lengths = torch.randint(1, SEQ_LEN, (2 + number % 3,), generator=generator)
        input_ids = torch.randint(0, VOCAB, (len(lengths), int(lengths.max())), generator=generator)
        labels = torch.roll(input_ids, -1, 1)
        labels[torch.arange(labels.shape[1]) >= lengths[:, None]] = IGNORE_INDEX
        if number == 1:
            labels[:] = IGNORE_INDEX
        if number == 2:
            labels[:, ::3] = IGNORE_INDEX
        batches.append((input_ids, labels))
    return batches


def _packed(input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """The same documents as a packed row with two tokens of padding."""
    ends = [max([0, *(i + 1 for i, label in enumerate(row) if label != IGNORE_INDEX)]) for row in labels.tolist()]
    rows = [
        torch.cat([*(row[:end] for row, end in zip(batch, ends, strict=True)), torch.full((2,), fill)])
        for batch, fill in ((input_ids, 5), (labels, IGNORE_INDEX))
    ]
    return rows[0][None], rows[1][None], tuple(end for end in ends if end)


def _expected(model, student: int) -> list[torch.Tensor]:
    """transformers on each row alone, at the labelled positions."""
    results = []
    for input_ids, labels in _batches(student):
        with torch.no_grad():
            rows = [model(row[None], output_hidden_states=True).hidden_states[-1][0] for row in input_ids]
        results.append(torch.cat([hidden[row != IGNORE_INDEX] for hidden, row in zip(rows, labels, strict=True)]))
    return results


def _job(rank: int, world_size: int, store: dist.Store, folder: str, dump_folder: str, **teacher):
    """One whole job: students submit ahead and take results out of order, teachers serve until all have stopped."""
    config = _config(folder, dump_folder, **teacher)
    layout = WorldLayout.plan(world_size, config.teacher.ranks, True, config.teacher.shard_degree)
    world = join_world(config, layout, store, rank)
    threads = threading.active_count()
    try:
        if world.role == TEACHER:
            served = serve(config, world, CPU)
            return served.requests, served.tokens
        client = build_teacher_client(config, world, CPU)
        assert client is not None and client.hidden_size == DIM and client.head_weight.shape == (VOCAB, DIM)
        assert type(client.head_weight) is torch.Tensor and not client.head_weight.requires_grad
        batches = _batches(world.role_rank)
        tickets = [client.submit(*batch) for batch in batches]
        if layout.num_teachers or config.teacher.shard_degree == 1:
            results = {n: client.result(tickets[n]) for n in reversed(range(len(tickets)))}
        else:  # the ranks of a shard group take their results together
            results = {n: client.result(tickets[n]) for n in range(4)}
        assert client.pop_wait_seconds() > 0.0 and client.pop_wait_seconds() == 0.0
        again = client.result(client.submit(*batches[0]))  # validation, between two requests of training
        assert torch.equal(again, results[0])
        for n in range(4):
            row = client.result(client.submit(*_packed(*batches[n])))
            torch.testing.assert_close(row, results[n], rtol=0, atol=1e-5)
        client.submit(*batches[2])  # asked ahead, never taken
        client.close()
        client.close()
        return type(client).__name__, [results[n] for n in sorted(results)], client.head_weight
    finally:
        world.close()
        assert threading.active_count() < threads + 1  # neither heartbeat nor pairs are left


@pytest.mark.parametrize(
    "world_size, teacher",
    [
        (2, {"ranks": 1}),
        (2, {"ranks": 1, "micro_batching": "count"}),
        (3, {"ranks": -1}),
        (3, {"ranks": 2}),
        (3, {"ranks": 2, "shard_degree": 2}),
        (2, {"ranks": 0}),
        (2, {"ranks": 0, "shard_degree": 2}),
        (2, {"ranks": 0, "shard_degree": 2, "micro_batching": "balanced"}),
    ],
    ids=[
        "1+1",
        "1+1 padded",
        "2+1",
        "1+2",
        "1+2 sharded",
        "colocated",
        "colocated sharded",
        "colocated sharded padded",
    ],
)
def test_every_layout_gives_the_hidden_states_of_transformers(rank_pool, teachers, tmp_path, world_size, teacher):
    folder, reference = teachers["untied"]
    reports = rank_pool.run(_job, world_size, folder=str(folder), dump_folder=str(tmp_path), **teacher)
    layout = WorldLayout.plan(world_size, teacher["ranks"], True)
    asked = 0
    for student, (kind, results, head) in enumerate(reports[: layout.num_students]):
        assert kind == ("SeparateTeacher" if layout.num_teachers else "ColocatedTeacher")
        assert torch.equal(head, reference.state_dict()[HEAD])
        expected = _expected(reference, student)
        for got, want in zip(results, expected, strict=len(results) == len(expected)):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        assert results[1].shape == (0, DIM)
        asked += len(expected) - 1 + 1 + 3  # all but the empty one, the first once more, and three packed rows
    served = reports[layout.num_students :]
    if served:  # what was asked ahead and never taken may or may not have been answered
        assert asked <= sum(requests for requests, _ in served) <= asked + layout.num_students
    if layout.num_teachers == 2:  # dealt in turn
        assert abs(served[0][0] - served[1][0]) <= 1


def _job_in_bfloat16(rank: int, world_size: int, store: dist.Store, folder: str, dump_folder: str, ranks: int):
    config = _config(folder, dump_folder, ranks=ranks, dtype="bfloat16")
    world = join_world(config, WorldLayout.plan(world_size, ranks, True), store, rank)
    try:
        if world.role == TEACHER:
            return serve(config, world, CPU).tokens
        client = build_teacher_client(config, world, CPU)
        assert client is not None
        hidden = client.result(client.submit(*_batches(0)[0]))
        client.close()
        return hidden, client.head_weight
    finally:
        world.close()


def test_bfloat16_on_the_wire_is_bit_equal_to_colocated(rank_pool, teachers, tmp_path):
    arguments = {"folder": str(teachers["tied"][0]), "dump_folder": str(tmp_path)}
    (hidden, head), tokens = rank_pool.run(_job_in_bfloat16, 2, ranks=1, **arguments)
    ((colocated, colocated_head),) = rank_pool.run(_job_in_bfloat16, 1, ranks=0, **arguments)
    assert hidden.dtype == head.dtype == torch.bfloat16 and tokens == len(hidden)
    assert torch.equal(hidden, colocated) and torch.equal(head, colocated_head)


def _wrong_job(rank: int, world_size: int, store: dist.Store, folder: str, dump_folder: str, fault: str) -> list[str]:
    """Two students and one teacher, which is late, fails, or has a student that fails. The texts of the errors."""
    # The teacher must bear a silence of any length; its own limit is then shorter than the students'.
    impatient = fault == "late" or (fault == "silence" and rank == 2)
    config = _config(folder, dump_folder, ranks=1, timeout_seconds=1 if impatient else 60)
    world = join_world(config, WorldLayout(2, 1), store, rank)
    errors = []
    try:
        if world.role == TEACHER:
            with mock.patch.object(server.TeacherModel, "hidden_states", _misbehave(store, fault)):
                serve(config, world, CPU)
            return []
        if fault == "absent":
            config.teacher.path = folder.removesuffix("/absent")
        client = build_teacher_client(config, world, CPU)
        assert isinstance(client, SeparateTeacher)
        if fault == "student" and rank == 1:
            client.close(error="ValueError: out of disk")
            return []
        if fault == "vanishes" and rank == 1:
            client.pairs[0].close()
            return []
        if fault == "large":
            row = torch.ones(1, 4 * SEQ_LEN + 1, dtype=torch.int64)
            client.submit(row, row, (SEQ_LEN, SEQ_LEN, SEQ_LEN, SEQ_LEN, 1))
        if fault == "silence":
            threading.Event().wait(1.5)  # longer than timeout_seconds, before the first request and between two
        hidden = client.result(client.submit(*_batches(0)[0]))
        if fault == "silence":
            threading.Event().wait(1.2)
            assert torch.equal(hidden, client.result(client.submit(*_batches(0)[0])))
        client.close()
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
        if world.role == STUDENT and fault in ("late", "large"):
            store.add("noted", 1)
            client.close(error=str(error))
    finally:
        store.add("ended", 1)
        while store.add("ended", 0) < world_size:  # nobody is lost before everybody has said why it ends
            threading.Event().wait(0.01)
        world.close()
    return errors


def _misbehave(store: dist.Store, fault: str):
    original = server.TeacherModel.hidden_states

    def hidden_states(self, ids, lengths):
        if fault == "fails":
            raise IndexError("no such token")
        while fault == "late" and store.add("noted", 0) < 2:
            threading.Event().wait(0.01)
        return original(self, ids, lengths)

    return hidden_states


def test_teacher_that_fails_tells_its_students(rank_pool, teachers, tmp_path):
    *students, teacher = rank_pool.run(
        _wrong_job, 3, folder=str(teachers["tied"][0]), dump_folder=str(tmp_path), fault="fails"
    )
    assert teacher == ["IndexError: no such token"]
    for (text,) in students:
        assert text.startswith("PeerFailed: teacher rank 0 (global rank 2, host ")
        assert text.endswith("failed: IndexError: no such token")


def test_teacher_that_cannot_load_tells_its_students(rank_pool, teachers, tmp_path):
    folder = str(teachers["tied"][0]) + "/absent"
    *students, teacher = rank_pool.run(_wrong_job, 3, folder=folder, dump_folder=str(tmp_path), fault="absent")
    assert teacher[0].startswith('ValueError: teacher.path = "')
    for (text,) in students:
        assert text.startswith("PeerFailed: teacher rank 0 (global rank 2, host ") and "/absent" in text


def test_student_that_vanishes_ends_the_job(rank_pool, teachers, tmp_path):
    first, second, teacher = rank_pool.run(
        _wrong_job, 3, folder=str(teachers["tied"][0]), dump_folder=str(tmp_path), fault="vanishes"
    )
    assert second == []
    assert teacher[0].startswith("PeerLost: teacher rank 0 (global rank 2") and "lost student rank 1" in teacher[0]
    assert not first or ("PeerFailed: teacher rank 0" in first[0] and "lost student rank 1" in first[0])


def test_student_that_fails_ends_the_job(rank_pool, teachers, tmp_path):
    first, second, teacher = rank_pool.run(
        _wrong_job, 3, folder=str(teachers["tied"][0]), dump_folder=str(tmp_path), fault="student"
    )
    assert second == []
    assert teacher[0].startswith("PeerFailed: student rank 1 (global rank 1, host ")
    assert "failed: ValueError: out of disk" in teacher[0]
    # The other student had its answer already, or learns from the teacher what happened.
    assert not first or ("teacher rank 0" in first[0] and "ValueError: out of disk" in first[0])


def test_late_answer_names_the_teacher(rank_pool, teachers, tmp_path):
    *students, teacher = rank_pool.run(
        _wrong_job, 3, folder=str(teachers["tied"][0]), dump_folder=str(tmp_path), fault="late"
    )
    for (text,) in students:
        assert text.startswith("AnswerOverdue: no answer of teacher rank 0 (global rank 2, host ")
        assert "teacher.timeout_seconds = 1" in text and "though its process gives signs of life" in text
    assert "PeerFailed" in teacher[0] and "AnswerOverdue" not in teacher[0] and "no answer of teacher" in teacher[0]


def test_silent_students_are_fine(rank_pool, teachers, tmp_path):
    reports = rank_pool.run(_wrong_job, 3, folder=str(teachers["tied"][0]), dump_folder=str(tmp_path), fault="silence")
    assert reports == [[], [], []]


def test_a_micro_batch_larger_than_the_config_allows_is_refused(rank_pool, teachers, tmp_path):
    *students, teacher = rank_pool.run(
        _wrong_job, 3, folder=str(teachers["tied"][0]), dump_folder=str(tmp_path), fault="large"
    )
    for (text,) in students:
        assert text.startswith("ValueError: a micro-batch of 5 documents of up to 24 tokens, 97 together, is larger")
        assert "training.local_batch_size * training.seq_len, and those of validation, allow 96 documents" in text
    assert teacher[0].startswith("PeerFailed: student rank")


def test_answer_that_nobody_asked_for():
    client = SeparateTeacher.__new__(SeparateTeacher)
    client.inbox, client._answers, client._pending = Inbox(), {}, {4: 2}
    for request_id, rows, words in ((7, 2, "which nobody asked for"), (4, 3, "but 2 were asked for")):
        pair = mock.Mock(peer="teacher rank 0")
        client.inbox.put(Message(pair, Kind.ANSWER, request_id, torch.zeros(rows, DIM), torch.empty(0)))
        with pytest.raises(BridgeError, match=f"teacher rank 0 answered request {request_id} with {rows} .* {words}"):
            client._collect(1.0)


def test_no_teacher():
    assert build_teacher_client(_config("", ""), None, CPU) is None  # type: ignore[arg-type]


# ---- a rank that is killed: in processes of its own, since the pool's would be lost


def _process(rank: int, port: int, folder: str, dump_folder: str, results) -> None:
    """One student and one teacher, which is killed in its second request. The student's error."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    config = _config(folder, dump_folder, ranks=1)
    world = join_world(config, WorldLayout(1, 1), store, rank)
    if world.role == TEACHER:
        calls = iter(range(2))
        original = server.TeacherModel.hidden_states

        def hidden_states(self, ids, lengths):
            if next(calls):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, ids, lengths)

        server.TeacherModel.hidden_states = hidden_states
        serve(config, world, CPU)
    client = build_teacher_client(config, world, CPU)
    assert client is not None
    client.result(client.submit(*_batches(0)[0]))
    try:
        client.result(client.submit(*_batches(0)[2]))
    except PeerLost as error:
        results.put(str(error))
        client.close(error=str(error))
    world.close()
    dist.destroy_process_group()


def test_killed_teacher_is_named(teachers, tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    arguments = (store.port, str(teachers["tied"][0]), str(tmp_path), results)
    processes = [context.Process(target=_process, args=(rank, *arguments)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        text = results.get(timeout=300)
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    assert text.startswith("student rank 0 (global rank 0, host ") and "lost teacher rank 0 (global rank 1, " in text
    assert "onnection" in text
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
