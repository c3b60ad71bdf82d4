"""verify finds the difference that a plain loop finds, on whatever two models it is given."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from blockgrow_titan.hf.from_hf import convert
from blockgrow_titan.hf.to_hf import to_hf
from blockgrow_titan.hf.verify import TEXT, verify
from tests.unit_tests.models import read_json, save_hf_teacher
from tests.unit_tests.students import (
    SEQ_LEN,
    logits,
    made,
    own_module_cache,  # noqa: F401  (a fixture)
    training_model,
)


@pytest.fixture(scope="module")
def students(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """placement -> (checkpoint, its export)."""
    result = {}
    for placement in ("pre", "post"):
        folder = tmp_path_factory.mktemp(placement)
        result[placement] = made(workspace, folder, placement), folder / "out"
        to_hf(*result[placement])
    return result


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_student_and_its_export(students, placement: str) -> None:
    checkpoint, out = students[placement]
    for a, b in ((checkpoint, out), (out, checkpoint), (out, out)):
        difference = verify(a, b)
        assert difference.within and 0 <= difference.mean <= difference.largest < 1e-5
    assert verify(out, out).largest == 0


def test_a_teacher_and_its_checkpoint(workspace: Path, tmp_path: Path) -> None:
    for name in ("teacher", "tied_teacher"):
        convert(str(workspace / name), str(tmp_path / name), progress=False)
        difference = verify(workspace / name, tmp_path / name)
        assert difference.within and difference.largest < 1e-5
    assert not verify(tmp_path / "teacher", tmp_path / "tied_teacher").within


def test_the_difference_is_the_largest_of_a_plain_loop(students, tmp_path: Path) -> None:
    """Over a text of several pieces, by two models of the same shape: pre-norm weights read as post-norm."""
    (pre, pre_out), (post, post_out) = students["pre"], students["post"]
    text = "She was so; it had 東京 and Zwölf. " * 4
    ids = AutoTokenizer.from_pretrained(pre_out).encode(text, add_special_tokens=False)
    assert len(ids) > 2 * SEQ_LEN
    a, b = training_model(pre, "pre"), training_model(post, "post")
    apart = torch.cat(
        [
            (logits(a, piece[None]) - logits(b, piece[None]))[0].double().abs()
            for piece in torch.tensor(ids).split(SEQ_LEN)
        ]
    )
    for sides in ((pre, post), (pre_out, post_out)):
        found = verify(*sides, text=text)
        assert not found.within and found.tokens == len(ids)
        assert abs(found.largest - apart.max().item()) < 1e-5 and abs(found.mean - apart.mean().item()) < 1e-6
        assert found.position == int(apart.amax(-1).argmax())
    assert verify(pre, post, text=text, tolerance=found.largest * 1.01).within


def test_a_changed_weight_is_found(students, tmp_path: Path) -> None:
    checkpoint, out = students["post"]
    shutil.copytree(out, tmp_path / "changed")
    tensors = load_file(tmp_path / "changed" / "model.safetensors")
    tensors["lm_head.weight"][7] += 0.01
    save_file(tensors, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    assert not verify(checkpoint, tmp_path / "changed").within
    tensors["lm_head.weight"][7] = torch.nan
    save_file(tensors, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    found = verify(checkpoint, tmp_path / "changed")
    assert not found.within and found.position == 0


def test_a_checkpoint_in_bfloat16_is_read_in_float32(workspace: Path, students, tmp_path: Path) -> None:
    half = made(workspace, tmp_path, "post", dtype=torch.bfloat16)
    to_hf(half, tmp_path / "out", dtype="float32")
    assert verify(half, tmp_path / "out").largest < 1e-5
    whole = AutoModelForCausalLM.from_pretrained(students["post"][1], trust_remote_code=True, dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True).encode(TEXT)[:SEQ_LEN]
    apart = logits(whole, torch.tensor([ids])) - logits(rounded, torch.tensor([ids]))
    found = verify(students["post"][0], half)
    assert found.largest >= apart.abs().max() - 1e-5 and found.largest > 1e-4


def refused(a: Path, b: Path, match: str, **kwargs) -> None:
    with pytest.raises(ValueError, match=match) as error:
        verify(a, b, **kwargs)
    assert "\n" not in str(error.value)


def test_refuses_vocabularies(workspace: Path, students, tmp_path: Path) -> None:
    save_hf_teacher(tmp_path / "other", vocab_size=97)
    refused(students["pre"][0], tmp_path / "other", "vocabulary of 320, .* one of 97: they cannot be compared")


def test_refuses_not_models(students, workspace: Path, tmp_path: Path) -> None:
    refused(tmp_path / "absent", students["pre"][1], "is not there")
    refused(students["pre"][1], workspace, "is not a checkpoint")
    shutil.copytree(students["pre"][1], tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"short")
    refused(students["pre"][0], tmp_path / "cut", "transformers cannot load .*cut")


def test_refuses_tokenizers(students, workspace: Path, tmp_path: Path) -> None:
    checkpoint, out = students["pre"]
    refused(checkpoint, out, "no token", text="")
    shutil.copytree(out, tmp_path / "other")
    tokenizer = read_json(out / "tokenizer.json")
    tokenizer["model"]["merges"] = []
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(out, tmp_path / "other", "other ids for the text: name the right one with --tokenizer")
    assert verify(out, tmp_path / "other", tokenizer=str(out)).largest == 0
    save_hf_teacher(tmp_path / "bare", vocab_size=320)
    refused(tmp_path / "bare", tmp_path / "bare", "has a tokenizer: give its folder with --tokenizer")
    refused(tmp_path / "bare", out, "there is no .*tokenizer.json", tokenizer=str(tmp_path))
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "bare")
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "small")
    refused(tmp_path / "small", tmp_path / "small", "vocabulary of 100: name the right", tokenizer=str(out))


def test_refuses_a_checkpoint_of_another_placement(workspace: Path, tmp_path: Path) -> None:
    from tests.unit_tests import user_placements

    checkpoint = made(workspace, tmp_path, "pre")
    manifest = read_json(checkpoint / "manifest.json")
    manifest["config"]["block_stack.placement"] = "sandwich"
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    user_placements.remember()
    try:
        refused(checkpoint, checkpoint, 'tensors of placement "sandwich": layers.0.attention_out_norm.weight and 3')
    finally:
        user_placements.forget()
