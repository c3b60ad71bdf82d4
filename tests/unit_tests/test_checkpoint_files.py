"""Folders of checkpoints: which are whole, which go, what is wrong with their files (``checkpoint_files.py``)."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from blockgrow_titan.checkpoint_files import (
    CHECKSUMS,
    HF_INDEX,
    METADATA,
    check_writable,
    damaged,
    empty,
    find_damage,
    is_whole,
    read_checksums,
    record_of,
    saved_steps,
    stale_steps,
    steps_of,
    unmark,
    write_checksums,
)
from tests.unit_tests.small_disk import make_read_only, small_disk

FILES = {"__0_0.distcp": b"weights" * 9, "__1_0.distcp": b"", "manifest.json": b"{}", METADATA: b"metadata"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A whole checkpoint, of any content."""
    folder = tmp_path / "checkpoint" / "step-4"
    write(folder)
    return folder


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    write_checksums(str(folder), {METADATA: record_of(folder / METADATA)})


W, H = True, False  # whole, half-written


@pytest.mark.parametrize(
    ("steps", "keep", "boundaries", "stale"),
    [
        ({}, 2, [], []),
        ({2: H}, 2, [], []),  # the first save, half-written
        ({2: W, 4: W, 6: W}, 2, [], [2]),
        ({2: W, 4: W, 6: W}, 0, [], []),
        ({2: W, 4: W}, 2, [], []),
        ({2: W, 4: H, 6: W}, 2, [], [4]),  # counts whole ones only
        ({2: W, 4: H, 6: W}, 0, [], [4]),
        ({2: W, 4: W, 6: H}, 2, [], []),  # the one in flight does not count
        ({2: W, 4: W, 6: W, 8: H}, 2, [], [2]),
        ({2: W, 3: W, 4: W, 6: W, 8: W}, 2, [3], [2, 4]),  # boundaries neither go nor count
        ({3: W, 6: W, 9: W}, 2, [3, 6, 9], []),
        ({2: W, 3: W}, 2, [3], []),
        ({2: W, 3: H, 4: W, 5: W, 6: W}, 2, [3], [2, 3, 4]),  # half a boundary is none
        ({8: W, 2: W, 10: W}, 2, [], [2]),
        ({1: W, 2: W, 3: W}, 1, [], [1, 2]),
    ],
)
def test_retention(steps: dict[int, bool], keep: int, boundaries: list[int], stale: list[int]) -> None:
    assert stale_steps(steps, keep, boundaries) == stale


def test_retention_never_takes_what_a_run_needs() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        steps = {step: rng.random() < 0.7 for step in rng.sample(range(20), rng.randint(0, 8))}
        keep, boundaries = rng.randint(0, 4), set(rng.sample(range(20), 3))
        stale = stale_steps(steps, keep, boundaries)
        whole = sorted(step for step in steps if steps[step])
        left = [step for step in whole if step not in stale]
        assert whole[-1:] == left[-1:]
        assert whole[-keep:] == left[-keep:]
        assert boundaries.isdisjoint(step for step in stale if steps[step])
        assert keep == 0 or len(set(left) - boundaries) <= max(keep, 1)
        assert all(steps[step] for step in steps if whole and step < whole[-1] and step not in stale)
        assert not any(step > max(whole, default=-1) for step in stale)  # it may be being written


def test_what_is_whole(checkpoint: Path) -> None:
    root = checkpoint.parent
    for name in ("step-6", "step-x", "xstep-8", "step-10"):
        shutil.copytree(checkpoint, root / name)
    (root / "step-12").touch()
    (root / "step-6" / METADATA).unlink()
    assert steps_of(str(root)) == {4: True, 6: False, 10: True, 12: False}
    assert saved_steps(str(root)) == [4, 10]
    assert saved_steps(str(root / "absent")) == []


