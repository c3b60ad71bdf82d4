"""Figures 4, 5a, A1 and A2: what the diagnostics see inside the students."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from blockgrow_titan.diagnostics.token_types import TOKEN_TYPES
from blockgrow_titan.report import paper
from blockgrow_titan.report.experiment import PLACEMENTS, Experiment, Key
from blockgrow_titan.report.internals import COMPARED, batch_notes, last_record, removal, undiagnosed, with_records
from blockgrow_titan.report.reading import Run
from blockgrow_titan.report.style import (
    COLORS,
    GREY,
    HATCHES,
    LINES,
    MARKERS,
    Drawn,
    legend_below,
    log_axis,
    panels,
    phase_ticks,
    saved,
    shade,
)
from blockgrow_titan.report.table import Stat

TYPE_LINES: dict[str, Any] = {"document_boundary": "-", "newline": "--", "punctuation": "-.", "regular": ":"}


def shown_keys(experiment: Experiment) -> tuple[list[Key], list[str]]:
    """The growing runs that have diagnostics, or the joint ones if nothing grows; and what is missing."""
    kind = "grow" if experiment.curriculum or not any(k.kind == "joint1" for k in experiment.groups) else "joint1"
    wanted = tuple(Key(kind, placement) for placement in PLACEMENTS)
    missing = [*experiment.missing([key[:2] for key in wanted]), *undiagnosed(experiment, wanted)]
    return [key for key in wanted if with_records(experiment, key) in experiment.groups], missing


def _blocks_of_phases(experiment: Experiment, key: Key) -> list[int]:
    run = next(iter(experiment.groups[key].values()))
    return [phase.active_blocks for phase in run.schedule.phases]


def _phase_value(experiment: Experiment, key: Key, phase: int, *path: str | int) -> Stat | None:
    """Over seeds, what stands at a path in the record at the end of a phase."""

    def value(run: Run) -> float | None:
        found: Any = run.record_at(phase)
        for step in path:
            found = found[step]
        return found

    return experiment.over_seeds(value, key)


def _means(values: list[Stat | None]) -> list[float]:
    """NaN, which leaves a gap, for what is not defined."""
    return [math.nan if value is None else value.mean for value in values]


def figure4(experiment: Experiment) -> Drawn:
    """Mean and standard deviation of the residual RMS at every boundary, at the end of each phase."""
    title = "Figure 4. Residual RMS of a token at the block boundaries, at the end of each phase"
    alt = "Mean and standard deviation over tokens of the residual RMS at each block boundary, a line for each phase."
    keys, missing = shown_keys(experiment)
    if not keys:
        return Drawn("figure4", title, alt, missing=missing)
    figure, axes = panels(2, len(PLACEMENTS), 7.2, 5.2, sharex=True, sharey="row")
    for row, (name, words) in enumerate((("mean", "mean RMS"), ("std", "standard deviation of RMS"))):
        seen: list[float] = []
        for column, placement in enumerate(PLACEMENTS):
            key = _of_placement(keys, placement)
            seen += (
                _boundary_lines(axes[row, column], experiment, key, name) if key else _say_missing(axes[row, column])
            )
        axes[row, 0].set_ylabel(words)
        log_axis(axes[row, 0], "y", seen)
    for here, placement in zip(axes[0], PLACEMENTS, strict=True):
        here.set_title(f"{placement}-norm")
    for here in axes[1]:
        here.set_xlabel("boundary: entry, then after block")
        here.set_xticks(range(experiment.blocks + 1), ["entry", *map(str, range(experiment.blocks))])
    phases = len(_blocks_of_phases(experiment, keys[0]))
    handles = [Line2D([], [], color=GREY, marker=MARKERS[p % len(MARKERS)]) for p in range(phases)]
    legend_below(figure, handles, [f"after phase {p}" for p in range(phases)], 4)
    notes = [paper.FIGURE_NOTES["figure4"], *batch_notes(experiment)]
    return Drawn("figure4", _kind_title(title, keys), alt, notes, missing, **saved(figure))


def _of_placement(keys: list[Key], placement: str) -> Key | None:
    return next((key for key in keys if key.placement == placement), None)


def _boundary_lines(axes: Axes, experiment: Experiment, key: Key, name: str) -> list[float]:
    """A line over the boundaries for each phase; returns what is drawn."""
    seen: list[float] = []
    blocks = _blocks_of_phases(experiment, key)
    for phase, count in enumerate(blocks):
        values = [_phase_value(experiment, key, phase, "boundaries", k, name) for k in range(count + 1)]
        axes.plot(
            range(count + 1),
            _means(values),
            color=shade(key.placement, phase, len(blocks)),
            linestyle=LINES[key.placement],
            marker=MARKERS[phase % len(MARKERS)],
        )
        seen += [value.mean for value in values if value]
    return seen


def _type_lines(axes: Axes, experiment: Experiment, key: Key, boundary: int) -> list[float]:
    """A line over the phases for each token type; returns what is drawn."""
    seen: list[float] = []
    phases = range(len(_blocks_of_phases(experiment, key)))
    for index, kind in enumerate(TOKEN_TYPES):
        values = [_phase_value(experiment, key, p, "token_types", kind, "rms", boundary) for p in phases]
        style: dict[str, Any] = {"linestyle": TYPE_LINES[kind], "marker": MARKERS[index]}
        axes.plot(phases, _means(values), color=COLORS[key.placement], **style)
        seen += [value.mean for value in values if value]
    return seen


def _say_missing(axes: Axes) -> list[float]:
    axes.text(0.5, 0.5, "missing", ha="center", va="center", transform=axes.transAxes, color=GREY)
    return []


def _kind_title(title: str, keys: list[Key]) -> str:
    return title if keys[0].kind == "grow" else f"{title} (joint training: no run grows)"


def figure5a(experiment: Experiment) -> Drawn:
    """Mean residual RMS by token type, after the first and after the last block, at the end of each phase."""
    title = "Figure 5a. Residual RMS by token type, at the end of each phase"
    alt = "Mean residual RMS of document-boundary, newline, punctuation and regular tokens over the phases."
    keys, missing = shown_keys(experiment)
    if not keys:
        return Drawn("figure5a", title, alt, missing=missing)
    places = [(1, "after block 0"), (-1, "after the last active block")][: min(2, experiment.blocks)]
    figure, axes = panels(len(places), len(PLACEMENTS), 7.2, 1.2 + 2.1 * len(places), sharex=True, sharey="row")
    for row, (boundary, words) in enumerate(places):
        seen: list[float] = []
        for column, placement in enumerate(PLACEMENTS):
            key = _of_placement(keys, placement)
            seen += (
                _type_lines(axes[row, column], experiment, key, boundary) if key else _say_missing(axes[row, column])
            )
        axes[row, 0].set_ylabel(f"mean RMS\n{words}")
        log_axis(axes[row, 0], "y", seen)
    for here, placement in zip(axes[0], PLACEMENTS, strict=True):
        here.set_title(f"{placement}-norm")
    for here in axes[-1]:
        phase_ticks(here, _blocks_of_phases(experiment, keys[0]))
    handles = [
        Line2D([], [], color=GREY, linestyle=TYPE_LINES[kind], marker=MARKERS[i]) for i, kind in enumerate(TOKEN_TYPES)
    ]
    legend_below(figure, handles, [kind.replace("_", " ") for kind in TOKEN_TYPES], 4)
    notes = [paper.FIGURE_NOTES["figure5a"], *batch_notes(experiment)]
    return Drawn("figure5a", _kind_title(title, keys), alt, notes, missing, **saved(figure))


def figureA1(experiment: Experiment) -> Drawn:
    """Histogram of the residual RMS at every boundary at the last step, all seeds together."""
    title = "Figure A1. Distribution of the residual RMS of a token at the last step"
    alt = "Histograms of the residual RMS of tokens at each block boundary, pre-norm and post-norm."
    keys, missing = shown_keys(experiment)
    if not keys:
        return Drawn("figureA1", title, alt, missing=missing)
    boundaries = experiment.blocks + 1
    columns = min(boundaries, 4 if boundaries > 6 else 3 if boundaries > 4 else 2)
    rows = math.ceil(boundaries / columns)
    figure, axes = panels(rows, columns, 7.2, 0.9 + 1.9 * rows, sharex=True, sharey=True)
    used: list[float] = []
    heights: list[float] = []
    for boundary in range(boundaries):
        here = axes.flat[boundary]
        lines = ["entry" if boundary == 0 else f"after block {boundary - 1}"]
        for key in keys:
            edges, shares = _histogram(list(experiment.groups[key].values()), boundary)
            filled = [i for i, share in enumerate(shares) if share]
            used += [edges[filled[0]], edges[filled[-1] + 1]] if filled else []
            heights += [share for share in shares if share]
            style = {"color": COLORS[key.placement], "linestyle": LINES[key.placement], "linewidth": 1.3}
            here.stairs(shares, edges, **style)
            kurtosis = experiment.over_seeds(lambda run, k=boundary: last_record(run)["boundaries"][k]["kurtosis"], key)
            lines.append(f"{key.placement} {_short(kurtosis.mean) if kurtosis else '-'}")
        here.set_title(f"{lines[0]}\nkurtosis: {', '.join(lines[1:])}", fontsize=8)
    for here in axes.flat[boundaries:]:
        here.set_visible(False)
    log_axis(axes[0, 0], "x", used)
    log_axis(axes[0, 0], "y", heights)
    for column in range(columns):
        lowest = axes[(boundaries - 1 - column) // columns, column]
        lowest.set_xlabel("token RMS")
        lowest.tick_params(labelbottom=True)
    for row in range(rows):
        axes[row, 0].set_ylabel("share of tokens")
    handles = [Line2D([], [], color=COLORS[key.placement], linestyle=LINES[key.placement]) for key in keys]
    legend_below(figure, handles, [key.words for key in keys], 2)
    notes = [
        "Excess kurtosis (0 for a normal distribution), mean over seeds; - where all values are the same.",
        paper.FIGURE_NOTES["figureA1"],
        *batch_notes(experiment),
    ]
    return Drawn("figureA1", _kind_title(title, keys), alt, notes, missing, **saved(figure))


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _histogram(runs: list[Run], boundary: int) -> tuple[list[float], list[float]]:
    """Edges of the bins and the share of tokens in each."""
    bins = last_record(runs[0])["bins"]
    low, step = math.log10(bins["low"]), math.log10(bins["high"] / bins["low"]) / bins["count"]
    edges = [10 ** (low + i * step) for i in range(bins["count"] + 1)]
    counts = [last_record(run)["boundaries"][boundary]["histogram"] for run in runs]
    total = sum(map(sum, counts))
    return edges, [sum(each) / max(total, 1) for each in zip(*counts, strict=True)]


def figureA2(experiment: Experiment) -> Drawn:
    """Bars of Table 4, the paper's beside them."""
    title = "Figure A2. Whole-block removal at the last step"
    alt = "Bars of the change of cross-entropy without each block, and of the block's angular distance."
    names = {"delta_ce": "ΔCE without the block (nats)", "angular_distance": "angular distance (of π)"}
    here = {
        (key, name): [removal(experiment, key, block, name) for block in range(experiment.blocks)]
        for key in COMPARED
        for name in names
    }
    missing = [*experiment.missing([key[:2] for key in COMPARED]), *undiagnosed(experiment, COMPARED)]
    if not any(any(values) for values in here.values()):
        return Drawn("figureA2", title, alt, missing=missing)
    figure, axes = panels(2, 2, 7.2, 5.2, sharey="row", width_ratios=[max(experiment.blocks, 2), paper.BLOCKS])
    for row, (name, words) in enumerate(names.items()):
        _removal_bars(axes[row, 0], {key: here[key, name] for key in COMPARED})
        published = {key: [Stat(pair[row], None, (42,)) for pair in paper.REMOVAL[key[:2]]] for key in COMPARED}
        _removal_bars(axes[row, 1], {key: list(values) for key, values in published.items()})
        axes[row, 0].set_ylabel(words)
    axes[0, 0].set_title("these runs")
    axes[0, 1].set_title("the paper")
    for each in axes[1]:
        each.set_xlabel("block")
    handles = [axes[0, 1].containers[i] for i in range(len(COMPARED))]
    legend_below(figure, handles, [key.words for key in COMPARED], 4)
    notes = ["Error bars: standard deviation over seeds.", *batch_notes(experiment)]
    return Drawn("figureA2", title, alt, notes, missing, **saved(figure))


def _removal_bars(axes: Axes, values: dict[Key, list[Stat | None]]) -> None:
    width = 0.8 / len(values)
    for i, (key, each) in enumerate(values.items()):
        color = COLORS[key.placement]
        joint = key.kind != "grow"
        axes.bar(
            [block - 0.4 + (i + 0.5) * width for block in range(len(each))],
            _means(each),
            width * 0.92,
            yerr=[value.std if value and value.std else 0.0 for value in each]
            if any(v and v.std for v in each)
            else None,
            capsize=1.5,
            color="white" if joint else color,
            edgecolor=color if joint else "white",
            hatch=HATCHES[key.placement],
            linewidth=1.0 if joint else 0.4,
        )
    blocks = len(next(iter(values.values())))
    axes.set_xticks(range(blocks))
    axes.set_xlim(-0.6, blocks - 0.4)
    axes.axhline(0, color=GREY, linewidth=0.6)
    axes.grid(False, axis="x")
