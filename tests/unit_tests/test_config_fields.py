"""Every field of a config, ours and torchtitan's: a value of another type or out of its range is refused by name."""

import copy
import dataclasses
import datetime
import operator
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from blockgrow_titan.checks import check_config
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.parse import MAY_BE_INFINITE, PLUGIN_SECTIONS, parse_config
from blockgrow_titan.ranges import RANGES
from tests.unit_tests.jobs import arguments

# One value of every type that TOML has; a list for each type of its items.
VALUES = {
    "bool": (True, "true"),
    "int": (3, "3"),
    "float": (2.5, "2.5"),
    "str": ("no such thing", '"no such thing"'),
    "date": (datetime.date(2026, 1, 2), "2026-01-02"),
    "list of int": ([3], "[3]"),
    "list of bool": ([True], "[true]"),
    "list of float": ([2.5], "[2.5]"),
    "list of str": (["no such thing"], '["no such thing"]'),
    "list of lists": ([[3]], "[[3]]"),
    "list of lists of str": ([["a"]], '[["a"]]'),
    "mixed list": (["a", 3], '["a", 3]'),
    "table": ({"a": 3}, "{a = 3}"),
}
# A negative number means something, or the field is of a part that is refused or never used.
NEGATIVE = {
    "teacher.ranks",
    "documents.shard_documents",
    "documents.pad_to_multiple_of",
    "diagnostics.tokens",
    "training.global_batch_size",
    "validation.steps",
    "checkpoint.load_step",
    "parallelism.data_parallel_shard_degree",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_microbatch_size",
    "fault_tolerance.process_group_timeout_ms",
    "fault_tolerance.replica_id",
    "fault_tolerance.group_size",
    "fault_tolerance.min_replica_size",
}


