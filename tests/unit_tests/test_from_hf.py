"""Hugging Face folder -> checkpoint: values bit for bit, little memory, and nothing left of what fails."""

import errno
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

from blockgrow_titan.checks import check_config
from blockgrow_titan.hf import from_hf
from blockgrow_titan.hf.from_hf import convert
from blockgrow_titan.parse import parse_config
from blockgrow_titan.teacher.files import HuggingFaceFiles, open_teacher
from tests.unit_tests.jobs import arguments, losses, run_job
from tests.unit_tests.steps import write_teacher
from tests.unit_tests.tiny_teachers import CHUNK_BYTES, edit_config, edit_weights, make_teachers, write_large

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = make_teachers(tmp_path_factory.mktemp("teachers"))
    return {name: folder for name, (folder, _) in made.items()}


@pytest.fixture
def source(teachers: dict[str, Path], tmp_path: Path) -> Path:
    """A folder of one file, untied, to be spoiled."""
    shutil.copytree(teachers["untied"], tmp_path / "source")
    return tmp_path / "source"


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, by torch's own loading."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {fqn: torch.full(tuple(m.size), 7.0, dtype=m.properties.dtype) for fqn, m in metadata.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def expected_tensors(folder: Path, tied: bool) -> dict[str, torch.Tensor]:
    """The folder's tensors under the names that torchtitan's own adapter gives them."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    named = Qwen3StateDictAdapter(open_teacher(str(folder)).args, None).from_hf(tensors)
    return {fqn: tensor for fqn, tensor in named.items() if not (tied and fqn == "output.weight")}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ---- values


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, from_hf.FILE_BYTES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["untied", "tied", "sharded_files"])
def test_values_are_the_folders_bit_for_bit(teachers, tmp_path, monkeypatch, name, dtype, chunk_bytes):
    monkeypatch.setattr(from_hf, "FILE_BYTES", chunk_bytes)
    folder = tmp_path / "source"
    shutil.copytree(teachers[name], folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({key: tensor if "norm" in key else tensor.to(dtype) for key, tensor in tensors.items()}, file)
    convert(str(folder), str(tmp_path / "out"), progress=False)
    got, want = read_checkpoint(tmp_path / "out"), expected_tensors(folder, tied=name == "tied")
    assert got.keys() == want.keys() and ("output.weight" in got) == (name != "tied")
    assert all(same_bits(got[fqn], want[fqn]) for fqn in want)
    assert {tensor.dtype for tensor in got.values()} == {dtype, torch.float32}
    sizes = [file.stat().st_size for file in (tmp_path / "out").glob("*.distcp")]
    total = sum(tensor.nbytes for tensor in want.values())
    assert len(sizes) == 1 if chunk_bytes > total else len(sizes) > total / chunk_bytes
    most = max(chunks_in_a_file(tmp_path / "out").values())
    assert max(sizes) < chunk_bytes + 4096 * most and oct((tmp_path / "out").stat().st_mode) == oct(
        folder.stat().st_mode
    )


def chunks_in_a_file(folder: Path) -> dict[str, int]:
    files = [stored.relative_path for stored in FileSystemReader(folder).read_metadata().storage_data.values()]
    return {file: files.count(file) for file in files}


def test_config_and_tokenizer_come_along(source, tmp_path):
    names = ["config.json", "generation_config.json", *from_hf.COPIED[2:]]
    for number, name in enumerate(names[2:]):
        (source / name).write_text(f"{number}")
    for name in ("README.md", "pytorch_model.bin", "optimizer.pt"):
        (source / name).write_text("not this")
    convert(str(source), str(tmp_path / "out"), progress=False)
    assert sorted(names) == sorted(from_hf.COPIED) and "chat_template.jinja" in names and len(names) == 9
    found = {file.name for file in (tmp_path / "out").iterdir()}
    assert found == {*names, ".metadata", "__0_0.distcp"}
    assert all((tmp_path / "out" / name).read_bytes() == (source / name).read_bytes() for name in names)


def test_where_a_checkpoint_may_go(source, tmp_path, monkeypatch, capsys):
    """Into an empty folder, below parents that are not there yet, along a relative path; what a killed run left goes."""
    (tmp_path / "empty").mkdir()
    for name in ("empty.partial-12ab_9yz", "empty.partial-notes", "other.partial-12ab_9yz"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_text("half")
    convert(str(source), str(tmp_path / "empty"), progress=False)
    assert capsys.readouterr().err == ""
    monkeypatch.chdir(tmp_path)
    convert("source", "a/b/out")
    shown = capsys.readouterr().err
    assert "100%" in shown and "Traceback" not in shown
    assert (tmp_path / "empty/.metadata").exists() and (tmp_path / "a/b/out/.metadata").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a",
        "empty",
        "empty.partial-notes",
        "other.partial-12ab_9yz",
        "source",
    ]
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["out"]


def test_unused_tensors_of_a_tied_folder_are_left_out(teachers, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(teachers["tied"], folder)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((6,), float("nan"))}
    edit_weights(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()} | more))
    convert(str(folder), str(tmp_path / "out"), progress=False)
    assert read_checkpoint(tmp_path / "out").keys() == expected_tensors(teachers["tied"], tied=True).keys()


# ---- refusals


def one_value(name: str, value: float):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return change


def several_not_finite(folder: Path) -> None:
    for name in ("model.layers.2.mlp.down_proj.weight", EMBEDDING, "model.layers.0.input_layernorm.weight"):
        edit_weights(folder, one_value(name, math.nan if name == EMBEDDING else -math.inf))


def another_head(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)  # this folder has a head of its own


def occupy(folder: Path) -> None:
    (folder.parent / "out").mkdir()
    (folder.parent / "out" / "notes.txt").write_text("mine")


REFUSALS = {
    "no folder": (shutil.rmtree, ValueError, "there is no model folder "),
    "occupied": (occupy, ValueError, "exists and is not empty: give a new folder, or remove it"),
    "a file": (lambda f: (f.parent / "out").write_text("mine"), ValueError, "exists and is not a folder: give a new"),
    "converted": (lambda f: (f / ".metadata").write_text(""), ValueError, "is a checkpoint already: give a Hugging"),
    "no Qwen3": (
        lambda f: edit_config(f, model_type="llama"),
        ValueError,
        'has model_type "llama", it must be "qwen3"',
    ),
    "quantised": (
        lambda f: edit_config(f, quantization_config={"bits": 4}),
        NotImplementedError,
        "take the folder with weights in bf16, fp16 or fp32",
    ),
    "missing": (
        lambda f: edit_weights(f, lambda t: [t.pop(FINAL_NORM), t.pop("model.layers.0.mlp.up_proj.weight")]),
        ValueError,
        "missing: model.norm.weight, model.layers.0.mlp.up_proj.weight. Take config and weights of one model",
    ),
    "truncated": (
        lambda f: os.truncate(f / "model.safetensors", 70_000),
        ValueError,
        "has a model.safetensors that is not a whole safetensors file (",
    ),
    "wrong dtype": (
        lambda f: edit_weights(f, lambda t: t.update({FINAL_NORM: t[FINAL_NORM].to(torch.int8)})),
        ValueError,
        "of a wrong dtype: model.norm.weight I8. Take",
    ),
    "not finite": (
        several_not_finite,
        ValueError,
        "has values that are not finite in model.embed_tokens.weight, model.layers.0.input_layernorm.weight, "
        "model.layers.2.mlp.down_proj.weight: take",
    ),
    "another head": (another_head, ValueError, "its lm_head.weight differs from model.embed_tokens.weight: set"),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_refusals_are_one_line_and_leave_nothing(source, tmp_path, fault):
    spoil, kind, words = REFUSALS[fault]
    spoil(source)
    before = snapshot(tmp_path)
    with pytest.raises(kind) as error:
        convert(str(source), str(tmp_path / "out"), progress=False)
    assert (
        words in str(error.value) and "\n" not in str(error.value) and "teacher" not in str(error.value).split(":")[0]
    )
    assert snapshot(tmp_path) == before


def snapshot(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_index_that_names_an_absent_file(teachers, tmp_path):
    shutil.copytree(teachers["sharded_files"], tmp_path / "source")
    gone = sorted((tmp_path / "source").glob("*.safetensors"))[-1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"index.json that names {gone.name}, which is not there: download it"):
        convert(str(tmp_path / "source"), str(tmp_path / "out"), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_occupied_folder_is_refused_before_anything_is_read(tmp_path):
    occupy(tmp_path / "source")
    with pytest.raises(ValueError, match="exists and is not empty"):
        convert(str(tmp_path / "source"), str(tmp_path / "out"))


def test_places_that_cannot_be_written(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=f"{tmp_path}/file/a/out cannot be made: {tmp_path}/file is not a folder; give"
    ):
        convert(str(source), str(tmp_path / "file/a/out"))
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    with pytest.raises(
        ValueError, match=f"{tmp_path}/a/out cannot be made: {tmp_path} cannot be written; give a folder"
    ):
        convert(str(source), str(tmp_path / "a/out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "source"]


def test_too_small_a_disk(source, tmp_path, monkeypatch):
    size = (source / "model.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size - 10_000))
    with pytest.raises(
        ValueError, match=f"out needs [0-9,]+ bytes, but {tmp_path} has {size - 10_000:,} free: make room"
    ):
        convert(str(source), str(tmp_path / "a/out"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_conversion_that_runs_is_left_alone(source, tmp_path):
    (tmp_path / "out.partial-12ab_9yz").mkdir()
    descriptor = os.open(tmp_path / "out.partial-12ab_9yz", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="out.partial-12ab_9yz is being written by another conversion: wait for it"):
        convert(str(source), str(tmp_path / "out"), progress=False)
    os.close(descriptor)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial-12ab_9yz", "source"]
    convert(str(source), str(tmp_path / "out"), progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("place", ["reading", "copying", "renaming"])
def test_interrupted_in_the_middle(source, tmp_path, monkeypatch, interrupt, place):
    owner, name = {
        "reading": (HuggingFaceFiles, "_rows"),
        "copying": (shutil, "copyfile"),
        "renaming": (os, "rename"),
    }[place]
    real, calls = getattr(owner, name), []

    def stop(*args, **kwargs):
        calls.append(snapshot(tmp_path))
        # the rename of .metadata is DCP's
        if len(calls) == 9 or (place != "reading" and args[0] != str(tmp_path / "out")):
            raise interrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(from_hf, "FILE_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(owner, name, stop)
    expected = ValueError if isinstance(interrupt, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as error:
        convert(str(source), str(tmp_path / "out"), progress=False)
    assert any(".partial-" in path and path.endswith(".distcp") for path in calls[-1])  # it was under way
    assert not any(path == "out" for path in calls[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    if expected is ValueError:
        assert "out could not be written ([Errno 28] No space left on device): make room" in str(error.value)


# ---- memory


MEASURE = """
import sys, threading
import blockgrow_titan.infra.device
from blockgrow_titan.hf.from_hf import convert

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def sample():
    while not done.wait(0.001):
        peak[0] = max(peak[0], status("RssAnon"))

