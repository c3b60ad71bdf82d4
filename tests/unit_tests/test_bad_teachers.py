"""A teacher that cannot be used is refused in one line, with all that is wrong with it and what to do."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from blockgrow_titan.teacher import model
from blockgrow_titan.teacher.files import CONFIG, DCP_METADATA, INDEX, SINGLE, open_teacher
from blockgrow_titan.teacher.layout import EMBEDDING, FINAL_NORM, HEAD
from blockgrow_titan.teacher.model import build_teacher
from tests.unit_tests.tiny_teachers import (
    DIM,
    SEQ_LEN,
    convert_teachers,
    edit_config,
    edit_weights,
    make_teachers,
    save_checkpoint,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict:
    return make_teachers(tmp_path_factory.mktemp("teachers"))


@pytest.fixture(scope="module")
def converted(teachers, tmp_path_factory) -> dict[str, Path]:
    return convert_teachers(teachers, tmp_path_factory.mktemp("converted"))


def _rename_layer(tensors: dict) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        tensors[name.replace(".layers.1.", ".layers.5.")] = tensors.pop(name)


def _many_faults(tensors: dict) -> None:
    """One of each kind, some in every layer."""
    for layer in range(3):
        tensors.pop(f"model.layers.{layer}.mlp.up_proj.weight")
        tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.ones(48)
    tensors["model.layers.1.input_layernorm.weight"] = torch.ones(DIM - 1)
    tensors[FINAL_NORM] = tensors[FINAL_NORM].double()
    tensors["value_head.weight"] = torch.ones(3)


MANY_FAULTS = (
    "missing: model.layers.{0-2}.mlp.up_proj.weight; "
    "not used by the model of config.json: value_head.weight, model.layers.{0-2}.self_attn.q_proj.bias; "
    "of another shape than config.json says: model.layers.1.input_layernorm.weight [31] instead of [32]; "
    "of a wrong dtype: model.norm.weight F64. Take config and weights of one model"
)

FAULTS = {
    "no folder": (lambda f: shutil.rmtree(f), ValueError, "no teacher folder"),
    "no config": (lambda f: (f / CONFIG).unlink(), ValueError, "has no config.json: give a Hugging Face folder"),
    "not JSON": (lambda f: (f / CONFIG).write_text("{"), ValueError, "is not JSON"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), ValueError, "JSON object"),
    "a Llama": (lambda f: edit_config(f, model_type="llama"), ValueError, 'model_type "llama", it must be "qwen3"'),
    "no size": (lambda f: edit_config(f, num_hidden_layers=None), ValueError, "num_hidden_layers = None"),
    "a size of NaN": (
        lambda f: edit_config(f, intermediate_size=float("nan")),
        ValueError,
        "has intermediate_size = nan in config.json; it must be a positive whole number",
    ),
    "a size of text": (
        lambda f: edit_config(f, vocab_size="97"),
        ValueError,
        "has vocab_size = '97' in config.json; it",
    ),
    "half a head": (
        lambda f: edit_config(f, num_key_value_heads=2.5),
        ValueError,
        "num_key_value_heads = 2.5 in config",
    ),
    "no rope": (lambda f: edit_config(f, rope_parameters=None), ValueError, "rope_theta = None"),
    "long rope": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}),
        NotImplementedError,
        "rope_type = yarn",
    ),
    "sliding": (lambda f: edit_config(f, use_sliding_window=True), NotImplementedError, "use_sliding_window = True"),
    "quantised": (
        lambda f: edit_config(f, quantization_config={"quant_method": "fp8"}),
        NotImplementedError,
        "is quantised (config.json has a quantization_config): take the folder with weights in bf16, fp16 or fp32",
    ),
    "no weights": (lambda f: (f / SINGLE).unlink(), ValueError, "neither model.safetensors nor"),
    "half a header": (lambda f: (f / SINGLE).write_bytes(b"version 1"), ValueError, "not a whole safetensors file"),
    "half a file": (
        lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:-1]),
        ValueError,
        "has a model.safetensors that is not a whole safetensors file (",
    ),
    "missing": (
        lambda f: edit_weights(f, lambda t: t.pop("model.layers.2.mlp.up_proj.weight")),
        ValueError,
        "missing: model.layers.2.mlp.up_proj.weight. Take",
    ),
    "no head": (lambda f: edit_weights(f, lambda t: t.pop(HEAD)), ValueError, "missing: lm_head.weight. Take"),
    "a layer too few": (
        lambda f: edit_config(f, num_hidden_layers=2),
        ValueError,
        "not used by the model of config.json: model.layers.2.*. Take",
    ),
    "layers too many": (
        lambda f: edit_config(f, num_hidden_layers=6),
        ValueError,
        "missing: model.layers.{3-5}.*. Take",
    ),
    "another layer": (
        lambda f: edit_weights(f, _rename_layer),
        ValueError,
        "missing: model.layers.1.*; not used by the model of config.json: model.layers.5.*. Take",
    ),
    "wide MLP": (
        lambda f: edit_config(f, intermediate_size=52),
        ValueError,
        "of another shape than config.json says: model.layers.{0-2}.mlp.",
    ),
    "everything": (lambda f: edit_weights(f, _many_faults), ValueError, MANY_FAULTS),
    "fp8": (
        lambda f: edit_weights(f, lambda t: t.update({HEAD: t[HEAD].to(torch.float8_e4m3fn)})),
        ValueError,
        "of a wrong dtype: lm_head.weight F8_E4M3. Take config and weights of one model, downloaded whole, in bf16, fp16",
    ),
    "crowd": (
        lambda f: edit_weights(f, lambda t: t.update({f"extra.{i:02}": torch.ones(1) for i in range(20)})),
        ValueError,
        "extra.11 and 8 more. Take",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_folders_are_refused_in_one_line(teachers, tmp_path, fault):
    break_it, kind, words = FAULTS[fault]
    folder = tmp_path / "teacher"
    shutil.copytree(teachers["untied"][0], folder)
    break_it(folder)
    with pytest.raises(kind) as error:
        open_teacher(str(folder))
    text = str(error.value)
    assert words in text and str(folder) in text and "teacher" in text and "\n" not in text and len(text) < 700


def _first_file(folder: Path) -> Path:
    return sorted(folder.glob("*.distcp"))[0]


CHECKPOINT_FAULTS = {
    "no config": (lambda f: (f / CONFIG).unlink(), "has no config.json: give a Hugging Face folder"),
    "absent": (lambda f: _first_file(f).unlink(), "is not whole: __0_0.distcp is not there; convert its source again"),
    "cut": (
        lambda f: _first_file(f).write_bytes(_first_file(f).read_bytes()[:-1]),
        "bytes; convert its source again",
    ),
    "no pickle": (lambda f: (f / DCP_METADATA).write_bytes(b"x"), "has a .metadata that cannot be read ("),
    "half a pickle": (
        lambda f: (f / DCP_METADATA).write_bytes((f / DCP_METADATA).read_bytes()[:900]),
        "has a .metadata that cannot be read (",
    ),
    "another pickle": (
        lambda f: (f / DCP_METADATA).write_bytes(pickle.dumps([1])),
        "has a .metadata that cannot be read (",
    ),
    "a layer too few": (lambda f: edit_config(f, num_hidden_layers=2), "config.json: model.layers.2.*. Take"),
    "layers too many": (lambda f: edit_config(f, num_hidden_layers=5), "missing: model.layers.{3-4}.*. Take"),
    "wide": (lambda f: edit_config(f, vocab_size=98), "model.embed_tokens.weight [97, 32] instead of [98, 32]"),
}


@pytest.mark.parametrize("fault", CHECKPOINT_FAULTS)
def test_bad_checkpoints_are_refused_in_one_line(converted, tmp_path, fault):
    break_it, words = CHECKPOINT_FAULTS[fault]
    folder = tmp_path / "teacher"
    shutil.copytree(converted["untied"], folder)
    break_it(folder)
    with pytest.raises(ValueError) as error:
        open_teacher(str(folder))
    assert words in str(error.value) and f"the teacher in {folder}" in str(error.value) and "\n" not in str(error.value)


def test_rows_that_no_file_has_are_refused(converted, tmp_path):
    folder = tmp_path / "teacher"
    shutil.copytree(converted["untied"], folder)
    metadata = FileSystemReader(folder).read_metadata()
    del metadata.state_dict_metadata["tok_embeddings.weight"].chunks[1]
    (folder / DCP_METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        ValueError, match="does not have all rows of model.embed_tokens.weight: convert its source again"
    ):
        open_teacher(str(folder)).embedding()


def test_other_contents_of_a_checkpoint_are_refused(teachers, tmp_path):
    def edit(state: dict) -> None:
        state["norm.weight"] = state["norm.weight"].double()
        state["train_state"] = {"step": 3}
        del state["layers.0.attention.wq.weight"]

    save_checkpoint(teachers["untied"][0], tmp_path / "teacher", edit)
    with pytest.raises(ValueError) as error:
        open_teacher(str(tmp_path / "teacher"))
    for words in (
        "missing: model.layers.0.self_attn.q_proj.weight; ",
        "train_state.step",
        "model.norm.weight torch.float64",
    ):
        assert words in str(error.value)


def test_index_that_names_an_absent_file(teachers, tmp_path):
    shutil.copytree(teachers["sharded_files"][0], tmp_path / "teacher")
    gone = sorted((tmp_path / "teacher").glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"has a {INDEX} that names {gone.name}, which is not there: download it"):
        open_teacher(str(tmp_path / "teacher"))


def test_index_and_files_that_disagree(teachers, tmp_path):
    """A tensor that the index places where it is not is missing; tensors that it does not know are found in the files."""
    folder = tmp_path / "teacher"
    shutil.copytree(teachers["sharded_files"][0], folder)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][FINAL_NORM]
    (folder / INDEX).write_text(json.dumps(index))
    assert torch.equal(open_teacher(str(folder)).final_norm(), teachers["sharded_files"][1].state_dict()[FINAL_NORM])
    embedding = index["weight_map"][EMBEDDING]
    index["weight_map"][FINAL_NORM] = embedding
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="missing: model.norm.weight. Take"):
        open_teacher(str(folder))
    (folder / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: 3}}))
    with pytest.raises(ValueError, match="has no weight_map in"):
        open_teacher(str(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_refused(teachers, tmp_path, value, dtype):
    """Wherever they stand, in whatever is read."""
    folder, _ = teachers["untied"]
    reads = {
        EMBEDDING: lambda files: files.embedding(),
        HEAD: lambda files: files.head(),
        FINAL_NORM: lambda files: files.final_norm(),
        "model.layers.1.mlp.down_proj.weight": lambda files: build_teacher(
            files, dtype=torch.float32, device=CPU, max_seq_len=SEQ_LEN
        ),
    }
    for number, (name, read) in enumerate(reads.items()):
        bad = tmp_path / str(number)
        shutil.copytree(folder, bad)

        def edit(tensors: dict, name: str = name, number: int = number) -> None:
            tensors[name] = tensors[name].to(dtype)
            tensors[name].view(-1)[tensors[name].numel() * number // 4 + number] = value

        edit_weights(bad, edit)
        save_checkpoint(bad, tmp_path / f"{number} converted")
        for path in (bad, tmp_path / f"{number} converted"):
            files = open_teacher(str(path))
            with pytest.raises(ValueError) as error:
                read(files)
            assert f"the teacher in {path} has values that are not finite in {name}: take" in str(error.value)
            for other in reads.keys() - {name}:
                files.read(other)


def test_head_of_a_tied_teacher(teachers, tmp_path):
    """It may be there if it is the embedding; RoPE's frequencies in old files are not used."""
    folder, reference = teachers["tied"]
    embedding = reference.state_dict()[EMBEDDING]
    heads = {
        "same": embedding.clone(),
        "another": torch.nextafter(embedding, torch.tensor(9.0)),
        "dtype": embedding.to(torch.bfloat16),
    }
    for name, head in heads.items():
        shutil.copytree(folder, tmp_path / name)
        extra = {HEAD: head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
        edit_weights(tmp_path / name, lambda tensors, extra=extra: tensors.update(extra))
        save_checkpoint(tmp_path / name, tmp_path / f"{name} converted")
        for path in (tmp_path / name, tmp_path / f"{name} converted"):
            files = open_teacher(str(path))
            if name == "same":
                assert torch.equal(files.head(), embedding)
                continue
            with pytest.raises(ValueError, match="its lm_head.weight differs from model.embed_tokens.weight: set"):
                files.head()


def test_no_parameter_is_left_without_values(teachers, monkeypatch):
    """If torchtitan's model grew a parameter that its name map lacks, it would be whatever the memory held."""
    layout = model.tensor_layout
    monkeypatch.setattr(
        model,
        "tensor_layout",
        lambda args: {k: v for k, v in layout(args).items() if k != FINAL_NORM and "k_norm" not in k},
    )
    names = "layers.0.attention.k_norm.weight, layers.1.attention.k_norm.weight, layers.2.attention.k_norm.weight, norm.weight"
    with pytest.raises(AssertionError, match=f"no file gave values to {names}"):
        build_teacher(open_teacher(str(teachers["tied"][0])), dtype=torch.float32, device=CPU, max_seq_len=SEQ_LEN)
