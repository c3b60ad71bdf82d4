"""Which run is which, by its manifest alone, and whether runs may stand in one table.

- ``grow``: ``growth.active_blocks`` rises in every phase up to ``block_stack.num_blocks``; ``freeze``: the same with
  ``growth.freeze = "completed_blocks"``; ``jointN``: all blocks active in N phases. Phases must be of equal length, and
  those of joint runs as long as those of growing ones. Anything else is listed as another run, and why.
- Policies at a phase change that are not the paper's, and another training shard than the other runs of the kind have,
  make a variant, which stays out of the tables that compare placements.
- Runs that differ in anything else (teacher, learning rate, sequence length, documents ...) are refused.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from blockgrow_titan.metrics import plural
from blockgrow_titan.report.reading import Run, schedule_of_config
from blockgrow_titan.report.table import Stat, stat

PLACEMENTS = ("pre", "post")
MAY_DIFFER = (
    "block_stack.placement",
    "growth.phase_steps",
    "growth.active_blocks",
    "growth.freeze",
    "growth.train_boundary",
    "growth.optimizer_at_growth",
    "growth.lr_at_growth",
    "growth.data_at_growth",
    "documents.shard_documents",
    "training.steps",
    "debug.seed",
)
RECIPES = {
    "grow": ("interaction", "grow_{}"),
    "freeze": ("freeze", "freeze_{}"),
    "joint1": ("interaction", "joint_{}"),
    "joint2": ("joint_budget", "joint_{}_100k"),
    "joint3": ("joint_budget", "joint_{}_150k"),
}
"""The recipe that has the runs of a kind, and their names; the longer joint ones only post-norm."""
VARIANT_RECIPES = {
    "optimizer kept": ("optimizer_and_lr", "grow_{}_keep_restart"),
    "LR continued": ("optimizer_and_lr", "grow_{}_reset_continue"),
    "optimizer kept, LR continued": ("optimizer_and_lr", "grow_{}_keep_continue"),
    "data rewound": ("data_rewind", "grow_{}_rewind"),
    "": ("data_rewind", "grow_{}_continue"),
}
"""The same of growing runs that are variants, without their shard: those with another one are of ``data_rewind``."""


class Key(NamedTuple):
    """Runs that differ in their seed alone."""

    kind: str
    placement: str
    variant: str = ""

    @property
    def words(self) -> str:
        return f"{self.placement}-norm {self.training}"

    @property
    def training(self) -> str:
        """Without the placement."""
        return kind_words(self.kind) + (f" ({self.variant})" if self.variant else "")


def kind_words(kind: str) -> str:
    """``joint2`` -> joint, 2 phases' steps."""
    if not kind.startswith("joint") or kind == "joint1":
        return kind.rstrip("1")
    return f"joint, {kind[5:]} phases"


@dataclass(frozen=True)
class Experiment:
    """All runs of a report."""

    groups: dict[Key, dict[int, Run]]
    """By key, then by seed."""
    others: list[tuple[Run, str]]
    """Whole runs that have no place in the tables, and why."""
    unusable: list[Run]
    phase_steps: int
    """Steps of a phase."""
    curriculum: tuple[int, ...]
    """Active blocks of each phase of the growing runs; empty without one."""
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        """Every run that is in a table or a figure."""
        return [run for runs in self.groups.values() for run in runs.values()]

    @property
    def any(self) -> Run:
        return self.runs[0]

    @property
    def blocks(self) -> int:
        return self.any.config["block_stack.num_blocks"]

    @property
    def layers_per_block(self) -> int:
        return self.any.config["block_stack.layers_per_block"]

    @property
    def seeds(self) -> list[int]:
        """Of the runs in the tables, and of those that would be if they were whole."""
        whole = [run for key, runs in self.groups.items() if not key.variant for run in runs.values()] or self.runs
        return sorted({run.seed for run in whole} | {run.seed for run in self.unusable if run.manifest})

    def over_seeds(self, value: Callable[..., float | None], *keys: Key) -> Stat | None:
        """A value of one run of each key, over the seeds that all keys have."""
        groups = [self.groups.get(key, {}) for key in keys]
        seeds = sorted(set.intersection(*({*group} for group in groups)))
        return stat({seed: value(*(group[seed] for group in groups)) for seed in seeds})

    def ce(self, kind: str, placement: str, variant: str = "") -> Stat | None:
        """Validation cross-entropy at the scheduled endpoint."""
        return self.over_seeds(final_ce, Key(kind, placement, variant))

    def delta(self, kind: str) -> Stat | None:
        """Delta_c = CE(post, c) - CE(pre, c) (paper, Eq. 6)."""
        return self.over_seeds(lambda pre, post: final_ce(post) - final_ce(pre), Key(kind, "pre"), Key(kind, "post"))

    def interaction(self) -> Stat | None:
        """I = Delta_grow - Delta_joint (paper, Eq. 6)."""
        keys = [Key(kind, placement) for kind in ("grow", "joint1") for placement in PLACEMENTS]
        return self.over_seeds(lambda a, b, c, d: final_ce(b) - final_ce(a) - (final_ce(d) - final_ce(c)), *keys)

    def missing(self, needs: Iterable[tuple[str, ...]]) -> list[str]:
        """A line for each of these keys (kind, placement, variant if any) that lacks a seed, with the command that runs it."""
        lines = []
        for key in (Key(*need) for need in needs):
            if self.blocks == 1 and _grows(key.kind):
                continue  # nothing can grow
            if seeds := [seed for seed in self.seeds if seed not in self.groups.get(key, {})]:
                which = f"{key.words}, {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
                lines.append(f"{which}: {self._command(key, seeds)}")
        return lines

    def _recipe(self, key: Key) -> tuple[str, str] | None:
        """The recipe that has the runs of a key, and their name in it."""
        kind, placement, variant = key
        # rewound on what is here the usual shard: it is that of the recipe
        rewound = kind == "grow" and any(other.variant == "data rewound" for other in self.groups)
        if variant or rewound:
            policies = variant.partition("shard of")[0].removesuffix(", ")
            return VARIANT_RECIPES.get(policies) if kind == "grow" else None
        if kind in ("joint2", "joint3") and placement != "post":
            return None
        return RECIPES.get(kind)

    def _command(self, key: Key, seeds: Sequence[int]) -> str:
        if (found := self._recipe(key)) is None:
            return "no recipe has it"
        recipe, name = found
        known = {run.scale for run in self.runs if run.scale}
        flavor = self.any.config["model.flavor"]
        scale = known.pop() if len(known) == 1 else {"tiny": "tiny", "8B": "qwen3_8b"}.get(flavor, "SCALE")
        return (
            f"tools/run_recipe.py {recipe} --scale {scale} --only {name.format(key.placement)} "
            f"--seeds {','.join(map(str, seeds))}"
        )