def fields(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full name and annotated type of every field."""
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            yield from fields(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f.type


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is one of a type, as Python's annotations mean it; an int will do for a float, a bool for neither."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        return type(value) is list and all(fits(v, item) for v in value)
    return type(value) in ((int, float) if kind is float else (kind,))


@pytest.fixture(scope="module")
def base(workspace: Path) -> JobConfig:
    return parse_config(arguments(workspace, workspace / "never_made"))


@pytest.fixture(scope="module")
def all_fields(base: JobConfig) -> dict[str, Any]:
    found = dict(fields(base))
    assert len(found) > 180 and {"growth.phase_steps", "training.dataloader.num_workers"} <= found.keys()
    return found


def changed(base: JobConfig, name: str, value: Any) -> JobConfig:
    job_config = copy.deepcopy(base)
    section, _, leaf = name.rpartition(".")
    setattr(operator.attrgetter(section)(job_config), leaf, value)
    return job_config


def toml_with(name: str, text: str) -> str:
    """A file that sets one field."""
    section, _, leaf = name.rpartition(".")
    job = '[job]\ncustom_config_module = "blockgrow_titan.job_config"\n'
    if section == "job":
        return f"[job]\n{leaf} = {text}\n" if leaf == "custom_config_module" else f"{job}{leaf} = {text}\n"
    return f"{job}[{section}]\n{leaf} = {text}\n"


def file_refusal(path: Path, name: str, text: str) -> str:
    path.write_text(toml_with(name, text))
    with pytest.raises(ValueError) as error:
        parse_config(["--job.config_file", str(path)])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", VALUES)
def test_another_type_in_a_file(all_fields: dict[str, Any], tmp_path: Path, kind: str) -> None:
    value, text = VALUES[kind]
    wrong = [name for name, annotation in all_fields.items() if not fits(value, annotation)]
    if isinstance(value, list) and value != [3]:  # what is in a list matters only where a list may stand
        wrong = [name for name in wrong if "list" in str(all_fields[name])]
    assert wrong
    for name in wrong:
        message = file_refusal(tmp_path / "config.toml", name, text)
        assert message.startswith(f"{name} is {value!r}") and "must be" in message, message


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-nan"])
def test_floats_that_are_no_numbers(all_fields: dict[str, Any], tmp_path: Path, text: str) -> None:
    floats = [name for name, annotation in all_fields.items() if fits(0.5, annotation)]
    assert {"distill.temperature", "optimizer.lr", "training.max_norm"} <= set(floats)
    for name in floats:
        if name not in MAY_BE_INFINITE or "nan" in text:
            assert re.match(rf"{name} is .*; it must be a finite number", file_refusal(tmp_path / "c.toml", name, text))


def test_numbers_of_more_than_64_bits(all_fields: dict[str, Any], tmp_path: Path) -> None:
    numbers = [name for name, annotation in all_fields.items() if fits(3, annotation)]
    for name in numbers:
        for text in (str(2**63), str(-(2**63) - 1)):
            assert f"{name} is {text}; a number must fit" in file_refusal(tmp_path / "c.toml", name, text)


def test_misspelt_fields(all_fields: dict[str, Any], tmp_path: Path) -> None:
    """A letter lost in the middle: the right name is suggested, unless another field has just that name."""
    for name in all_fields:
        section, _, leaf = name.rpartition(".")
        misspelt = f"{section}.{leaf[: len(leaf) // 2]}{leaf[len(leaf) // 2 + 1 :]}"
        if len(leaf) < 5 or misspelt in all_fields:
            continue
        message = file_refusal(tmp_path / "config.toml", misspelt, "3")
        assert message.startswith(f"the config has {misspelt}, but there is no such field"), message
        assert f"did you mean {name}?" in message, message


def test_every_number_has_its_range(base: JobConfig, all_fields: dict[str, Any]) -> None:
    """A negative one is refused wherever it would mean nothing."""
    for name, annotation in all_fields.items():
        if not fits(3, annotation) or name.endswith("_parallel_degree") or name in NEGATIVE:
            continue
        assert name in RANGES or name == "growth.start_phase", f"{name} needs a line in RANGES"
        with pytest.raises(ValueError, match=rf"^{name} is (-1|not a setting)"):
            check_config(changed(base, name, -1))


@pytest.mark.parametrize("value", [-2, -(2**63)])
def test_minus_one_is_the_only_negative_number(base: JobConfig, all_fields: dict[str, Any], value: int) -> None:
    for name in RANGES:
        with pytest.raises(ValueError, match=f"^{name} is {value}; it must be "):
            check_config(changed(base, name, value))


def test_ranges_are_of_fields_that_there_are(all_fields: dict[str, Any]) -> None:
    for name in RANGES:
        assert fits(3, all_fields[name]), name
    assert NEGATIVE <= all_fields.keys()


def wrong_argument(kind: Any) -> str | None:
    """A text that is no value of a type on the command line; any text is a string."""
    if fits("text", kind) or fits(["text"], kind) or kind == (list[list[str]] | None):
        return None
    return "maybe" if kind is bool else "2.5.5" if fits(2.5, kind) else "2.5"


def test_another_type_on_the_command_line(all_fields: dict[str, Any]) -> None:
    """Of our sections a field of every type, of torchtitan's all together one of every type."""
    chosen = {}
    for name, annotation in all_fields.items():
        section = name.partition(".")[0]
        kind = "Literal" if typing.get_origin(annotation) is Literal else str(annotation)
        if (text := wrong_argument(annotation)) is not None:
            chosen[section if section in PLUGIN_SECTIONS else "", kind] = (name, text)
    assert len(chosen) > 12
    for name, text in chosen.values():
        with pytest.raises(ValueError) as error:
            parse_config(["--job.custom_config_module", "blockgrow_titan.job_config", f"--{name}", text])
        message = str(error.value)
        assert "\n" not in message and text in message
        assert name in message.replace("-", "_") or all_fields[name] is bool, message  # a flag takes no value
