"""A config that passes, copies of it that should not, and how these are refused."""

import copy
from pathlib import Path
from typing import Any

import pytest

from blockgrow_titan.checks import check_config
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.parse import parse_config
from tests.unit_tests.jobs import arguments


def base_config(workspace: Path) -> JobConfig:
    """A config that passes; never change it."""
    job_config = parse_config(arguments(workspace, workspace / "never_made"))
    check_config(job_config)
    return job_config


def changed(base: JobConfig, **changes: Any) -> JobConfig:
    """A copy with other values, given as ``section__field``, as TOML would hand them through."""
    job_config = copy.deepcopy(base)
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        target: Any = job_config
        for part in section.split("__"):
            target = getattr(target, part)
        assert hasattr(target, field), name
        setattr(target, field, value)
    return job_config


def refusal(job_config: JobConfig, kind: type[Exception] = ValueError) -> str:
    """The one-line text with which a config is refused."""
    with pytest.raises(kind) as error:
        check_config(job_config)
    assert type(error.value) is kind, error.value
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_names(text: str, *words: str) -> None:
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"
