"""The jobs of a recipe: one Run for every name and seed, with its command line, config and folder.

Of the overrides the later ones win: the scale's for all runs, the run's, the variant's, the variant's for the scale, then
the command line's. A run is identified by a digest of all that decides its trajectory (``trajectory_config`` of
``growth/manifest.py``, with the seed). Its folder carries the digest, so a run that several recipes list is trained once,
whatever they call it.
"""

import copy
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from blockgrow_titan.growth.manifest import trajectory_config
from blockgrow_titan.growth.schedule import GrowthSchedule, schedule_of
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.parse import GrowthConfigManager, check_types
from tools.recipes import ROOT, Recipe, Scale, near


@dataclass(frozen=True)
class Run:
    """One job of a recipe."""

    name: str
    scale: str
    seed: int
    arguments: tuple[str, ...]
    """The command line behind ``run_train.sh``."""
    job_config: JobConfig
    """What that command line parses to."""
    digest: str
    """Eight hexadecimal digits of what decides the trajectory."""
    folder: Path

    def __str__(self) -> str:
        return f"{self.name} (seed {self.seed})"

    @property
    def schedule(self) -> GrowthSchedule:
        return schedule_of(self.job_config)

    def active_layer_steps(self, last_step: int | None = None) -> int:
        """Sum over the steps up to ``last_step`` (all by default) of the layers that are active in each.

        Times the global batch, this stands for active-layer tokens before any token was counted: the documents of a
        scale have the same mean length in every run.
        """
        layers, schedule = self.job_config.block_stack.layers_per_block, self.schedule
        end = schedule.total_steps if last_step is None else last_step
        return sum(
            max(0, min(end, phase.last_step) - phase.first_step + 1) * phase.active_blocks * layers
            for phase in schedule.phases
        )


def _merge(into: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    for name, value in overrides.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = copy.deepcopy(value)


class _OverriddenConfig(GrowthConfigManager):
    """A config file whose fields some overrides replace, so that mistakes in those are told as those in a file."""

    def __init__(self, overrides: Mapping[str, Any]) -> None:
        super().__init__()
        self.overrides = overrides

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
        values = super()._maybe_load_toml(args)
        assert values is not None  # the file is always given
        for name, value in self.overrides.items():
            if not isinstance(value, dict):
                raise ValueError(f"the overrides have {name} = {value!r}; it must be a section, such as training.steps")
        _merge(values, self.overrides)
        return values


def options(overrides: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Overrides as options of the command line: ``{"growth": {"phase_steps": [2, 3]}}`` -> --growth.phase_steps 2 3."""
    result = []
    for name, value in overrides.items():
        if isinstance(value, dict):
            result += options(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            result.append(f"--{prefix}{name}" if value else f"--{prefix}no-{name}")
        elif isinstance(value, list):
            result += [f"--{prefix}{name}", *map(str, value)]
        elif str(value).startswith("-"):
            result.append(f"--{prefix}{name}={value}")
        else:
            result += [f"--{prefix}{name}", str(value)]
    return result


def trajectory_digest(job_config: JobConfig) -> str:
    """Eight hexadecimal digits that two configs share if and only if they train the same, step by step."""
    values = {name: float(v) if type(v) is int else v for name, v in trajectory_config(job_config).items()}  # 1 is 1.0
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def _overrides(name: str, recipe: Recipe, scale: Scale) -> tuple[str, dict[str, Any]]:
    """The config file of a run and all its overrides."""
    variant = recipe.variants.get(name)
    base = variant.of if variant else name
    if base not in scale.runs:
        known = [*scale.runs] if variant else [*recipe.variants, *scale.runs]
        what = f'variant "{name}" is of "{base}"' if variant else f'runs has "{name}"'
        raise ValueError(f"in {recipe.path} {what}, which {scale.path} does not have; {near(base, known)}")
    run = scale.runs[base]
    overrides: dict[str, Any] = {}
    for part in (
        scale.overrides,
        run.overrides,
        *((variant.overrides, variant.scales.get(scale.name, {})) if variant else ()),
    ):
        _merge(overrides, part)
    return run.config, overrides


def select(recipe: Recipe, only: Sequence[str]) -> list[str]:
    """The recipe's runs, or those of them that are named.

    Raises:
        ValueError: For a name that the recipe does not list.
    """
    for name in only:
        if name not in recipe.runs:
            raise ValueError(f'recipe {recipe.name} has no run "{name}"; {near(name, recipe.runs)}')
    return [name for name in recipe.runs if not only or name in only]


def build_runs(
    recipe: Recipe,
    scale: Scale,
    seeds: Sequence[int],
    out: Path,
    only: Sequence[str] = (),
    further: Sequence[str] = (),
) -> list[Run]:
    """The jobs of a recipe, one seed after the other; of two that train the same, the first.

    Args:
        recipe: What is asked.
        scale: What its runs are.
        seeds: Every run is repeated with each of them.
        out: A run's folder is ``<out>/<scale>/<run>-s<seed>-<digest>``, or one there with that seed and digest.
        only: Take these runs alone.
        further: Options of the command line for every run; they win.

    Raises:
        ValueError: For an unknown run, or a config that cannot be parsed, naming the run. tyro itself exits on bad
            ``further``.
    """
    parsed = {}
    for name in select(recipe, only):
        config, overrides = _overrides(name, recipe, scale)
        path = ROOT / config
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        arguments = ["--job.config_file", str(shown), *options(overrides), *further]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # tyro's, about types that check_types refuses
                job_config = _OverriddenConfig(overrides).parse_args(["--job.config_file", str(path), *further])
            check_types(job_config)
        except ValueError as error:
            raise ValueError(f"run {name} at scale {scale.name}: {error}") from None
        if job_config.training.global_batch_size == -1:
            raise ValueError(
                f"run {name} at scale {scale.name}: training.global_batch_size is -1, so what it trains would depend on the "
                "ranks; give a number of documents"
            )
        parsed[name] = arguments, cast(JobConfig, job_config)
    runs: dict[str, Run] = {}
    for seed in seeds:
        for name, (arguments, job_config) in parsed.items():
            job_config = copy.deepcopy(job_config)
            job_config.debug.seed = seed
            digest = trajectory_digest(job_config)
            if digest in runs:
                continue
            existing = sorted((out / scale.name).glob(f"*-s{seed}-{digest}"))
            folder = existing[0] if existing else out / scale.name / f"{name}-s{seed}-{digest}"
            job_config.job.dump_folder = str(folder)
            full = (*arguments, "--debug.seed", str(seed), "--job.dump_folder", str(folder))
            runs[digest] = Run(name, scale.name, seed, full, job_config, digest, folder)
    return list(runs.values())
