"""The teacher's files and numbers against transformers; the client against the server in every layout."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import JobConfig

from blockgrow_titan.job_config import Teacher
from blockgrow_titan.teacher import server
from blockgrow_titan.teacher.bridge import BridgeError
from blockgrow_titan.teacher.client import Documents, SeparateTeacher, build_teacher_client
from blockgrow_titan.teacher.messages import PeerLost
from blockgrow_titan.teacher.model import (
    CONFIG,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    INDEX,
    SINGLE,
    TeacherFiles,
    build_teacher,
)
from blockgrow_titan.teacher.server import serve
from blockgrow_titan.teacher.worlds import STUDENT, TEACHER, WorldLayout, join_world

VOCAB, DIM, SEQ_LEN = 97, 32, 24
CPU = torch.device("cpu")


def _save_teacher(folder: Path, tied: bool, **save_kwargs):
    """A tiny random Qwen3, saved by transformers. Odd sizes, so that no shard is even; heads wider than D / heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=51,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 12345.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(1 + 0.2 * torch.randn_like(param) if param.ndim == 1 else 0.3 * torch.randn_like(param))
    model.save_pretrained(folder, **save_kwargs)
    return model


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict:
    """name -> (folder, transformers' model)."""
    folder = tmp_path_factory.mktemp("teachers")
    return {
        "untied": (folder / "untied", _save_teacher(folder / "untied", False)),
        "tied": (folder / "tied", _save_teacher(folder / "tied", True)),
        "sharded_files": (folder / "sharded", _save_teacher(folder / "sharded", False, max_shard_size="20KB")),
    }


def _documents(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [N] and lengths [B]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (sum(lengths),), generator=generator), torch.tensor(lengths)


