"""Tables 4 and A4: block removal and transitions."""

from typing import Any

from blockgrow_titan.diagnostics.transitions import Transition, transitions, windows_of
from blockgrow_titan.report import paper
from blockgrow_titan.report.experiment import PLACEMENTS, Experiment, Key
from blockgrow_titan.report.reading import Run
from blockgrow_titan.report.table import Column, Stat, Table, seeds_words, stat

COMPARED = tuple(Key(kind, placement) for kind in ("grow", "joint1") for placement in PLACEMENTS)
"""The runs whose blocks the paper removes."""


def removal(experiment: Experiment, key: Key, block: int, name: str) -> Stat | None:
    """``delta_ce`` or ``angular_distance`` of a block at the last step, over the seeds that have diagnostics."""
    key = with_records(experiment, key)
    return experiment.over_seeds(lambda run: last_record(run)["removal"][block][name], key)


def with_records(experiment: Experiment, key: Key) -> Key:
    """The key itself, if all its runs have diagnostics; else one that has no run."""
    runs = experiment.groups.get(key, {})
    return key if all(run.records for run in runs.values()) else Key(key.kind, key.placement, "without diagnostics")


def last_record(run: Run) -> dict[str, Any]:
    """The diagnostics at the last step."""
    return run.record_at(len(run.schedule.phases) - 1)


def undiagnosed(experiment: Experiment, keys: tuple[Key, ...]) -> list[str]:
    """A line for each run that is there, but without diagnostics."""
    lines = []
    for key in keys:
        for seed, run in experiment.groups.get(key, {}).items():
            if not run.records:
                lines.append(f"{key.words}, seed {seed}: {run.no_records}")
    return lines


def table4(experiment: Experiment) -> Table:
    """Whole-block removal at the last step (paper, Table 4)."""
    columns = (
        Column("run", "run"),
        Column("block", "block", "d"),
        Column("delta_ce", "ΔCE without it", "+.4f", paper=True),
        Column("angular_distance", "angular distance", ".4f", paper=True),
    )
    rows = []
    for key in COMPARED:
        published = paper.REMOVAL[key[:2]] if experiment.blocks == paper.BLOCKS else ()
        for block in range(experiment.blocks):
            ce, angle = published[block] if published else (None, None)
            rows.append(
                {
                    "run": key.words,
                    "block": block,
                    "delta_ce": removal(experiment, key, block, "delta_ce"),
                    "delta_ce_paper": ce,
                    "angular_distance": removal(experiment, key, block, "angular_distance"),
                    "angular_distance_paper": angle,
                }
            )
    notes = [
        "ΔCE: cross-entropy with the block bypassed, its norms too, minus that of the whole model. Angular distance: arccos of "
        "the cosine of a block's input and output over π, per token, averaged.",
        *batch_notes(experiment),
        *group_seeds(experiment, COMPARED),
    ]
    if experiment.blocks != paper.BLOCKS:
        notes.append(f"The paper's models have {paper.BLOCKS} blocks, so its values do not stand beside these.")
    missing = [*experiment.missing([key[:2] for key in COMPARED]), *undiagnosed(experiment, COMPARED)]
    return Table("table4", "Table 4. Whole-block removal at the last step", columns, rows, notes, missing)


def batch_notes(experiment: Experiment) -> list[str]:
    """What the diagnostics were taken on."""
    batches = {
        f"{record['tokens']:,} tokens of {record['documents']} held-out documents"
        for run in experiment.runs
        for record in run.records[:1]
    }
    text = "; ".join(sorted(batches))
    return [f"On a fixed batch of {text}; the paper: 2 x 2048 tokens."] if batches else []


def group_seeds(experiment: Experiment, keys: tuple[Key, ...]) -> list[str]:
    """Which seeds each of these keys has, in as few words as possible."""
    seeds = {key: tuple(experiment.groups[key]) for key in keys if key in experiment.groups}
    if len({*seeds.values()}) == 1:
        return [f"Here: {seeds_words(next(iter(seeds.values())))}. The paper: one seed."]
    return [f"{key.words}: {seeds_words(value)}." for key, value in seeds.items()]


def tableA4(experiment: Experiment) -> Table:
    """The training loss around each phase change of the growing runs (paper, Table A4)."""
    windows = windows_of(experiment.phase_steps)
    columns = (
        Column("run", "run"),
        Column("step", "after step", ",d"),
        Column("jump", "jump", "+.4f", paper=True),
        Column("auc_short", f"AUC 1k ({windows.short:,} steps)", "+.4f", paper=True),
        Column("auc_long", f"AUC 5k ({windows.long:,} steps)", "+.4f", paper=True),
        Column("recovery", "recovery, steps", ",.0f", paper=True),
        Column("recovered", "recovered"),
    )
    keys = tuple(dict.fromkeys([*(Key("grow", p) for p in PLACEMENTS), *(k for k in experiment.groups if _grows(k))]))
    rows: list[dict[str, Any]] = []
    for key in keys:
        found = {
            seed: transitions([event["loss"] for event in run.train], [p.steps for p in run.schedule.phases])
            for seed, run in experiment.groups.get(key, {}).items()
        }
        if not found:
            rows.append({"run": key.words, "step": None})
        for index in range(len(experiment.curriculum) - 1 if found else 0):
            each = {seed: result[index] for seed, result in found.items()}
            rows.append(_transition_row(experiment, key, index, each))
    notes = [
        "Relative to the baseline, the mean training loss (the objective) of the last "
        f"{windows.smooth:,} steps before the change. Jump: first loss after it. AUC: mean over the steps after it. Recovery: "
        f"first step where the loss smoothed over {windows.smooth:,} steps is back at the baseline, within the phase; - if in no "
        "seed, else the mean over the seeds that recovered.",
        "The windows are the paper's (200, 1,000 and 5,000 steps of phases of 50,000) scaled to phases of "
        f"{experiment.phase_steps:,} steps, the smoothing over 5 at least, or all of a shorter phase.",
        *group_seeds(experiment, keys),
    ]
    missing = experiment.missing([("grow", placement) for placement in PLACEMENTS])
    return Table("tableA4", "Table A4. Training loss around the phase changes of growth", columns, rows, notes, missing)


def _grows(key: Key) -> bool:
    return not key.kind.startswith("joint")


def _transition_row(experiment: Experiment, key: Key, index: int, each: dict[int, Transition]) -> dict[str, Any]:
    first = next(iter(each.values()))
    back = {seed: t.recovery for seed, t in each.items() if t.recovery is not None}
    row: dict[str, Any] = {"run": key.words, "step": first.step, "recovered": f"{len(back)} of {len(each)}"}
    is_paper = key.kind == "grow" and not key.variant and len(experiment.curriculum) == paper.BLOCKS
    published = paper.TRANSITIONS.get((key.placement, index + 1), {}) if is_paper else {}
    for name in ("jump", "auc_short", "auc_long"):
        values = {seed: getattr(transition, name) for seed, transition in each.items()}
        row |= {name: stat(values), f"{name}_paper": published.get(name)}
    return row | {"recovery": stat(back), "recovery_paper": published.get("recovery")}
