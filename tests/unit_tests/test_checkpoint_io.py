"""Saves that end with checksums, and loads that trust no pickle (``checkpoint_io.py``), in one process."""

import builtins
import os
import pickle
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from blockgrow_titan.checkpoint_files import CHECKSUMS, METADATA, find_damage, is_whole, read_checksums
from blockgrow_titan.checkpoint_io import (
    CheckpointError,
    CheckpointReader,
    ChecksumWriter,
    failures_named,
    load_checkpoint,
)
from tests.unit_tests.small_disk import make_read_only, small_disk

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(7, 5, generator=generator),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "optimizer": {"step": torch.tensor(3.0), "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "fused": None}]},
        "train_state": {"step": 7 + seed, "name": "x", "last": [1, 2.5], "on": True},
    }


def save(folder: Path) -> None:
    dcp.save(state(), storage_writer=ChecksumWriter(str(folder)), no_dist=True)


def loaded(folder: Path) -> dict[str, Any]:
    target = state(1)
    load_checkpoint(target, folder, no_dist=True)
    return target


def flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: flat(inner) for key, inner in value.items()}
    return [flat(inner) for inner in value] if isinstance(value, list | tuple) else value


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    save(tmp_path / "step-2")
    assert flat(loaded(tmp_path / "step-2")) == flat(state())
    names = {path.name for path in (tmp_path / "step-2").iterdir()}
    assert names == {"__0_0.distcp", METADATA, CHECKSUMS}
    assert set(read_checksums(str(tmp_path / "step-2")) or {}) == names - {CHECKSUMS}
    assert find_damage(str(tmp_path / "step-2")) == []
    plain = state(1)
    dcp.load(plain, checkpoint_id=tmp_path / "step-2", no_dist=True)  # torch reads it as its own
    assert flat(plain) == flat(state())


def test_the_writer_can_be_sent_to_another_process(tmp_path: Path) -> None:
    """As torch does with ``checkpoint.async_mode = "async_with_pinned_mem"``."""
    writer = pickle.loads(pickle.dumps(ChecksumWriter(str(tmp_path / "step-2"))))
    dcp.save(state(), storage_writer=writer, no_dist=True)
    assert is_whole(str(tmp_path / "step-2")) and find_damage(str(tmp_path / "step-2")) == []


class Crash(BaseException):
    """Stands for SIGKILL."""


OPERATIONS = ((builtins, "open"), (os, "fsync"), (os, "replace"), (os, "rename"), (os, "mkdir"))


@contextmanager
def killed_at(call: int, folder: Path, after: bool) -> Iterator[list[str]]:
    """Dies before or after the n-th operation on files of a folder; what they were."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for module, name in OPERATIONS:
            original = getattr(module, name)

            def operation(path: Any, *args: Any, original=original, name=name, **kwargs: Any) -> Any:
                if name != "fsync" and not str(path).startswith(str(folder)):
                    return original(path, *args, **kwargs)
                seen.append(f"{name} {path}")
                if len(seen) == call and not after:
                    raise Crash
                result = original(path, *args, **kwargs)
                if len(seen) >= call:
                    raise Crash
                return result

            patch.setattr(module, name, operation)
        yield seen


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_operation_leaves_a_whole_checkpoint_or_none(tmp_path: Path, after: bool) -> None:
    whole = []
    for call in range(1, 100):
        folder = tmp_path / f"step-{call}"
        with killed_at(call, folder, after) as seen:
            try:
                save(folder)
            except CheckpointException as error:  # torch catches even SystemExit
                assert isinstance(error.failures[0][0], Crash)
            else:
                break
        whole.append(is_whole(str(folder)))
        if whole[-1]:
            assert find_damage(str(folder)) == [] and read_checksums(str(folder)) is not None
            assert flat(loaded(folder)) == flat(state())
    assert len(seen) == call - 1 >= 10
    assert any(f"rename {folder / METADATA}.tmp" in operation for operation in seen)
    assert whole == sorted(whole)  # once it is whole, nothing that follows is needed
    assert 1 <= sum(whole) <= 3 and not all(whole)


def test_a_flipped_byte_anywhere_is_named(tmp_path: Path) -> None:
    save(tmp_path / "step-2")
    for name in ("__0_0.distcp", METADATA, CHECKSUMS):
        path = tmp_path / "step-2" / name
        content = path.read_bytes()
        for position in range(0, len(content), max(1, len(content) // 40)):
            path.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
            (problem,) = find_damage(str(tmp_path / "step-2"))
            assert problem.startswith(f"{name} is ")
        path.write_bytes(content)


class Harmful:
    """Pickled, it calls ``os.mkdir`` when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_metadata_that_names_another_class_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "step-2"
    save(folder)
    metadata = CheckpointReader(folder).read_metadata()
    metadata.planner_data = Harmful(tmp_path / "made")
    for content in (
        pickle.dumps(metadata),
        pickle.dumps(Harmful(tmp_path / "made")),
        pickle.dumps(metadata, protocol=2),
    ):
        (folder / METADATA).write_bytes(content)
        with pytest.raises(
            ValueError, match=r"\.metadata cannot be read \(UnpicklingError: it names posix.mkdir, which"
        ):
            CheckpointReader(folder).read_metadata()
        with pytest.raises(ValueError, match="it names posix.mkdir") as error:
            loaded(folder)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "made").exists()


