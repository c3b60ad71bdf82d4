"""Reading a job's config: TOML and command line into one merged JobConfig, with one-line errors.

torchtitan's ConfigManager does the merging; its tracebacks become a ``ValueError`` that says what to change. TOML hands
any type through, so the types of all fields are checked here too.
"""

import codecs
import contextlib
import dataclasses
import difflib
import importlib
import io
import itertools
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torchtitan.config import ConfigManager

from blockgrow_titan.job_config import JobConfig

CONFIG_MODULE = '"blockgrow_titan.job_config"'
PLUGIN_SECTIONS = ("block_stack", "growth", "distill", "teacher", "documents", "diagnostics")
MAY_BE_INFINITE = ("training.max_norm",)  # gradients are then never clipped
_MAX_SHOWN = 100  # letters of a value or of a line of a file


class GrowthConfigManager(ConfigManager):
    """torchtitan's ConfigManager with one-line errors: a misspelt field is answered with the nearest name."""

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
        path = _option(args, "job.config_file")
        return None if path is None else read_toml(path)

    def _maybe_add_custom_config(self, args: list[str], toml_values: dict[str, Any] | None) -> Any:
        job = (toml_values or {}).get("job")
        module = _option(args, "job.custom_config_module")
        if module is None and isinstance(job, dict):
            module = job.get("custom_config_module")
        if not module or not isinstance(module, str):  # another type is refused with its field's name
            return self.config_cls
        try:
            return self._merge_configs(self.config_cls, importlib.import_module(module).JobConfig)
        except Exception as error:  # a module of the user's may raise anything
            raise ValueError(
                f'job.custom_config_module is "{module}", of which no JobConfig comes ({type(error).__name__}: '
                f"{' '.join(str(error).split())}); set it to {CONFIG_MODULE}, or to a module of yours that extends it"
            ) from error

    def _dict_to_dataclass(self, cls: Any, data: dict[str, Any], prefix: str = "") -> Any:
        """A section of the file, ``prefix`` its name and a dot, as its dataclass; names and types are checked."""
        if not prefix:
            self._fields = dict(_fields(cls))
        kinds = {f.name: f.type for f in dataclasses.fields(cls)}
        values = {}
        for name, value in data.items():
            field = f"{prefix}{name}"
            if name not in kinds:
                raise ValueError(self._unknown(field, list(kinds)))
            if not dataclasses.is_dataclass(kinds[name]):
                check_type(field, value, kinds[name])
                values[name] = _as_float(value, kinds[name])
            elif isinstance(value, dict):
                values[name] = self._dict_to_dataclass(kinds[name], value, f"{field}.")
            else:
                raise ValueError(f"the config has {field} = {_shown(value)}; it must be a section, [{field}]")
        return _construct(cls, values, prefix)

    def _unknown(self, field: str, names: list[str]) -> str:
        """What to say of a field that its section does not have, with the likeliest name of one that there is."""
        section, _, name = field.rpartition(".")
        near = difflib.get_close_matches(name, names, n=1)
        homes = [known for known in self._fields if known.rpartition(".")[2] == name]
        if section == "" and name in PLUGIN_SECTIONS:
            hint = f"it is this plugin's: set job.custom_config_module = {CONFIG_MODULE}"
        elif 0 < len(homes) <= 3:
            hint = f"did you mean {' or '.join(homes)}?"
        elif near:
            hint = f"did you mean {f'{section}.' if section else ''}{near[0]}?"
        else:
            hint = f"known: {', '.join(names)}"
        return f"the config has {field}, but there is no such {'field' if section else 'section'}; {hint}"

    def _validate_config(self) -> None:
        """torchtitan only warns about a missing tokenizer here; ``check_config`` refuses it."""


