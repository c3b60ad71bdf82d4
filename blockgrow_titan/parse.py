"""Reading a job's config: TOML and command line into one merged JobConfig, with one-line errors.

torchtitan's ConfigManager does the merging; its tracebacks become a ``ValueError`` that says what to change. TOML hands
any type through, so the types of all fields are checked here too.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import os
import re
import tomllib
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from torchtitan.config import ConfigManager

from blockgrow_titan.job_config import JobConfig

CONFIG_MODULE = '"blockgrow_titan.job_config"'
PLUGIN_SECTIONS = ("block_stack", "growth", "distill", "teacher", "documents", "diagnostics")


class GrowthConfigManager(ConfigManager):
    """torchtitan's ConfigManager with one-line errors: a misspelt field is answered with the nearest name."""

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
        path = _option(args, "job.config_file")
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                return tomllib.load(file)
        except OSError as error:
            raise ValueError(
                f'job.config_file is "{path}", which cannot be read ({error.strerror}; current folder: {os.getcwd()})'
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f'job.config_file is "{path}", which is not valid TOML: {error}') from None

    def _maybe_add_custom_config(self, args: list[str], toml_values: dict[str, Any] | None) -> Any:
        try:
            return super()._maybe_add_custom_config(args, toml_values)
        except ImportError as error:
            raise ValueError(
                f"job.custom_config_module cannot be imported ({error}); set it to {CONFIG_MODULE}, or to a module of "
                "yours that extends it"
            ) from None

    def _dict_to_dataclass(self, cls: Any, data: dict[str, Any]) -> Any:
        if not dataclasses.is_dataclass(cls):
            return data
        types_of = {f.name: f.type for f in dataclasses.fields(cls)}
        names = list(types_of)
        for name, value in data.items():
            if dataclasses.is_dataclass(types_of.get(name)) and not isinstance(value, dict):
                raise ValueError(f"the config has {name} = {value!r}; it must be a section, [{name}]")
            if name not in names:
                section = getattr(cls, "__name__", "").removeprefix("Merged")
                near = difflib.get_close_matches(name, names, n=1)
                hint = f'did you mean "{near[0]}"?' if near else f"known: {', '.join(names)}"
                if name in PLUGIN_SECTIONS:
                    hint = f"it is this plugin's: set job.custom_config_module = {CONFIG_MODULE}"
                raise ValueError(f'the config has "{name}" in {section}, which has no such field; {hint}')
        return super()._dict_to_dataclass(cls, data)

    def _validate_config(self) -> None:
        """torchtitan only warns about a missing tokenizer here; ``check_config`` refuses it."""


def _option(args: list[str], name: str) -> str | None:
    """The value of ``--name value`` or ``--name=value`` on the command line, with underscores or hyphens."""
    spellings = {f"--{name}", f"--{name.replace('_', '-')}"}
    for arg, following in itertools.zip_longest(args, args[1:]):
        option, equals, value = arg.partition("=")
        if option in spellings:
            return value if equals else following
    return None


def parse_config(args: Sequence[str]) -> JobConfig:
    """Parse the command line (and the TOML that ``--job.config_file`` names) into the merged JobConfig.

    Raises:
        ValueError: If the file cannot be read, a section has an unknown field, or an argument is wrong: one line, where
            tyro would print a box and exit. It does exit, with status 0, after ``--help``.
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return typing.cast(JobConfig, GrowthConfigManager().parse_args(list(args)))
    except SystemExit as exit_:
        if not exit_.code:
            raise
        raise ValueError(_one_line(box.getvalue())) from None


def _one_line(box: str) -> str:
    """What tyro's box says is wrong, without the box (of dashes where the console has no line glyphs), and what it advises."""
    lines = [re.sub(r"^-{4,}$", "", line.strip("│╭╮╰╯─ ")) for line in box.splitlines()]
    text, _, rest = "\n".join(lines[1:]).strip().partition("\n\n")
    near = re.search(r"Perhaps you meant:\n(--\S+)", rest)
    text = " ".join(text.split()) or "wrong arguments; see --help"
    return f"{text}; did you mean {near[1]}?" if near else text


def _matches(value: Any, kind: Any) -> bool:
    """Whether a value has an annotated type; TOML hands any type through."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, argument) for argument in arguments)
    if origin is list:
        return isinstance(value, list) and all(_matches(item, arguments[0]) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else True


def check_types(section: Any, prefix: str = "") -> None:
    """Check that every field of a config, section by section, has its annotated type.

    Raises:
        ValueError: Naming the field, its value and the type that it must have; or that the plugin's sections are absent.
    """
    if not prefix and not hasattr(section, "growth"):
        raise ValueError(f"the config lacks this plugin's sections: set job.custom_config_module = {CONFIG_MODULE}")
    for f in dataclasses.fields(section):
        value, name = getattr(section, f.name), f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            check_types(value, f"{name}.")
        elif not isinstance(f.type, str) and not _matches(value, f.type):
            wanted = getattr(f.type, "__name__", None) if not typing.get_args(f.type) else str(f.type)
            raise ValueError(f"{name} is {value!r}, a {type(value).__name__}; it must be {wanted}")
