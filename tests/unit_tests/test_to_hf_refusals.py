"""What to-hf refuses: each in one line that says what to do, and nothing is left."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError

from blockgrow_titan.checkpoint_files import CHECKSUMS
from blockgrow_titan.hf.to_hf import to_hf
from tests.unit_tests.models import read_json
from tests.unit_tests.resuming import contents
from tests.unit_tests.students import (
    files_in,
    made,
    user_placement,  # noqa: F401  (a fixture)
)


@pytest.fixture
def copy(workspace: Path, tmp_path: Path) -> Path:
    return made(workspace, tmp_path / "run", "post")


def refused(checkpoint: Path, tmp_path: Path, match: str, **kwargs) -> None:
    before = files_in(tmp_path)
    with pytest.raises(ValueError, match=match) as error:
        to_hf(checkpoint, tmp_path / "out", **kwargs)
    assert "\n" not in str(error.value)
    assert files_in(tmp_path) == before and not (tmp_path / "out").exists()


def test_not_a_checkpoint(copy: Path, workspace: Path, tmp_path: Path) -> None:
    refused(tmp_path / "absent", tmp_path, "is not there: give the .*step-N folder")
    refused(copy / "manifest.json", tmp_path, "is a file: give the")
    refused(copy.parent, tmp_path, "is not a checkpoint: give one of those in it: step-3")
    refused(workspace, tmp_path, "is not a checkpoint: give the .*step-N folder")
    refused(workspace / "teacher", tmp_path, "is in Hugging Face's format already")


def test_half_written_or_damaged(copy: Path, tmp_path: Path) -> None:
    data = next(copy.glob("*.distcp"))
    whole = data.read_bytes()
    end = "Copy it again, or use another checkpoint"
    data.write_bytes(whole[: len(whole) // 2])
    refused(copy, tmp_path, f"is damaged: {data.name} has .* bytes instead of .*{end}")
    for position in range(0, len(whole), len(whole) // 10):
        data.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        refused(copy, tmp_path, f"is damaged: {data.name} is altered.*{end}")
    data.unlink()
    refused(copy, tmp_path, f"is damaged: {data.name} is missing.*{end}")
    (copy / CHECKSUMS).unlink()
    refused(copy, tmp_path, "cannot be read .*absent, cut off or damaged; copy it again or use another")
    (copy / ".metadata").write_bytes((copy / ".metadata").read_bytes()[:100])
    refused(copy, tmp_path, r"\.metadata cannot be read")
    (copy / ".metadata").unlink()
    refused(copy, tmp_path, "is half-written .*use an earlier checkpoint")


def test_too_small_a_disk(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the dtype that is written: half of fp32's bytes fit, with room for a little more."""
    halves = sum(4 * value.numel() for value in contents(copy).values()) // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=halves + 1000))
    refused(copy, tmp_path, f"out needs {2 * halves:,} bytes, but {tmp_path} has {halves + 1000:,} free: make room")
    to_hf(copy, tmp_path / "out", dtype="bfloat16")


def test_manifest(copy: Path, tmp_path: Path) -> None:
    manifest = read_json(copy / "manifest.json")

    def write(**changes) -> None:
        (copy / "manifest.json").write_text(json.dumps(manifest | changes))

    write(format=1)
    refused(copy, tmp_path, "is not of format 2")
    write(phases=manifest["phases"][:1] + manifest["phases"][2:])
    refused(copy, tmp_path, "holds 2 layers at step 3, but the phases of its manifest.json have 1 in steps 1 to 1")
    write(config=manifest["config"] | {"block_stack.placement": "middle"})
    refused(copy, tmp_path, 'placement "middle", which "blockgrow_titan" does not register .*known: .*--import')
    write(custom_import="no_such_module")
    refused(copy, tmp_path, '"no_such_module", to be imported for .* cannot be imported .*--import')
    refused(copy, tmp_path, '"nor_this", to be imported for .* cannot be imported .*--import', custom_import="nor_this")
    assert to_hf(copy, tmp_path / "named", custom_import="blockgrow_titan").layers == 2
    (copy / "manifest.json").unlink()
    refused(copy, tmp_path, "has neither manifest.json .* nor config.json")


@pytest.mark.usefixtures("user_placement")
def test_another_placement_than_its_tensors(copy: Path, tmp_path: Path) -> None:
    manifest = read_json(copy / "manifest.json")
    manifest["config"]["block_stack.placement"] = "sandwich"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    refused(copy, tmp_path, "differ in 4 tensors, such as model.layers.0.attention_out_norm.weight: .*absent in")


