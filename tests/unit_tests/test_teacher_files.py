"""The teacher's files are read or refused; its hidden states are those of transformers."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.loss import IGNORE_INDEX

from blockgrow_titan.teacher.client import Documents
from blockgrow_titan.teacher.files import INDEX, open_teacher
from blockgrow_titan.teacher.layout import EMBEDDING, FINAL_NORM, HEAD
from blockgrow_titan.teacher.model import build_teacher
from blockgrow_titan.teacher.worlds import shard_mesh
from tests.unit_tests.rank_pool import init_gloo
from tests.unit_tests.tiny_teachers import (
    DIM,
    SEQ_LEN,
    VOCAB,
    convert_teachers,
    edit_config,
    make_teachers,
    save_checkpoint,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict:
    return make_teachers(tmp_path_factory.mktemp("teachers"))


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


@pytest.fixture(scope="module")
def converted(teachers, tmp_path_factory) -> dict[str, Path]:
    return convert_teachers(teachers, tmp_path_factory.mktemp("converted"))


@pytest.mark.parametrize("kind", ["folder", "converted"])
@pytest.mark.parametrize("name", ["untied", "tied", "sharded_files"])
def test_hidden_states_and_logits_match_transformers(teachers, converted, name, kind):
    folder, reference = teachers[name]
    assert (folder / INDEX).exists() == (name == "sharded_files")
    files = open_teacher(str(folder if kind == "folder" else converted[name]))
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
    assert files.names() and all(files.shape(key) == list(state[key].shape) for key in files.names())
    for start, stop in ((3, 9), (0, VOCAB), (18, 61), (VOCAB - 1, VOCAB), (5, 5)):  # chunks begin at 0, 20, 40, ...
        assert torch.equal(files.read_slice(EMBEDDING, start, stop), state[EMBEDDING][start:stop])


def share_teacher(
    rank: int, world_size: int, store: dist.Store, folder: str, lengths: list[int]
) -> tuple[torch.Tensor, dict[str, int]]:
    """A pool function: a teacher sharded over all ranks; its hidden states, and how many rows this rank read of each."""
    init_gloo(store, rank, world_size)
    files = open_teacher(folder)
    rows: dict[str, int] = {}
    read_slice = files.read_slice

    def count(name: str, start: int, stop: int) -> torch.Tensor:
        assert name not in rows
        rows[name] = stop - start
        return read_slice(name, start, stop)

    files.read_slice = count  # type: ignore[method-assign]
    mesh = shard_mesh(world_size, world_size)
    teacher = build_teacher(files, dtype=torch.float32, device=CPU, max_seq_len=SEQ_LEN, mesh=mesh)
    return teacher.hidden_states(*_documents(lengths)), rows


@pytest.mark.parametrize("kind", ["folder", "converted"])
@pytest.mark.parametrize("name", ["tied", "sharded_files"])
def test_each_rank_of_a_sharded_teacher_reads_its_own_rows(rank_pool, teachers, converted, name, kind):
    folder, reference = teachers[name]
    lengths = [7, SEQ_LEN, 1, 0, 12]
    path = folder if kind == "folder" else converted[name]
    results = rank_pool.run(share_teacher, 2, folder=str(path), lengths=lengths)
    expected, _ = _reference(reference, *_documents(lengths))
    shapes = {key: param.shape for key, param in reference.named_parameters() if key != HEAD}
    for hidden, rows in results:
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)
        assert rows.keys() == shapes.keys() and all(rows[key] <= -(-shapes[key][0] // 2) for key in shapes)
    assert all(results[0][1][key] + results[1][1][key] == shapes[key][0] for key in shapes)


def test_only_the_chunks_of_the_wanted_rows_are_read(teachers, converted, tmp_path):
    """The files of every other chunk hold nothing but zeros here."""
    folder = tmp_path / "teacher"
    shutil.copytree(converted["untied"], folder)
    stored = FileSystemReader(folder).read_metadata().storage_data
    kept = {
        info.relative_path
        for index, info in stored.items()
        if index.fqn == "tok_embeddings.weight" and index.offset[0] in (20, 40)
    }
    others = [file for file in folder.glob("*.distcp") if file.name not in kept]
    assert len(kept) == 2 and len(others) > 20
    for file in others:
        file.write_bytes(bytes(file.stat().st_size))
    files = open_teacher(str(folder))
    embedding = teachers["untied"][1].state_dict()[EMBEDDING]
    assert torch.equal(files.read_slice(EMBEDDING, 25, 60), embedding[25:60])
    with pytest.raises(ValueError, match="cannot be read at model.embed_tokens.weight .*: convert its source again"):
        files.read_slice(EMBEDDING, 25, 61)


def test_a_checkpoint_of_torchs_own_saving_is_a_teacher(teachers, tmp_path):
    """Whole tensors, in the model's order: nothing depends on how ``from_hf`` cuts and orders them."""
    folder, reference = teachers["untied"]
    save_checkpoint(folder, tmp_path / "teacher")
    files = open_teacher(str(tmp_path / "teacher"))
    state = reference.state_dict()
    assert sorted(files.names()) == sorted(state)
    assert all(torch.equal(files.read(name), state[name]) for name in files.names())
    assert torch.equal(files.read_slice(EMBEDDING, 30, 41), state[EMBEDDING][30:41])


