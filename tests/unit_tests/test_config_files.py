"""Config files: mistakes in them are refused in one line, and those that are shipped run as they say."""

import re
from pathlib import Path
from typing import Any

import pytest

from blockgrow_titan.checks import check_config
from blockgrow_titan.parse import parse_config
from tests.unit_tests.jobs import arguments, run_job, without_teacher
from tests.unit_tests.rank_pool import RankError, RankPool
from tests.unit_tests.test_checks import assert_names, changed

REPOSITORY = Path(__file__).parents[2]
TRAIN_CONFIGS = REPOSITORY / "train_configs"
BUNDLED_TEACHER = REPOSITORY / "blockgrow_titan" / "assets" / "teacher"


def parse_error(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        check_config(parse_config(["--job.config_file", str(path)]))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("placement =", "placemnt =", ("has block_stack.placemnt", "did you mean block_stack.placement?")),
        ("[growth]", "[grwth]", ("has grwth", "no such section", "did you mean growth?")),
        ("placement =", "xyzzy =", ("has block_stack.xyzzy", "known: placement, num_blocks, layers_per_block")),
        ("log_freq = 1", "log_frq = 1", ("has metrics.log_frq", "did you mean metrics.log_freq?")),
        ("max_norm = 1.0", "lr = 1.0", ("has training.lr", "did you mean optimizer.lr?")),
        ("[debug]", "[documents.text_column]\n[debug]", ("documents.text_column is {}", "must be str")),
        ("[optimizer]", "[training.dataloader]\nnum_worker = 3\n[optimizer]", ("training.dataloader.num_workers?",)),
        ('custom_config_module = "blockgrow_titan.job_config"', "", ("block_stack", "job.custom_config_module")),
        ('"blockgrow_titan.job_config"', '"json"', ('job.custom_config_module is "json"', "AttributeError")),
        ('"blockgrow_titan.job_config"', '".json"', ('job.custom_config_module is ".json"', "TypeError")),
        ('"blockgrow_titan.job_config"', "7", ("job.custom_config_module is 7", "must be str")),
        ('custom_config_module = "blockgrow_titan.job_config"', 'custom_config_module = "no.module"', ("job.custom_config_module", "No module named 'no'")),
        ("[debug]\nseed = 7", "[debug", ("job.config_file", "config.toml", "not valid TOML", "line 57")),
        ("phase_steps = [3, 3]", 'phase_steps = ["3", 3]', ("growth.phase_steps is ['3', 3]", "list[int]")),
        ("phase_steps = [3, 3]", "phase_steps = [1.5, 4.5]", ("growth.phase_steps is [1.5, 4.5]", "list[int]")),
        ("phase_steps = [3, 3]", 'phase_steps = "3 3"', ("growth.phase_steps is '3 3'", "list[int]")),
        ("steps = 6", "steps = true", ("training.steps is True", "must be int")),
        ("[job]\n", "debug = 7\n[job]\n", ("debug", "7", "must be a section")),
        ("[job]\n", "[[debug]]\n[job]\n", ("debug = [{}]", "must be a section, [debug]")),
        ("steps = 6\n", "steps = 6\nsteps = 7\n", ("Cannot overwrite a value (at line 30", "'steps = 7'", "in the file twice")),
        ("[debug]", "[growth]\n[debug]", ("Cannot declare ('growth',) twice (at line 57", "'[growth]'", "in the file twice")),
        ("[debug]", "steps = [" + "[" * 3000, ("config.toml", "not valid TOML", "recursion")),
        ("steps = 6", f"steps = {'9' * 5000}", ("config.toml", "not valid TOML")),
        ("steps = 6", f"steps = {10**30}", ("training.steps is 1000", "64 bits")),
        ("[validation]", "[validation]\nsteps = 0", ("validation.steps is 0", "must be positive or -1")),
        ('path = "', 'path = "\\u0000', ("is '\\x00/", "NUL")),
        ("seq_len = 24\nlocal", "dataloader = 3\nseq_len = 24\nlocal", ("dataloader", "3", "must be a section")),
    ],
)  # fmt: skip
def test_bad_files(workspace: Path, tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    text = (workspace / "base.toml").read_text()
    assert text.count(old) >= 1
    if new.startswith(("debug = ", "[[debug]]")):
        text = text.replace("[debug]\nseed = 7\n", "")
    assert_names(parse_error(tmp_path / "config.toml", text.replace(old, new, 1)), *words)


def test_a_file_without_the_plugins_sections(tmp_path: Path) -> None:
    text = parse_error(tmp_path / "config.toml", "[training]\nsteps = 3\n")
    assert_names(text, 'job.custom_config_module = "blockgrow_titan.job_config"')


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n"])
def test_an_empty_file(tmp_path: Path, text: str) -> None:
    words = f"the config in {tmp_path / 'config.toml'} lacks this plugin's sections: set job.custom_config_module"
    assert_names(parse_error(tmp_path / "config.toml", text), words)


ENCODINGS = {
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "byte order mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "both": lambda text: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
    "no newline at the end": lambda text: text.rstrip("\n").encode(),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_files_as_other_systems_write_them(workspace: Path, tmp_path: Path, encoding: str) -> None:
    text = (workspace / "base.toml").read_text()
    (tmp_path / "config.toml").write_bytes(ENCODINGS[encoding](text))
    theirs = parse_config(["--job.config_file", str(tmp_path / "config.toml")])
    ours = parse_config(["--job.config_file", str(workspace / "base.toml")])
    ours.job.config_file = theirs.job.config_file
    assert theirs.to_dict() == ours.to_dict()


def test_whole_numbers_of_float_fields_are_floats(workspace: Path, tmp_path: Path) -> None:
    text = (workspace / "base.toml").read_text().replace("lr = 3e-3", "lr = 1\nbeta1 = 0")
    text = text.replace("warmup_steps = 1", "warmup_steps = 1\ndecay_ratio = 1").replace(
        "max_norm = 1.0", "max_norm = 1"
    )
    (tmp_path / "config.toml").write_text(text)
    job_config = parse_config(["--job.config_file", str(tmp_path / "config.toml")])
    numbers = (job_config.optimizer.lr, job_config.optimizer.beta1, job_config.lr_scheduler.decay_ratio)
    assert numbers == (1, 0, 1) and all(type(number) is float for number in numbers)
    assert type(job_config.training.max_norm) is int  # which may be either


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[job]\n# caf\xe9\n", "not UTF-8 (invalid continuation byte in line 2): save it as UTF-8"),
        (b"\xef\xbb\xbf[job]\n\xff", "not UTF-8 (invalid start byte in line 2)"),
        ("[job]\n".encode("utf-16"), "not UTF-8 (invalid start byte in line 1)"),
        (b"[job]\n\x00", "not valid TOML: Invalid statement (at line 2, column 1), '\\x00'"),
        (b"[job]\rdebug = 1\r", "not valid TOML: "),
        (b"[job]\nname = 'a\n", "not valid TOML: "),
    ],
)
def test_files_that_are_no_toml(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        parse_config(["--job.config_file", str(path)])
    assert f'job.config_file is "{path}", which is {words}' in str(error.value) and "\n" not in str(error.value)


def test_an_absent_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    for spelling in (["--job.config_file", "nothing.toml"], ["--job.config-file=nothing.toml"]):
        with pytest.raises(ValueError, match=f'job.config_file is "nothing.toml", .*No such file.* {tmp_path}'):
            parse_config(spelling)
    with pytest.raises(ValueError, match=f'job.config_file is "{tmp_path}", which cannot be read .Is a directory'):
        parse_config(["--job.config_file", str(tmp_path)])
    assert not caplog.records  # no traceback besides


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--growth.freez", "none"), ("--growth.freez, none", "did you mean --growth.freeze?")),
        (("--training.steps", "many"), ("--training.steps", "'many'")),
        (("--comm.mode", "fake"), ("'fake'", "--comm.mode", "'fake_backend'")),
        (("extra",), ("extra",)),
        (("--grwth.freeze", "none"), ("--grwth.freeze", "did you mean --growth.freeze?")),
        (("--job.custom_config_module",), ("--job.custom-config-module",)),
        (("--validation.steps", "0"), ("validation steps must be positive or -1",)),
        (("--checkpoint.enable", "maybe"), ("maybe",)),
    ],
)
def test_wrong_arguments(workspace: Path, capsys: Any, wrong: tuple[str, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        parse_config([*arguments(workspace, workspace), *wrong])
    assert "\n" not in str(error.value) and "│" not in str(error.value)
    assert_names(str(error.value), *words)
    assert capsys.readouterr().err == ""


def test_help_is_shown(workspace: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_config([*arguments(workspace, workspace), "--help"])
    assert stop.value.code == 0 and "--growth.freeze" in capsys.readouterr().out


# The configs that are shipped.


def shipped(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("path", sorted(TRAIN_CONFIGS.rglob("*.toml")), ids=shipped)
def test_shipped_configs_open_with_their_command(path: Path) -> None:
    head = "\n".join(path.read_text().splitlines()[:3])
    assert all(line.startswith("#") for line in head.splitlines()[:2])
    assert re.search(rf"\./run_train\.sh --job\.config_file {re.escape(shipped(path))}\b", head), head


@pytest.mark.parametrize("path", sorted(TRAIN_CONFIGS.glob("*.toml")), ids=shipped)
def test_shipped_configs_pass(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # bundled files are found from anywhere
    job_config = parse_config(["--job.config_file", str(path)])
    assert Path(job_config.job.dump_folder).name == path.stem  # one folder each
    assert job_config.checkpoint.enable
    if job_config.teacher.path == "package:blockgrow_titan/assets/teacher" and not BUNDLED_TEACHER.exists():
        check_config(changed(job_config, **without_teacher()))
        pytest.skip(f"everything but the teacher was checked: {BUNDLED_TEACHER} is not there yet")
    check_config(job_config)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"model__name": "qwen4"}, ('model.name is "qwen4"', '"qwen3_block_stack"')),
        ({"model__name": "qwen3"}, ('model.name is "qwen3"', "cannot grow")),
        ({"experimental__custom_import": "no_such_plugin"}, ("experimental.custom_import", "no_such_plugin")),
        ({"experimental__custom_import": ".relative"}, ('experimental.custom_import is ".relative"', "TypeError")),
        ({"teacher__path": "package:os/x"}, ('teacher.path = "package:os/x"', "not an importable package")),
        ({"training__dataset_path": "/no/such.jsonl"}, ("training.dataset_path", "/no/such.jsonl")),
        ({"validation__dataset_path": "/no/such.jsonl"}, ("validation.dataset_path", "/no/such.jsonl")),
        ({"growth__hooks": "json:dumps"}, ('growth.hooks has "json:dumps"', "module:Class")),
    ],
)
def test_what_the_config_names_must_be_there(
    workspace: Path, tmp_path: Path, overrides: dict[str, str], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as error:
        check_config(parse_config(arguments(workspace, tmp_path, **overrides)))
    assert all(part in str(error.value) for part in parts), error.value


def test_documents_are_refused_in_one_line(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    """What only reading the documents can tell is a config error too, on every rank, before there is a model."""
    args = arguments(workspace, tmp_path, documents__shard_documents=1000)
    with pytest.raises(RankError, match=r"ConfigError: documents.shard_documents = 1000, but .* holds 40 documents"):
        rank_pool.run(run_job, 2, args=args)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_without_any_argument_the_config_is_torchtitans() -> None:
    assert parse_config([]).job.config_file is None