convert(sys.argv[1], sys.argv[2] + "/small", progress=False)  # loads what is loaded on first use
done, start, start_total = threading.Event(), status("RssAnon"), status("VmRSS")
peak = [start]
thread = threading.Thread(target=sample)
thread.start()
convert(sys.argv[3], sys.argv[2] + "/large", progress=False)
done.set()
thread.join()
print(peak[0] - start, status("VmHWM") - start_total)
"""


def test_memory_stays_small(source, tmp_path):
    """600 MB in one file: two chunks, and of the file no more than one of its two large tensors is in memory at a time."""
    size, tensor = write_large(tmp_path / "large", vocab=146_000, dim=1024), 2 * 146_000 * 1024
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out"), str(tmp_path / "large")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr
    anonymous, total = map(int, result.stdout.split()[-2:])
    written = sum(file.stat().st_size for file in (tmp_path / "out/large").glob("*.distcp"))
    shutil.rmtree(tmp_path / "out")
    assert written > size - 10_000 > 2 * tensor
    assert anonymous < 3 * from_hf.FILE_BYTES and total < tensor + 3 * from_hf.FILE_BYTES < size


# ---- training


def test_a_converted_teacher_is_checked_like_its_folder(workspace, tmp_path):
    convert(str(workspace / "teacher"), str(tmp_path / "converted"), progress=False)
    job_config = parse_config(arguments(workspace, tmp_path / "dump", teacher__path=tmp_path / "converted"))
    check_config(job_config)
    tokenizer = json.loads((tmp_path / "converted/tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "converted/tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ValueError, match=f"teacher.path {tmp_path}/converted has another tokenizer than model.hf_assets_path"
    ):
        check_config(job_config)
    edit_config(tmp_path / "converted", max_position_embeddings=23)
    with pytest.raises(ValueError, match="training.seq_len is 24, beyond the 23 positions of the teacher"):
        check_config(job_config)
    next((tmp_path / "converted").glob("*.distcp")).unlink()
    with pytest.raises(ValueError, match=f"the teacher in {tmp_path}/converted is not whole: "):
        check_config(job_config)


def test_training_with_a_converted_teacher(rank_pool, workspace, tmp_path):
    """Losses are those of the Hugging Face folder bit for bit, on the student's rank and on one of its own."""
    teacher = write_teacher(workspace, tmp_path / "teacher")
    convert(str(teacher), str(tmp_path / "converted"), progress=False)

    def job(path: Path, ranks: int) -> list[tuple[float, ...]]:
        args = arguments(
            workspace,
            tmp_path / f"{path.name}{ranks}",
            teacher__path=path,
            teacher__ranks=ranks,
            growth__phase_steps=[2],
            growth__active_blocks=[2],
            training__steps=2,
            checkpoint__enable=False,
            validation__enable=False,
        )
        return losses(rank_pool.run(run_job, 1 + ranks, timeout=300, args=args)[0])

    for ranks in (0, 1):
        expected = job(teacher, ranks)
        assert job(tmp_path / "converted", ranks) == expected and len(expected) == 2 and expected[0][3] > 0.1