def test_a_document_does_not_depend_on_its_batch(teachers):
    """Packed, padded and one document at a time; nothing of a document reaches another."""
    folder, reference = teachers["tied"]
    files = open_teacher(str(folder))
    ids, lengths = _documents([5, 20, 0, 1, 11, SEQ_LEN])
    expected, _ = _reference(reference, ids, lengths)
    for packed in (False, True):
        teacher = build_teacher(files, dtype=torch.float32, device=CPU, max_seq_len=SEQ_LEN, packed=packed)
        shapes: list[torch.Size] = []
        teacher.model.tok_embeddings.register_forward_pre_hook(lambda _, args, seen=shapes: seen.append(args[0].shape))
        together = teacher.hidden_states(ids, lengths)
        assert shapes == [torch.Size([1, 61] if packed else [5, SEQ_LEN])]
        torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-5)
        alone = [teacher.hidden_states(d, torch.tensor([len(d)])) for d in ids.split(lengths.tolist())]
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)
        changed = ids.clone()
        changed[5:25] = (changed[5:25] + 1) % VOCAB  # the second document
        same = torch.ones(61, dtype=torch.bool)
        same[5:25] = False
        after = teacher.hidden_states(changed, lengths)
        assert torch.equal(after[same], together[same]) and not torch.equal(after[5:25], together[5:25])


def test_teacher_is_frozen_and_in_its_dtype(teachers):
    files = open_teacher(str(teachers["untied"][0]))
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
        open_teacher(str(teachers["tied"][0])), dtype=torch.float32, device=CPU, max_seq_len=SEQ_LEN
    )
    with pytest.raises(ValueError) as error:
        teacher.hidden_states(torch.tensor(ids), torch.tensor(lengths))
    assert words in str(error.value)


def test_old_config_layout_and_length_limit(teachers, tmp_path):
    shutil.copytree(teachers["untied"][0], tmp_path / "teacher")
    edit_config(tmp_path / "teacher", rope_parameters=None, rope_theta=777.0, rope_scaling=None)
    files = open_teacher(str(tmp_path / "teacher"))
    assert files.args.rope_theta == 777.0 and files.args.norm_eps == 1e-5 and files.args.max_seq_len == 64
    with pytest.raises(ValueError, match="training.seq_len = 65 .* max_position_embeddings = 64"):
        build_teacher(files, dtype=torch.float32, device=CPU, max_seq_len=65)


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


def test_documents_of_a_row():
    ignored = IGNORE_INDEX
    input_ids = torch.tensor([[1, 2, 3, 4, 5, 6, 0]])
    labels = torch.tensor([[2, 3, 4, 8, ignored, 9, ignored]])
    documents = Documents.of_row(input_ids, labels, (3, 3))
    assert documents.ids.tolist() == [1, 2, 3, 4, 5, 6] and documents.lengths.tolist() == [3, 3]
    assert documents.keep is not None and documents.keep.tolist() == [True, True, True, True, False, True]
    assert Documents.of_row(input_ids[:, :4], labels[:, :4], (4,)).keep is None
    documents = Documents.of_row(input_ids, torch.full_like(labels, ignored), ())
    assert documents.ids.tolist() == [] and documents.lengths.tolist() == []
    for lengths in ((3, 2), (6, 2), (3, 0, 3)):  # a label after the end, beyond the row, nothing in one
        with pytest.raises(ValueError, match="do not fit a row of 7 tokens: each must be at least 1"):
            Documents.of_row(input_ids, labels, lengths)
    for inputs, wrong in ((input_ids, labels[:, 1:]), (input_ids.repeat(2, 1), labels.repeat(2, 1))):
        with pytest.raises(ValueError, match=r"one shape \[1, N\], since document_lengths"):
            Documents.of_row(inputs, wrong, (3, 3))
