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
        ("placement =", "placemnt =", ('"placemnt" in BlockStack', 'did you mean "placement"?')),
        ("[growth]", "[grwth]", ('"grwth"', 'did you mean "growth"?')),
        ("placement =", "xyzzy =", ('"xyzzy" in BlockStack', "placement, num_blocks, layers_per_block")),
        ("log_freq = 1", "log_frq = 1", ('"log_frq" in Metrics', 'did you mean "log_freq"?')),
        ("[optimizer]", "[training.dataloader]\nnum_worker = 3\n[optimizer]", ('"num_workers"?',)),
        ('custom_config_module = "blockgrow_titan.job_config"', "", ("block_stack", "job.custom_config_module")),
        ('custom_config_module = "blockgrow_titan.job_config"', 'custom_config_module = "no.module"', ("job.custom_config_module", "No module named 'no'")),
        ("[debug]\nseed = 7", "[debug", ("job.config_file", "config.toml", "not valid TOML", "line 57")),
        ("phase_steps = [3, 3]", 'phase_steps = ["3", 3]', ("growth.phase_steps is ['3', 3]", "list[int]")),
        ("phase_steps = [3, 3]", "phase_steps = [1.5, 4.5]", ("growth.phase_steps is [1.5, 4.5]", "list[int]")),
        ("phase_steps = [3, 3]", 'phase_steps = "3 3"', ("growth.phase_steps is '3 3'", "list[int]")),
        ("steps = 6", "steps = true", ("training.steps is True", "must be int")),
        ("[job]\n", "debug = 7\n[job]\n", ("debug", "7", "must be a section")),
        ("seq_len = 24\nlocal", "dataloader = 3\nseq_len = 24\nlocal", ("dataloader", "3", "must be a section")),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")  # tyro's, about types
def test_bad_files(workspace: Path, tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    text = (workspace / "base.toml").read_text()
    assert text.count(old) >= 1
    if new.startswith("debug = "):
        text = text.replace("[debug]\nseed = 7\n", "")
    assert_names(parse_error(tmp_path / "config.toml", text.replace(old, new, 1)), *words)


def test_a_file_without_the_plugins_sections(tmp_path: Path) -> None:
    text = parse_error(tmp_path / "config.toml", "[training]\nsteps = 3\n")
    assert_names(text, 'job.custom_config_module = "blockgrow_titan.job_config"')


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
