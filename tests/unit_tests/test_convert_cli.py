"""tools/convert_hf.py: exit status, one line for each refusal, and help that needs no torch."""

import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit_tests.students import (
    made,
    own_module_cache,  # noqa: F401  (a fixture)
)
from tools.convert_hf import main

ROOT = Path(__file__).resolve().parents[2]


def test_there_and_back(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher, dcp, back = str(workspace / "teacher"), str(tmp_path / "dcp"), str(tmp_path / "back")
    assert main(["from-hf", teacher, dcp]) == 0
    assert main(["to-hf", dcp, back]) == 0
    assert f"wrote {back}: 2 layers, 42,208 parameters in float32, 25 tensors in 1 file\n" in capsys.readouterr().out
    assert main(["verify", teacher, back, "--text", "she was; 東京"]) == 0
    assert capsys.readouterr().out.startswith("largest difference 0.000e+00 at token 0 ")


def test_a_student(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, out = str(made(workspace, tmp_path / "run", "post")), str(tmp_path / "out")
    arguments = ["--dtype", "bfloat16", "--max-shard-size", "20KB", "--tokenizer", str(workspace / "teacher")]
    assert main(["to-hf", checkpoint, out, "--import", "blockgrow_titan", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "in bfloat16, 25 tensors in " in printed and "in 1 file\n" not in printed
    (tmp_path / "text").write_text("She was so, 東京.", encoding="utf-8")
    assert main(["verify", checkpoint, out, "--text-file", str(tmp_path / "text")]) == 1
    assert "NOT within 0.0001" in capsys.readouterr().out
    assert main(["verify", checkpoint, out, "--tolerance", "0.5"]) == 0
    assert ": within 0.5\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["from-hf", "absent", "out"], "absent"),
        (["to-hf", "absent", "out"], "absent is not there: give the"),
        (["to-hf", "absent", "."], "is not empty"),
        (["to-hf", "absent", "out", "--dtype", "half"], 'dtype is "half": it must be'),
        (["verify", "absent", "out"], "absent is not there: give the"),
        (["verify", "absent", "out", "--text-file", "gone"], "No such file or directory: 'gone'"),
        (["verify", "absent", "out", "--tolerance", "nan"], "the tolerance is nan: it must be a number from 0"),
        (["verify", "absent", "out", "--text", "\udcff"], "the text is not UTF-8: give some that is with --text or"),
        (
            ["verify", "absent", "out", "--text-file", "binary"],
            "the text is not UTF-8: give some that is with --text or",
        ),
    ],
)
def test_a_refusal_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff")
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and text in printed and printed.count("\n") == 1
    assert os.listdir(tmp_path) == ["binary"]


def test_ctrl_c(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = made(workspace, tmp_path / "run", "pre")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("blockgrow_titan.hf.to_hf.save_file", interrupt)
    assert main(["to-hf", str(checkpoint), str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "stopped: nothing half-written remains"
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("cause", "status", "text"),
    [
        (KeyboardInterrupt(), 130, "stopped: nothing half-written remains"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "out could not be written ([Errno 28] No space left on"),
    ],
)
def test_stopped_inside_a_tensor(
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cause: BaseException,
    status: int,
    text: str,
) -> None:
    """torch's zip writer raises an error of its own when the file that it writes to does."""
    real = torch.save

    class Stopping(io.BytesIO):
        def write(self, data) -> int:
            if self.tell() > 0:
                raise cause
            return super().write(data)

    monkeypatch.setattr(torch, "save", lambda tensor, stream, **kwargs: real(tensor, Stopping(), **kwargs))
    assert main(["from-hf", str(workspace / "teacher"), str(tmp_path / "out")]) == status
    assert text in capsys.readouterr().err.splitlines()[-1]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", [[], ["from-hf"], ["to-hf"], ["verify"]])
def test_help_explains_and_shows(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "python -m tools.convert_hf" in text
    assert not command or ("memory:" in text and "example" in text)


def test_as_a_script(workspace: Path, tmp_path: Path) -> None:
    """From another folder, without the package on the path; a command that needs no torch imports none."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PYTHONPROFILEIMPORTTIME"] = "1"
    script = [sys.executable, str(ROOT / "tools" / "convert_hf.py")]
    done = subprocess.run([*script, "to-hf", "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "manifest" in done.stdout
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in imported and not imported & {"torch", "torchtitan", "transformers"}
    del environment["PYTHONPROFILEIMPORTTIME"]
    checkpoint = made(workspace, tmp_path / "run", "post")
    shutil.copytree(workspace / "tokenizer", tmp_path / "tokenizer")
    done = subprocess.run(
        [*script, "to-hf", str(checkpoint), "out", "--tokenizer", "tokenizer"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {tmp_path / 'out'}: 2 layers, 42,208 parameters in float32, 25 tensors in 1 file\n"
    assert all("file/s" in line for line in done.stderr.split("\n") if line), done.stderr  # the progress bar alone