def test_a_last_step_in_hugging_face_format_is_whole_with_its_checksums(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert not is_whole(str(tmp_path))
    (tmp_path / HF_INDEX).write_text("{}")
    assert not is_whole(str(tmp_path))  # torch writes the index last, but not at once
    write_checksums(str(tmp_path), {})
    assert is_whole(str(tmp_path))
    assert set(read_checksums(str(tmp_path)) or {}) == {"model.safetensors", HF_INDEX}
    unmark(str(tmp_path))
    assert not is_whole(str(tmp_path))


class Crash(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture
def crashes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """``crashes[0]`` is how many more removals there may be before the process is killed."""
    left = [10**9]
    for name in ("unlink", "remove", "rmdir"):
        original = getattr(os, name)

        def removal(*args, original=original, **kwargs):
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return original(*args, **kwargs)

        monkeypatch.setattr(os, name, removal)
    yield left
    monkeypatch.undo()


@pytest.mark.parametrize("removal", ["unmark and rmtree", "empty"])
def test_a_crash_in_a_removal_never_leaves_what_looks_whole(checkpoint: Path, crashes: list[int], removal: str) -> None:
    for number in count():
        crashes[0] = 10**9
        shutil.rmtree(checkpoint)
        write(checkpoint)
        crashes[0] = number
        try:
            if removal == "empty":
                empty(str(checkpoint))
            else:
                unmark(str(checkpoint))
                shutil.rmtree(checkpoint)
        except Crash:
            whole = checkpoint.exists() and is_whole(str(checkpoint))
            assert not whole or not find_damage(str(checkpoint))
            assert whole == (number == 0)
        else:
            break
    assert number == len(FILES) + 2  # each file, checksums.json and the folder
    assert (list(checkpoint.iterdir()) if removal == "empty" else checkpoint.exists()) in ([], False)


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(checkpoint: Path, name: str, kind: str) -> None:
    assert find_damage(str(checkpoint)) == []
    size = len(FILES[name])
    if size == 0 and kind in ("cut off", "flipped"):
        return  # of an empty file
    DAMAGE[kind](checkpoint / name)
    words = {
        "missing": "is missing",
        "cut off": f"has {size - 1} bytes instead of {size}",
        "longer": f"has {size + 1} bytes instead of {size}",
        "flipped": f"is altered: its SHA-256 is not the one in {CHECKSUMS}",
    }[kind]
    assert find_damage(str(checkpoint)) == [f"{name} {words}"]
    assert find_damage(str(checkpoint), except_for=(name,)) == []
    parts = [find_damage(str(checkpoint), part=part, parts=3) for part in range(3)]
    assert sorted(map(len, parts)) == [0, 0, 1]  # one rank sees it
    quick = find_damage(str(checkpoint), sizes_only=True)
    assert bool(quick) == (kind != "flipped" or not name.endswith(".distcp"))


def test_any_flipped_byte_of_the_checksums_is_their_own(checkpoint: Path) -> None:
    path = checkpoint / CHECKSUMS
    content, records = path.read_bytes(), read_checksums(str(checkpoint))
    for position in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[position] ^= 1 if position % 2 else 0x80
        path.write_bytes(flipped)
        if problems := find_damage(str(checkpoint)):
            assert problems == [f"{CHECKSUMS} is altered"]
        else:
            assert read_checksums(str(checkpoint)) == records and chr(content[position]).isspace()
    for text in ("", "[]", "{}", '{"files": [], "sha256": ""}', "null", json.dumps(FILES, default=str)):
        path.write_text(text)
        assert find_damage(str(checkpoint)) == [f"{CHECKSUMS} is altered"]
    path.unlink()
    assert find_damage(str(checkpoint)) == []  # of an older version: nothing to compare with


def test_the_way_out_is_said(checkpoint: Path) -> None:
    problems = [f"file{i} is missing" for i in range(5)]
    alone = str(damaged(str(checkpoint), problems, resumes=True))
    assert (
        "step-4 is damaged: file0 is missing; file1 is missing; file2 is missing; and 2 more. Move that folder" in alone
    )
    assert alone.endswith("away, and the run starts from its first step; or put back the file as it was")
    for step in (1, 3, 6):
        shutil.copytree(checkpoint, checkpoint.parent / f"step-{step}")
    (checkpoint.parent / "step-3" / METADATA).unlink()
    assert "the run goes on from step-1;" in str(damaged(str(checkpoint), problems[:1], resumes=True))
    other = str(damaged(str(checkpoint), problems[:1], resumes=False))
    assert other.endswith("step-4 is damaged: file0 is missing. Copy it again, or use another checkpoint")


def test_folders_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    check_writable(str(tmp_path), "job.dump_folder")
    check_writable(str(tmp_path / "a" / "b"), "job.dump_folder")
    assert list(tmp_path.iterdir()) == []  # nothing is left, nothing made
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="job.dump_folder is .*file/b, where no file can be written: Not a directory"):
        check_writable(str(tmp_path / "file" / "b"), "job.dump_folder")
    with small_disk(tmp_path / "disk", kib=64) as folder:
        check_writable(str(folder / "run"), "job.dump_folder")
        with pytest.raises(OSError, match="No space left"):
            (folder / "large").write_bytes(bytes(10**6))
        with pytest.raises(
            ValueError, match=r"run, where no file can be written: No space left on device \(.*disk is as much of it"
        ):
            check_writable(str(folder / "run"), "job.dump_folder")
        make_read_only(folder)
        with pytest.raises(ValueError, match="disk, where no file can be written: Read-only file system. Make it"):
            check_writable(str(folder), "checkpoint.folder")