def final_ce(run: Run) -> float:
    return run.phases[-1]["ce"]


def make_experiment(runs: Sequence[Run]) -> Experiment:
    """Give every run its place.

    Raises:
        ValueError: If there is no whole run, two that train the same, or some that cannot be compared.
    """
    usable, unusable = [run for run in runs if not run.problem], [run for run in runs if run.problem]
    if not usable:
        why = "; ".join(f"{run.folder.name}: {run.problem}" for run in unusable[:3])
        raise ValueError(
            f"none of {plural(len(runs), 'run')} can be reported: {why}{'; ...' if len(unusable) > 3 else ''}"
        )
    check_comparable(usable)
    placed, others = [], []
    for run in usable:
        kind, why = kind_of(run.config)
        (placed.append((run, kind)) if kind else others.append((run, why)))
    unit = _phase_steps(placed)
    for run, _ in [(run, kind) for run, kind in placed if run.schedule.phases[0].steps != unit]:
        steps = run.schedule.phases[0].steps
        others.append((run, f"its phases have {steps:,} steps, those of the growing runs {unit:,}"))
    placed = [(run, kind) for run, kind in placed if run.schedule.phases[0].steps == unit]
    if not placed:
        raise ValueError(f"no run is of a kind that a table has: {others[0][0].folder.name}: {others[0][1]}")
    curricula = {tuple(p.active_blocks for p in run.schedule.phases): run for run, kind in placed if _grows(kind)}
    if len(curricula) > 1:
        _refuse("growth.active_blocks", {str([*blocks]): run for blocks, run in curricula.items()})
    usual = _usual_shards(placed, unit)
    groups: dict[Key, dict[int, Run]] = {}
    for run, kind in placed:
        key = Key(kind, run.placement, variant_of(run, kind, usual[_family(kind)]))
        group = groups.setdefault(key, {})
        if run.seed in group:
            a, b = group[run.seed].folder, run.folder
            raise ValueError(f"{a} and {b} are both {key.words} with seed {run.seed}: give one of them")
        group[run.seed] = run
    ordered = {key: dict(sorted(groups[key].items())) for key in sorted(groups, key=_order)}
    return Experiment(ordered, others, unusable, unit, next(iter(curricula), ()), _notes(placed, usual, unit))


def kind_of(config: dict[str, Any]) -> tuple[str, str]:
    """The kind of a run, or an empty text and why it has none."""
    phases = schedule_of_config(config).phases
    active, blocks = [phase.active_blocks for phase in phases], config["block_stack.num_blocks"]
    if config["block_stack.placement"] not in PLACEMENTS:
        return "", f'its placement is "{config["block_stack.placement"]}", the tables have {" and ".join(PLACEMENTS)}'
    if len({phase.steps for phase in phases}) > 1:
        return "", f"its phases are not of equal length: {[phase.steps for phase in phases]}"
    if all(count == blocks for count in active):
        return f"joint{len(active)}", ""
    if active[-1] == blocks and all(a < b for a, b in pairwise(active)):
        return ("grow" if config["growth.freeze"] == "none" else "freeze"), ""
    return "", f"its active blocks are {active} of {blocks}: neither all in every phase nor rising to all"


