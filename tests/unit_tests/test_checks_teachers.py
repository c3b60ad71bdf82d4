"""Teachers and tokenizers that do not fit are refused before anything is built."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blockgrow_titan.checks import check_config
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import FLAVORS
from blockgrow_titan.teacher.files import AbsentFiles
from tests.unit_tests.jobs import JOB_VOCAB
from tests.unit_tests.models import save_hf_teacher
from tests.unit_tests.refusals import assert_names, base_config, changed, refusal


@pytest.fixture(scope="module")
def base(workspace: Path) -> JobConfig:
    return base_config(workspace)


def write_fake_teacher(folder: Path, workspace: Path, flavor: str, **config: int) -> Path:
    """A one-layer Qwen3 folder of a flavor's dimensions whose weights are a hole in a file: only headers are true."""
    args = FLAVORS[flavor]
    sizes = {
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.hidden_dim,
        "num_hidden_layers": 1,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "max_position_embeddings": 40960,
    } | config
    width, mlp = sizes["hidden_size"], sizes["intermediate_size"]
    heads, kv = sizes["num_attention_heads"] * args.head_dim, sizes["num_key_value_heads"] * args.head_dim
    shapes = {f"self_attn.{n}_proj": [rows, width] for n, rows in (("q", heads), ("k", kv), ("v", kv))}
    shapes |= {
        "self_attn.o_proj": [width, heads],
        "self_attn.q_norm": [args.head_dim],
        "self_attn.k_norm": [args.head_dim],
    }
    shapes |= {"mlp.gate_proj": [mlp, width], "mlp.up_proj": [mlp, width], "mlp.down_proj": [width, mlp]}
    shapes |= {"input_layernorm": [width], "post_attention_layernorm": [width]}
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    shapes |= {"model.embed_tokens.weight": [sizes["vocab_size"], width], "model.norm.weight": [width]}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    folder.mkdir()
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    other = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(sizes | other))
    shutil.copy(workspace / "tokenizer" / "tokenizer.json", folder)
    return folder


def test_vocabulary_of_another_size(base: JobConfig, workspace: Path, tmp_path: Path) -> None:
    folder = write_fake_teacher(tmp_path / "teacher", workspace, "0.6B", vocab_size=152064)
    text = refusal(changed(base, model__flavor="0.6B", teacher__path=str(folder)))
    assert_names(text, f"teacher.path {folder}", "152064", 'model.flavor "0.6B"', "151936", "choose the flavor")
    right = write_fake_teacher(tmp_path / "right", workspace, "0.6B")
    check_config(changed(base, model__flavor="0.6B", teacher__path=str(right)))


def test_hidden_size_of_another_flavor(base: JobConfig, workspace: Path, tmp_path: Path) -> None:
    folder = write_fake_teacher(tmp_path / "teacher", workspace, "1.7B")
    text = refusal(changed(base, model__flavor="0.6B", teacher__path=str(folder)))
    assert_names(text, "hidden size 2048", 'model.flavor "0.6B" has 1024', "choose the flavor")
    save_hf_teacher(tmp_path / "small", vocab_size=JOB_VOCAB, hidden_size=48)
    assert_names(refusal(changed(base, teacher__path=str(tmp_path / "small"))), "hidden size 48", '"toy" has 32')


def test_absent_teacher(base: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = refusal(changed(base, teacher__path="no/where"), AbsentFiles)
    assert_names(text, 'teacher.path = "no/where"', f"{tmp_path}/no/where")
    text = refusal(changed(base, teacher__path="package:blockgrow_titan/assets/none"), AbsentFiles)
    assert_names(
        text, 'teacher.path = "package:blockgrow_titan/assets/none"', os.path.join("blockgrow_titan", "assets", "none")
    )


def swapped_entries(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def other_merges(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["merges"].reverse()


def prefix_space(tokenizer: dict[str, Any]) -> None:
    tokenizer["pre_tokenizer"]["add_prefix_space"] = True


def renamed_token(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"][0]["content"] = "<|end|>"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (swapped_entries, "model"),
        (other_merges, "model"),
        (prefix_space, "pre_tokenizer"),
        (renamed_token, "added_tokens"),
        (lambda tokenizer: tokenizer.update(normalizer={"type": "NFC"}), "normalizer"),
    ],
)
def test_another_tokenizer_of_the_same_size(
    base: JobConfig, workspace: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], part: str
) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(workspace / "teacher", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_config(changed(base, teacher__path=str(folder)))  # truncation changes no id
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = refusal(changed(base, teacher__path=str(folder)))
    assert_names(text, f"teacher.path {folder}", "model.hf_assets_path", f"differs in its {part}")
    os.remove(folder / "tokenizer.json")
    assert_names(refusal(changed(base, teacher__path=str(folder))), f"teacher.path {folder} has no tokenizer.json")


def test_data_tokenizer(base: JobConfig, tmp_path: Path) -> None:
    assert_names(refusal(changed(base, model__hf_assets_path=str(tmp_path))), str(tmp_path), "no tokenizer.json")
    text = refusal(changed(base, model__hf_assets_path=str(tmp_path / "none")))
    assert_names(text, "model.hf_assets_path", str(tmp_path / "none"), "hf download")
    text = refusal(changed(base, model__hf_assets_path="package:blockgrow_titan/assets/tokenizer"))
    assert_names(text, "tokenizer of 4096 entries", "ids up to 4095", "320", 'model.flavor "toy"', "choose the flavor")


def test_ids_beyond_the_vocabulary(base: JobConfig, workspace: Path, tmp_path: Path) -> None:
    """A tokenizer of few entries may still have large ids."""
    folder = Path(shutil.copytree(workspace / "tokenizer", tmp_path / "tokenizer"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = 320
    (folder / "tokenizer.json").write_text(json.dumps(content))
    text = refusal(changed(base, model__hf_assets_path=str(folder)))
    assert_names(
        text, f"model.hf_assets_path {folder}", "ids up to 320, beyond the vocabulary of 320", "choose the flavor"
    )


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{", "Exception: "),
        ("tokenizer.json", "", "Exception: "),
        ("tokenizer.json", '{"model": 3}', "Exception: "),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds no JSON object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": 3}', "AttributeError: "),
    ],
)
def test_damaged_tokenizers(
    base: JobConfig, workspace: Path, tmp_path: Path, file: str, content: str, words: str
) -> None:
    folder = Path(shutil.copytree(workspace / "tokenizer", tmp_path / "tokenizer"))
    (folder / file).write_text(content)
    text = refusal(changed(base, model__hf_assets_path=str(folder)))
    assert_names(text, f"model.hf_assets_path is {folder}, whose tokenizer cannot be read", words, "download")