def read_toml(path: str) -> dict[str, Any]:
    """Read a config file: TOML in UTF-8, with or without a byte order mark, lines ended by LF or CRLF.

    Raises:
        ValueError: In one line with the file and, where there is one, the line that is wrong.
    """
    subject = f'job.config_file is "{path}"'
    try:
        with open(path, "rb") as file:
            content = file.read().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ValueError(f"{subject}, which cannot be read ({error.strerror}; current folder: {os.getcwd()})") from None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{subject}, which is not UTF-8 ({error.reason} in line {line}): save it as UTF-8") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        lines = text.split("\n")
        line_text = f", {_shown(lines[int(place[1]) - 1].strip())}" if place else ""
        twice = any(words in str(error) for words in ("Cannot overwrite", "twice"))
        hint = "; it is in the file twice: remove one" if twice else ""
        raise ValueError(f"{subject}, which is not valid TOML: {error}{line_text}{hint}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, arrays too deep
        raise ValueError(f"{subject}, which is not valid TOML: {error}") from None


def _as_float(value: Any, kind: Any) -> Any:
    """A whole number as a float where that is the field's type: torch does not take every number for another."""
    options = typing.get_args(kind) or (kind,)
    return float(value) if type(value) is int and float in options and int not in options else value


def _construct(cls: Any, values: dict[str, Any], prefix: str) -> Any:
    """A section from its values; torchtitan's own checks of a section name no field."""
    try:
        return cls(**values)
    except (AssertionError, ValueError) as error:
        for name, value in values.items():
            try:
                cls(**{name: value})
            except (AssertionError, ValueError):
                raise ValueError(f"{prefix}{name} is {_shown(value)}: {error}") from None
        raise ValueError(f"[{prefix.rstrip('.')}] is refused: {error}") from None


def _fields(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The full name and annotated type of every field of a config's class, sections' own included."""
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(f.type):
            yield from _fields(f.type, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f.type


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
    except AssertionError as error:  # torchtitan's own checks of a section
        raise ValueError(f"the command line does not fit the config: {error}") from None


def _one_line(box: str) -> str:
    """What tyro's box says is wrong, without the box (of dashes where the console has no line glyphs), and what it advises."""
    lines = [re.sub(r"^-{4,}$", "", line.strip("│╭╮╰╯─ ")) for line in box.splitlines()]
    text, _, rest = "\n".join(lines[1:]).strip().partition("\n\n")
    near = re.search(r"Perhaps you meant:\n(--\S+)", rest)
    text = " ".join(text.split()) or "wrong arguments; see --help"
    return f"{text}; did you mean {near[1]}?" if near else text


def _shown(value: Any) -> str:
    """A value in an error's text."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


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


def check_type(name: str, value: Any, kind: Any) -> None:
    """Check that a field's value has its annotated type, and that its numbers are finite and of 64 bits, its texts without NUL.

    Raises:
        ValueError: Naming the field, its value and what it must be.
    """
    if isinstance(kind, str):  # a module of the user's with postponed annotations
        return
    if not _matches(value, kind):
        if typing.get_origin(kind) is Literal:
            wanted = f"one of {', '.join(map(str, typing.get_args(kind)))}"
        else:
            wanted = str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind))
        raise ValueError(f"{name} is {_shown(value)}, a {type(value).__name__}; it must be {wanted}")
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise ValueError(f"{name} is {_shown(value)}; a number must fit into 64 bits")
        if isinstance(item, float) and not math.isfinite(item) and (math.isnan(item) or name not in MAY_BE_INFINITE):
            raise ValueError(f"{name} is {_shown(value)}; it must be a finite number")
        if isinstance(item, str) and "\0" in item:
            raise ValueError(f"{name} is {_shown(value)}; a text must not have the character NUL")


def check_types(section: Any, prefix: str = "") -> None:
    """Check that every field of a config, section by section, has its annotated type.

    Raises:
        ValueError: Naming the field, its value and the type that it must have; or that the plugin's sections are absent.
    """
    if not prefix and not hasattr(section, "growth"):
        file = f" in {section.job.config_file}" if section.job.config_file else ""
        raise ValueError(
            f"the config{file} lacks this plugin's sections: set job.custom_config_module = {CONFIG_MODULE}"
        )
    for f in dataclasses.fields(section):
        value, name = getattr(section, f.name), f"{prefix}{f.name}"
        if dataclasses.is_dataclass(value):
            check_types(value, f"{name}.")
        else:
            check_type(name, value, f.type)
