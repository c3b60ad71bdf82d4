"""Recipes: an experiment as a list of runs, and the tables and figures that it yields.

    recipes/NAME.toml           what is asked, the runs by name, variants of runs, what they yield, the seeds
    recipes/scales/SCALE.toml   what each run is at that scale: a config of train_configs/ and overrides of its fields

Overrides are written as sections of a config. ``recipe_runs.py`` makes jobs of both files.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
SCALES = "scales"
DEFAULT_SEED = 42  # the paper's

YIELDS = (
    "table1",
    "table2",
    "table3",
    "table4",
    "tableA2",
    "tableA3",
    "tableA4",
    "figure3a",
    "figure3b",
    "figure4",
    "figure5a",
    "figure5b",
    "figureA1",
    "figureA2",
)
"""The paper's tables and figures that a report can make."""


@dataclass(frozen=True)
class Variant:
    """A run of the recipe's own: another run with some fields changed."""

    of: str
    overrides: dict[str, Any] = field(default_factory=dict)
    scales: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further overrides by scale."""


@dataclass(frozen=True)
class Recipe:
    """One experiment."""

    name: str
    path: Path
    title: str
    question: str
    paper: str
    """Where the paper treats it."""
    runs: tuple[str, ...]
    yields: tuple[str, ...]
    """Of ``YIELDS``."""
    seeds: tuple[int, ...]
    variants: dict[str, Variant]


@dataclass(frozen=True)
class ScaleRun:
    """A run at a scale."""

    config: str
    """Its config file; a relative path is taken against the root of the repository."""
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """What the named runs are at one scale."""

    name: str
    path: Path
    description: str
    overrides: dict[str, Any]
    """Of every run."""
    runs: dict[str, ScaleRun]


def near(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f'did you mean "{close[0]}"?' if close else f"known: {', '.join(known) or 'none'}"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def _check_table(table: Any, known: Sequence[str], required: Sequence[str], where: str) -> None:
    if not isinstance(table, dict):
        raise ValueError(f"{where} is {table!r}; it must be a table with {', '.join(known)}")
    for name in table:
        if name not in known:
            raise ValueError(f'{where} has "{name}", which is no field of it; {near(name, known)}')
    if missing := [name for name in required if name not in table]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")


def _text(table: dict[str, Any], name: str, where: str) -> str:
    value = table.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{name} in {where} is {value!r}; it must be a text")
    return " ".join(value.split())


def _names(table: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = table[name]
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name} in {where} is {value!r}; it must be a list of names")
    if len(set(value)) < len(value):
        raise ValueError(f"{name} in {where} is {value!r}, which names something twice")
    return tuple(value)


def _table(table: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = table.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name} in {where} is {value!r}; it must be a table")
    return value


def _check_run_names(names: Iterable[str], where: str) -> None:
    for name in names:
        if not re.fullmatch(r"\w+", name, re.ASCII):
            raise ValueError(f'"{name}" in {where} cannot name a run: use letters, digits and underscores')


def check_seeds(seeds: Any, where: str) -> tuple[int, ...]:
    """Seeds, each once, in their order.

    Raises:
        ValueError: If there is none, or one that is no whole number from 0 on.
    """
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or not seeds:
        raise ValueError(f"{where} is {seeds!r}; it must be whole numbers from 0 on, such as 42,43")
    return tuple(dict.fromkeys(seeds))


def recipe_names() -> list[str]:
    """The recipes that are shipped."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def read_recipe(name: str) -> Recipe:
    """Read a recipe.

    Args:
        name: Path of its file, or the name of one that is shipped.

    Raises:
        ValueError: If there is no such recipe, or its file is not as it must be.
    """
    path = Path(name)
    if name in recipe_names():
        path = RECIPES / f"{name}.toml"
    elif not path.is_file():
        raise ValueError(f'there is no recipe "{name}"; give a file or one of {", ".join(recipe_names())}')
    where, values = str(path), _read_toml(path)
    known = ("title", "question", "paper", "runs", "yields", "seeds", "variants")
    _check_table(values, known, ("title", "question", "runs", "yields"), where)
    yields = _names(values, "yields", where)
    for item in yields:
        if item not in YIELDS:
            raise ValueError(f'yields in {where} has "{item}", which no report makes; {near(item, YIELDS)}')
    variants = {}
    for variant, table in _table(values, "variants", where).items():
        inside = f"variants.{variant} in {where}"
        _check_table(table, ("of", "overrides", "scales"), ("of",), inside)
        scales = _table(table, "scales", inside)
        variants[variant] = Variant(
            of=_text(table, "of", inside),
            overrides=_table(table, "overrides", inside),
            scales={scale: _table(scales, scale, f"scales of {inside}") for scale in scales},
        )
    _check_run_names(variants, f"variants of {where}")
    return Recipe(
        name=path.stem,
        path=path,
        title=_text(values, "title", where),
        question=_text(values, "question", where),
        paper=_text(values, "paper", where),
        runs=_names(values, "runs", where),
        yields=yields,
        seeds=check_seeds(values.get("seeds", [DEFAULT_SEED]), f"seeds in {where}"),
        variants=variants,
    )


def read_scale(name: str, recipe: Recipe) -> Scale:
    """Read a scale, from the folder ``scales`` beside the recipe if there is one, else from those that are shipped.

    Raises:
        ValueError: If there is no such scale, or its file is not as it must be.
    """
    folder = recipe.path.parent / SCALES
    folder = folder if folder.is_dir() else RECIPES / SCALES
    known = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in known:
        raise ValueError(f'there is no scale "{name}" in {folder}; {near(name, known)}')
    for variant, changed in recipe.variants.items():
        for scale in changed.scales:
            if scale not in known:
                raise ValueError(f'variants.{variant} in {recipe.path} has scale "{scale}"; {near(scale, known)}')
    path = folder / f"{name}.toml"
    where, values = str(path), _read_toml(path)
    _check_table(values, ("description", "overrides", "runs"), ("description", "runs"), where)
    runs = {}
    for run, table in _table(values, "runs", where).items():
        inside = f"runs.{run} in {where}"
        _check_table(table, ("config", "overrides"), ("config",), inside)
        runs[run] = ScaleRun(_text(table, "config", inside), _table(table, "overrides", inside))
    _check_run_names(runs, f"runs of {where}")
    return Scale(name, path, _text(values, "description", where), _table(values, "overrides", where), runs)