def variant_of(run: Run, kind: str, usual_shard: int) -> str:
    """What sets a run apart from the paper's of its kind; empty for nothing."""
    config, parts = run.config, []
    if len(run.schedule.phases) > 1:
        if config["growth.optimizer_at_growth"] == "keep":
            parts.append("optimizer kept")
        if config["growth.lr_at_growth"] == "continue":
            parts.append("LR continued")
        if config["growth.data_at_growth"] == "rewind":
            parts.append("data rewound")
    if kind == "freeze" and not config["growth.train_boundary"]:
        parts.append("boundary frozen")
    if run.shard != usual_shard:
        parts.append(f"shard of {run.shard:,}")
    return ", ".join(parts)


def check_comparable(runs: Sequence[Run]) -> None:
    """Refuse runs that differ in more than placement, phases, policies, shard and seed.

    Raises:
        ValueError: Naming the field, two values and two runs.
    """
    names = sorted({name for run in runs for name in run.config} - {*MAY_DIFFER})
    for name in names:
        values = {}
        for run in reversed(runs):
            value = run.config.get(name)
            values[repr(float(value) if type(value) is int else value)] = run  # 1 is 1.0
        if len(values) > 1:
            _refuse(name, {str(run.config.get(name)): run for run in values.values()})
    for name in ("validation", "training"):
        sets: dict[Any, dict[str, Run]] = {}
        for run in runs:
            identity = run.manifest["data"].get(name) or {"documents": 0, "digest": "none"}
            size = (
                identity["documents"] if name == "training" else 0
            )  # shards of one size must be of the same documents
            sets.setdefault(size, {}).setdefault(f"{identity['documents']} documents {identity['digest'][:16]}", run)
        for values in sets.values():
            if len(values) > 1:
                _refuse(f"the {name} set", values)
    dimensions = {str(sorted(run.manifest["model"].items())): run for run in runs}
    if len(dimensions) > 1:
        _refuse("the model's dimensions", dimensions)


def _refuse(name: str, values: dict[str, Run]) -> None:
    (a, run_a), (b, run_b) = sorted(values.items(), key=lambda item: str(item[1].folder))[:2]
    raise ValueError(
        f"mixed runs: {name} is {a} in {run_a.folder} and {b} in {run_b.folder}; a report compares runs that differ in "
        "placement, phases, freezing, policies at a phase change, shard and seed alone: give them apart"
    )


def _grows(kind: str) -> bool:
    return not kind.startswith("joint")


def _family(kind: str) -> str:
    return "growing" if _grows(kind) else kind


def _order(key: Key) -> tuple:
    kinds = ("joint1", "grow", "freeze")
    return (
        kinds.index(key.kind) if key.kind in kinds else len(kinds),
        key.kind,
        PLACEMENTS.index(key.placement),
        key.variant,
    )


def _phase_steps(placed: Sequence[tuple[Run, str]]) -> int:
    growing = [run for run, kind in placed if _grows(kind)]
    units = {str(run.schedule.phases[0].steps): run for run in growing or [run for run, _ in placed]}
    if len(units) > 1:
        _refuse("the length of a phase (growth.phase_steps)", units)
    return int(next(iter(units), "0"))


def _usual_shards(placed: Sequence[tuple[Run, str]], unit: int) -> dict[str, int]:
    """The training shard of the runs of a family: of one phase's documents for growing runs, of all steps' for joint ones."""
    usual = {}
    for family in dict.fromkeys(_family(kind) for _, kind in placed):
        runs = [run for run, kind in placed if _family(kind) == family]
        phases = 1 if family == "growing" else len(runs[0].schedule.phases)
        shards = {run.shard: run for run in runs}
        papers = phases * unit * runs[0].config["training.global_batch_size"]
        if papers not in shards and len(shards) > 1:
            _refuse("the training shard", {f"{shard:,} documents": run for shard, run in shards.items()})
        usual[family] = papers if papers in shards else next(iter(shards))
    return usual


def _notes(placed: Sequence[tuple[Run, str]], usual: dict[str, int], unit: int) -> list[str]:
    """Where the documents are not dealt as in the paper."""
    batch = placed[0][0].config["training.global_batch_size"]
    notes = ["A student of one block cannot grow."] if placed[0][0].config["block_stack.num_blocks"] == 1 else []
    if (shard := usual.get("growing")) and shard != unit * batch:
        notes.append(
            f"The growing runs train on a shard of {shard:,} documents, and a phase takes {unit * batch:,}: the phases do not "
            "see the same documents in the same order, as the paper's do."
        )
    for family, shard in usual.items():
        phases = int(family[5:]) if family.startswith("joint") else 0
        if phases * unit * batch > shard:
            words = kind_words(family)
            notes.append(
                f"The {words} runs repeat documents: their shard has {shard:,}, their steps take {phases * unit * batch:,}."
            )
    return notes