def test_tokenizer(copy: Path, workspace: Path, tmp_path: Path) -> None:
    manifest = read_json(copy / "manifest.json")
    manifest["config"]["model.hf_assets_path"] = str(tmp_path / "gone")
    (copy / "manifest.json").write_text(json.dumps(manifest))
    refused(copy, tmp_path, "there is no file or folder .*gone.* --tokenizer")
    refused(copy, tmp_path, "there is no .*tokenizer.json.* --tokenizer", tokenizer=str(copy))
    to_hf(copy, tmp_path / "given", tokenizer=str(workspace / "tokenizer"))
    shutil.copytree(workspace / "tokenizer", tmp_path / "damaged")
    for name, text, words in (
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds no JSON object: download it again"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON .*: download it again"),
        ("tokenizer.json", "{", "damaged/tokenizer.json cannot be read .*: download it again"),
    ):
        (tmp_path / "damaged" / name).write_text(text)
        refused(copy, tmp_path, words, tokenizer=str(tmp_path / "damaged"))
    manifest["config"]["documents.end_of_document"] = "<end>"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    refused(copy, tmp_path, 'lacks "<end>"', tokenizer=str(workspace / "tokenizer"))
    manifest["config"]["documents.end_of_document"] = "<|endoftext|>"
    manifest["model"]["vocab_size"] = 200
    (copy / "manifest.json").write_text(json.dumps(manifest))
    refused(
        copy, tmp_path, "ids up to 299, but the student's vocabulary is 200", tokenizer=str(workspace / "tokenizer")
    )


def test_arguments(copy: Path, tmp_path: Path) -> None:
    refused(copy, tmp_path, 'dtype is "half": it must be auto, float32', dtype="half")
    for size in ("5 bananas", "5GiB", "0", "-5MB", "0.0001KB", "", "nanGB", 0):
        refused(copy, tmp_path, f'largest shard is "{size}": give a number of bytes', max_shard_size=size)
    counts = [
        to_hf(copy, tmp_path / str(i), max_shard_size=size).files
        for i, size in enumerate((25_000, "25000", "25 kb", "0.025MB", "9TB"))
    ]
    assert len(set(counts[:4])) == 1 and counts[0] > 2 and counts[4] == 1
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ValueError, match="not empty"):
        to_hf(copy, tmp_path / "used")
    assert files_in(tmp_path / "used") == ["file"]
    (tmp_path / "empty").mkdir()
    to_hf(copy, tmp_path / "empty")
    assert os.stat(tmp_path / "empty").st_mode & 0o077 == os.stat(copy.parent).st_mode & 0o077


def test_weights_that_are_not_finite(workspace: Path, tmp_path: Path) -> None:
    copy = made(workspace, tmp_path / "run", "post")
    state = {name: tensor for name, tensor in contents(copy).items()}
    state["layers.1.attention.wo.weight"][0, 0] = 1e30
    shutil.move(copy / "manifest.json", tmp_path / "run" / "manifest.json")
    shutil.rmtree(copy)
    dcp.save(state, checkpoint_id=copy, no_dist=True)
    shutil.move(tmp_path / "run" / "manifest.json", copy)
    refused(copy, tmp_path, "self_attn.o_proj.weight .*not finite in torch.float16.*bfloat16", dtype="float16")
    to_hf(copy, tmp_path / "fine", dtype="bfloat16")


def test_where_an_export_may_not_go(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="step-3/out is inside .*step-3, which is read: give a folder elsewhere"):
        to_hf(copy, copy / "out")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "empty")
    with pytest.raises(ValueError, match="empty is a mount point, which .* cannot replace: give a new folder in it"):
        to_hf(copy, tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ValueError, match="empty is the current folder, which .* cannot replace: give a new folder in"):
        to_hf(copy, ".")
    (tmp_path / "link").symlink_to("linked")
    assert to_hf(copy, tmp_path / "link").folder == tmp_path / "linked"
    assert (tmp_path / "link" / "config.json").is_file()


def test_a_full_disk(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("blockgrow_titan.hf.to_hf.save_file", full)
    refused(copy, tmp_path, "out could not be written .*No space left on device .*: make room, or give another folder")


def test_ctrl_c(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("blockgrow_titan.hf.to_hf.save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        to_hf(copy, tmp_path / "out")
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemReader.read_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        to_hf(copy, tmp_path / "out")
    assert files_in(tmp_path) == ["run"]
