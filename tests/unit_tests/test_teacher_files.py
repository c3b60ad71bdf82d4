"""The teacher's files are read or refused; its hidden states are those of transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtitan.components.loss import IGNORE_INDEX

from blockgrow_titan.teacher.client import Documents
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
from tests.unit_tests.tiny_teachers import DIM, SEQ_LEN, VOCAB, make_teachers

CPU = torch.device("cpu")


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