class Attribute:
    """Pickled, it is what ``getattr`` gives, as Python 3.11.0 to 3.11.3 pickle an enum's member."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


@pytest.mark.parametrize("protocol", [2, pickle.DEFAULT_PROTOCOL])
def test_metadata_may_take_a_member_of_its_enum_and_no_other_attribute(tmp_path: Path, protocol: int) -> None:
    folder = tmp_path / "step-2"
    save(folder)
    metadata = CheckpointReader(folder).read_metadata()
    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    metadata.planner_data = Attribute(_MEM_FORMAT_ENCODING, member.name)
    (folder / METADATA).write_bytes(pickle.dumps(metadata, protocol))
    assert CheckpointReader(folder).read_metadata().planner_data is member
    for owner, name in ((type(metadata), "__init__"), (_MEM_FORMAT_ENCODING, "__class__")):
        metadata.planner_data = Attribute(owner, name)
        (folder / METADATA).write_bytes(pickle.dumps(metadata, protocol))
        with pytest.raises(ValueError, match=r"\.metadata cannot be read"):
            CheckpointReader(folder).read_metadata()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "EOFError"),
        (b"x", "UnpicklingError"),
        (pickle.dumps([1]), "it holds list, not a checkpoint's metadata"),
        (b"\x80\x04\x8c\x05torch\x8c\x0bfloat32.new\x93.", "it names torch.float32.new"),
        (b"\x80\x04\x8c\x05torch\x8c\x04load\x93.", "it names torch.load"),
    ],
)
def test_metadata_that_is_none_is_refused_in_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        CheckpointReader(tmp_path).read_metadata()
    assert str(error.value).startswith(f"{tmp_path / METADATA} cannot be read") and "\n" not in str(error.value)


def test_an_entry_that_holds_another_class_is_refused_by_name(tmp_path: Path) -> None:
    values = state()
    values["train_state"]["step"] = Harmful(tmp_path / "made")
    dcp.save(values, storage_writer=ChecksumWriter(str(tmp_path / "step-2")), no_dist=True)
    with pytest.raises(
        ValueError, match="its entry train_state.step is not of numbers.*: it names posix.mkdir"
    ) as error:
        loaded(tmp_path / "step-2")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    assert not (tmp_path / "made").exists()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_that_fails(folder: Path, tensor: torch.Tensor) -> str:
    with pytest.raises(CheckpointError) as error, failures_named("The checkpoint of step 2 could not be written"):
        dcp.save({"weight": tensor}, storage_writer=ChecksumWriter(str(folder)), no_dist=True)
    assert not is_whole(str(folder)) and "\n" not in str(error.value)
    return str(error.value)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with largest_file(2**22):
        text = save_that_fails(tmp_path / "step-2", torch.zeros(2**21))
    file = tmp_path / "step-2" / "__0_0.distcp"
    assert text == f"The checkpoint of step 2 could not be written: {file}: File too large (student rank 0)"
    (tmp_path / "file").touch()
    text = save_that_fails(tmp_path / "file" / "step-2", torch.zeros(1))
    assert text.endswith(f"{tmp_path}/file/step-2: Not a directory (student rank 0)")


def test_a_full_disk_and_a_read_only_one(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kib=1024) as disk:
        text = save_that_fails(disk / "step-2", torch.zeros(2**20))
        assert text.endswith(f"{disk}/step-2/__0_0.distcp: No space left on device (student rank 0)")
        shutil.rmtree(disk / "step-2")
        outcomes = set()
        for room in range(0, 40_000, 4096):  # the data fits, what follows may not
            (disk / "ballast").write_bytes(bytes(2**20 - room))
            try:
                with failures_named("It"):
                    save(disk / "step-4")
            except CheckpointError as error:
                file, _, cause = str(error).removeprefix(f"It: {disk}/step-4").partition(": ")
                assert file in ("", "/__0_0.distcp", f"/{CHECKSUMS}", f"/{METADATA}.tmp")
                outcomes.add(cause)
                assert not is_whole(str(disk / "step-4"))
            else:
                outcomes.add("whole")
                assert find_damage(str(disk / "step-4")) == []
            shutil.rmtree(disk / "step-4", ignore_errors=True)
            (disk / "ballast").unlink()
        assert outcomes == {"whole", "No space left on device (student rank 0)"}
        make_read_only(disk)
        assert "Read-only file system" in save_that_fails(disk / "step-2", torch.zeros(1))