@torch.no_grad()
def _reference(model, ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers, one document at a time: hidden states [N, D] and logits [N, V]."""
    outputs = [
        model(document[None], output_hidden_states=True) for document in ids.split(lengths.tolist()) if len(document)
    ]
    return (torch.cat([o.hidden_states[-1][0] for o in outputs]), torch.cat([o.logits[0] for o in outputs]))


# ---- files


@pytest.mark.parametrize("name", ["untied", "tied", "sharded_files"])
def test_hidden_states_and_logits_match_transformers(teachers, name):
    folder, reference = teachers[name]
    files = TeacherFiles(str(folder))
    assert (folder / INDEX).exists() == (name == "sharded_files")
    assert (HEAD in files.names()) == (not files.tied)
    teacher = build_teacher(files, dtype=torch.float32, device=CPU, max_seq_len=SEQ_LEN)
    ids, lengths = _documents([7, SEQ_LEN, 1, 0, 12])
    hidden = teacher.hidden_states(ids, lengths)
    expected_hidden, expected_logits = _reference(reference, ids, lengths)
    torch.testing.assert_close(hidden, expected_hidden, rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden @ files.head().T, expected_logits, rtol=0, atol=1e-5)
    state = reference.state_dict()
    for got, key in ((files.embedding(), EMBEDDING), (files.final_norm(), FINAL_NORM), (files.head(), HEAD)):
        assert torch.equal(got, state[key])
    assert torch.equal(files.read_slice(HEAD if not files.tied else EMBEDDING, 3, 9), files.head()[3:9])


def test_a_document_does_not_depend_on_its_batch(teachers):
    teacher = build_teacher(
        TeacherFiles(str(teachers["tied"][0])), dtype=torch.float32, device=CPU, max_seq_len=SEQ_LEN
    )
    ids, lengths = _documents([5, 20, 11, SEQ_LEN])
    together = teacher.hidden_states(ids, lengths)
    alone = [teacher.hidden_states(d, torch.tensor([len(d)])) for d in ids.split(lengths.tolist())]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_teacher_is_frozen_and_in_its_dtype(teachers):
    files = TeacherFiles(str(teachers["untied"][0]))
    teacher = build_teacher(files, dtype=torch.bfloat16, device=CPU, max_seq_len=SEQ_LEN)
    assert not teacher.model.training and teacher.model.output is None
    for name, param in teacher.model.named_parameters():
        assert param.dtype == torch.bfloat16 and not param.requires_grad, name
    assert teacher.model.rope_cache.dtype == torch.float32 and teacher.model.rope_cache.shape == (SEQ_LEN, 24)
    head = VOCAB * DIM
    assert teacher.num_parameters == sum(p.numel() for p in teachers["untied"][1].parameters()) - head
    hidden = teacher.hidden_states(*_documents([4, 3]))
    assert hidden.dtype == torch.bfloat16 and not hidden.requires_grad
    expected, _ = _reference(teachers["untied"][1], *_documents([4, 3]))
    assert (hidden.float() - expected).norm() < 0.03 * expected.norm()
    empty = teacher.hidden_states(*_documents([0, 0]))
    assert empty.shape == (0, DIM) and empty.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "ids, lengths, words",
    [
        ([1, 2], [3], "sum to 3, but there are 2 ids"),
        ([1] * 25, [25], "training.seq_len = 24"),
        ([1, VOCAB], [2], "token ids 1 to 97 do not fit the teacher's vocabulary of 97"),
    ],
)
def test_bad_documents(teachers, ids, lengths, words):
    teacher = build_teacher(
        TeacherFiles(str(teachers["tied"][0])), dtype=torch.float32, device=CPU, max_seq_len=SEQ_LEN
    )
    with pytest.raises(ValueError) as error:
        teacher.hidden_states(torch.tensor(ids), torch.tensor(lengths))
    assert words in str(error.value)


def _edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / CONFIG).read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    (folder / CONFIG).write_text(json.dumps(config))


def _edit_weights(folder: Path, edit) -> None:
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)


def _cut_norm(tensors: dict) -> None:
    tensors["model.layers.1.input_layernorm.weight"] = torch.ones(DIM - 1)


FAULTS = {
    "no folder": (lambda f: shutil.rmtree(f), ValueError, "no teacher folder"),
    "no config": (lambda f: (f / CONFIG).unlink(), ValueError, "config.json"),
    "not JSON": (lambda f: (f / CONFIG).write_text("{"), ValueError, "is not JSON"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), ValueError, "JSON object"),
    "a Llama": (lambda f: _edit_config(f, model_type="llama"), ValueError, 'model_type "llama"'),
    "no size": (lambda f: _edit_config(f, num_hidden_layers=None), ValueError, "num_hidden_layers = None"),
    "no rope": (lambda f: _edit_config(f, rope_parameters=None), ValueError, "rope_theta = None"),
    "long rope": (
        lambda f: _edit_config(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}),
        NotImplementedError,
        "rope_type = yarn",
    ),
    "sliding": (lambda f: _edit_config(f, use_sliding_window=True), NotImplementedError, "use_sliding_window = True"),
    "no weights": (lambda f: (f / SINGLE).unlink(), ValueError, "neither model.safetensors nor"),
    "half a file": (lambda f: (f / SINGLE).write_bytes(b"version 1"), ValueError, "not a whole safetensors file"),
    "missing": (
        lambda f: _edit_weights(f, lambda t: t.pop("model.layers.2.mlp.up_proj.weight")),
        ValueError,
        "model.layers.2.mlp.up_proj.weight is missing",
    ),
    "no head": (lambda f: _edit_weights(f, lambda t: t.pop(HEAD)), ValueError, "lm_head.weight is missing"),
    "shape": (lambda f: _edit_weights(f, _cut_norm), ValueError, "has shape [31], but config.json says [32]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_folders_are_refused_in_one_line(teachers, tmp_path, fault):
    break_it, kind, words = FAULTS[fault]
    folder = tmp_path / "teacher"
    shutil.copytree(teachers["untied"][0], folder)
    break_it(folder)
    with pytest.raises(kind) as error:
        TeacherFiles(str(folder))
    assert words in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


def test_index_that_names_an_absent_file(teachers, tmp_path):
    shutil.copytree(teachers["sharded_files"][0], tmp_path / "teacher")
    gone = sorted((tmp_path / "teacher").glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"{INDEX} names {gone.name}, which is not there"):
        TeacherFiles(str(tmp_path / "teacher"))


def test_old_config_layout_and_length_limit(teachers, tmp_path):
    shutil.copytree(teachers["untied"][0], tmp_path / "teacher")
    _edit_config(tmp_path / "teacher", rope_parameters=None, rope_theta=777.0, rope_scaling=None)
    files = TeacherFiles(str(tmp_path / "teacher"))
    assert files.args.rope_theta == 777.0 and files.args.norm_eps == 1e-5 and files.args.max_seq_len == 64
    with pytest.raises(ValueError, match="training.seq_len = 65 .* max_position_embeddings = 64"):
        build_teacher(files, dtype=torch.float32, device=CPU, max_seq_len=65)


# ---- micro-batches


def test_documents_of_a_batch():
    ignored = IGNORE_INDEX
    input_ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    labels = torch.tensor([[2, 3, ignored, ignored], [ignored] * 4, [ignored, 11, ignored, 7]])
    documents = Documents.of_batch(input_ids, labels)
    assert documents.ids.tolist() == [1, 2, 9, 10, 11, 12] and documents.lengths.tolist() == [2, 0, 4]
    assert documents.keep is not None and documents.keep.tolist() == [True, True, False, True, False, True]
    assert Documents.of_batch(input_ids[:1], labels[:1]).keep is None
    for shape in ((2, 0), (0, 4)):
        empty = torch.zeros(shape, dtype=torch.int64)
        documents = Documents.of_batch(empty, empty)
        assert documents.ids.tolist() == [] and documents.lengths.tolist() == [0] * shape[0] and documents.keep is None
    with pytest.raises(ValueError, match="one shape"):
        Documents.of_batch(input_ids, labels[:, 1:])


# ---- client and server


def _config(folder: str, dump_folder: str, **teacher) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = dump_folder
    config.training.seq_len = SEQ_LEN
    config.training.local_batch_size = config.validation.local_batch_size = 4
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


def _expected(model, student: int) -> list[torch.Tensor]:
    """transformers on each row alone, at the labelled positions."""
    results = []
    for input_ids, labels in _batches(student):
        with torch.no_grad():
            rows = [model(row[None], output_hidden_states=True).hidden_states[-1][0] for row in input_ids]
        results.append(torch.cat([hidden[row != IGNORE_INDEX] for hidden, row in zip(rows, labels, strict=True)]))
    return results


def _job(rank: int, world_size: int, store: dist.Store, folder: str, dump_folder: str, **teacher):
    """One whole job: students submit ahead and take their results out of order, teachers serve until all have stopped."""
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
        (3, {"ranks": -1}),
        (3, {"ranks": 2}),
        (3, {"ranks": 2, "shard_degree": 2}),
        (2, {"ranks": 0}),
        (2, {"ranks": 0, "shard_degree": 2}),
    ],
    ids=["1+1", "2+1", "1+2", "1+2 sharded", "colocated", "colocated sharded"],
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
        asked += len(expected) - 1 + 1  # all but the empty one, and the first once more
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
    config = _config(folder, dump_folder, ranks=1, timeout_seconds=1 if fault in ("late", "silence") else 60)
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
        if fault == "large":
            batch = torch.ones(5, 3, dtype=torch.int64)
            client.submit(batch, batch)
        if fault == "silence":
            threading.Event().wait(2.5)  # longer than timeout_seconds, before the first request and between two
        hidden = client.result(client.submit(*_batches(0)[0]))
        if fault == "silence":
            threading.Event().wait(1.5)
            assert torch.equal(hidden, client.result(client.submit(*_batches(0)[0])))
        client.close()
    except (BridgeError, RuntimeError, ValueError) as error:
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
    assert teacher == ["IndexError: no such token"] or teacher == []
    for (text,) in students:
        assert text.startswith("PeerFailed: teacher rank 0 (global rank 2, host ")
        assert text.endswith("failed: IndexError: no such token")


def test_teacher_that_cannot_load_tells_its_students(rank_pool, teachers, tmp_path):
    folder = str(teachers["tied"][0]) + "/absent"
    *students, teacher = rank_pool.run(_wrong_job, 3, folder=folder, dump_folder=str(tmp_path), fault="absent")
    assert teacher[0].startswith('ValueError: teacher.path = "')
    for (text,) in students:
        assert text.startswith("PeerFailed: teacher rank 0 (global rank 2, host ") and "/absent" in text


def test_student_that_fails_ends_the_job(rank_pool, teachers, tmp_path):
    first, second, teacher = rank_pool.run(
        _wrong_job, 3, folder=str(teachers["tied"][0]), dump_folder=str(tmp_path), fault="student"
    )
    assert second == []
    assert teacher[0].startswith("PeerFailed: student rank 1 (global rank 1, host ")
    assert "failed: ValueError: out of disk" in teacher[0]
    # The other student had its answer already, or learns from the teacher what happened.
    assert not first or ("teacher rank 0" in first[0] and "ValueError: out of disk" in first[0])


def test_late_answer_names_the_teacher_and_its_heartbeat(rank_pool, teachers, tmp_path):
    *students, teacher = rank_pool.run(
        _wrong_job, 3, folder=str(teachers["tied"][0]), dump_folder=str(tmp_path), fault="late"
    )
    for (text,) in students:
        assert text.startswith("AnswerOverdue: no answer of teacher rank 0 (global rank 2, host ")
        assert "teacher.timeout_seconds = 1" in text and "its last heartbeat is" in text
    assert "PeerFailed" in teacher[0] and "AnswerOverdue" not in teacher[0] and "no answer of teacher" in teacher[0]


def test_silent_students_are_fine(rank_pool, teachers, tmp_path):
    reports = rank_pool.run(_wrong_job, 3, folder=str(teachers["tied"][0]), dump_folder=str(tmp_path), fault="silence")
    assert reports == [[], [], []]


def test_a_micro_batch_larger_than_the_config_allows_is_refused(rank_pool, teachers, tmp_path):
    *students, teacher = rank_pool.run(
        _wrong_job, 3, folder=str(teachers["tied"][0]), dump_folder=str(tmp_path), fault="large"
    )
    for (text,) in students:
        assert text.startswith("ValueError: a micro-batch of 5 documents") and "training.local_batch_size" in text
    assert teacher[0].startswith("PeerFailed: student rank")


def test_no_teacher():
    assert build_teacher_client(_config("", ""), None, CPU) is None  # type: ignore[arg-type]


# ---- ranks that are killed: processes of their own, since the pool's would be lost


def _round(job_config, store: dist.Store, name: str, role: str, killed: bool) -> str:
    """One job of one student and one teacher, in which the ``killed`` end gets SIGKILL in its second request."""
    rank = 0 if role == STUDENT else 1
    world = join_world(job_config, WorldLayout(1, 1), dist.PrefixStore(name, store), rank)
    calls = 0
    original = server.TeacherModel.hidden_states

    def hidden_states(self, ids, lengths):
        nonlocal calls
        calls += 1
        if killed and calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, ids, lengths)

    try:
        with mock.patch.object(server.TeacherModel, "hidden_states", hidden_states):
            if role == TEACHER:
                serve(job_config, world, CPU)
                return "served"
            client = build_teacher_client(job_config, world, CPU)
            assert client is not None
            for batch in (_batches(0)[0], _batches(0)[2]):
                client.result(client.submit(*batch))
                if killed:
                    os.kill(os.getpid(), signal.SIGKILL)
            client.close()
            return "trained"
    except PeerLost as error:
        return str(error)
    finally:
        world.close()
        dist.destroy_process_group()


def _process(number: int, port: int, folder: str, dump_folder: str, results) -> None:
    """Process 0 is first a student whose teacher (process 1) is killed, then a teacher whose student (2) is."""
    torch.set_num_threads(1)
    from torchtitan.tools.logging import init_logger

    init_logger()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    config = _config(folder, dump_folder, ranks=1)
    if number < 2:
        text = _round(config, store, "first", (STUDENT, TEACHER)[number], killed=number == 1)
        results.put(text)
    if number != 1:
        results.put(_round(config, store, "second", TEACHER if number == 0 else STUDENT, killed=number == 2))


def test_killed_ranks_are_named_by_the_survivor(teachers, tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    arguments = (store.port, str(teachers["tied"][0]), str(tmp_path), results)
    processes = [context.Process(target=_process, args=(number, *arguments)) for number in range(3)]
    try:
        for process in processes:
            process.start()
        first, second = results.get(timeout=120), results.get(timeout=120)
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
    assert first.startswith("student rank 0 (global rank 0, host ") and "lost teacher rank 0 (global rank 1, " in first
    assert (
        second.startswith("teacher rank 0 (global rank 1, host ") and "lost student rank 0 (global rank 0, " in second
    )
    assert "onnection" in first and "onnection" in second
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, -signal.SIGKILL]
