"""Figures 3a, 3b and 5b: validation cross-entropy by training, by phase and by step."""

from collections.abc import Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from blockgrow_titan.report import paper
from blockgrow_titan.report.experiment import PLACEMENTS, Experiment, Key, final_ce, kind_words
from blockgrow_titan.report.style import (
    COLORS,
    GREY,
    HATCHES,
    LINES,
    Drawn,
    legend_below,
    legend_height,
    line_of,
    panels,
    phase_ticks,
    saved,
    zoom,
)
from blockgrow_titan.report.table import Stat

KINDS = ("joint1", "grow")


def figure3a(experiment: Experiment) -> Drawn:
    """Bars of Table 1, the paper's beside them."""
    title = "Figure 3a. Validation cross-entropy at the last step"
    alt = "Bars of the validation cross-entropy of pre- and post-norm students, joint and grown, beside the paper's."
    needs = [(kind, placement) for kind in KINDS for placement in PLACEMENTS]
    here = {need: value for need in needs if (value := experiment.ce(*need))}
    missing = experiment.missing(needs)
    if not here:
        return Drawn("figure3a", title, alt, missing=missing)
    figure, axes = panels(1, 2, 7.2, 3.3)
    ces = {need: [final_ce(run) for run in experiment.groups[Key(*need)].values()] for need in here}
    _bars(axes[0, 0], here, ces, "these runs")
    published = {need: Stat(paper.CE[need], None, (42,)) for need in needs}
    _bars(axes[0, 1], published, {need: [paper.CE[need]] for need in needs}, "the paper")
    axes[0, 0].set_ylabel("validation CE (nats per token)")
    handles = [Patch(facecolor=COLORS[p], hatch=HATCHES[p], edgecolor="white") for p in PLACEMENTS]
    legend_below(figure, handles, [f"{placement}-norm" for placement in PLACEMENTS], 2)
    notes = ["The axes do not start at zero. Error bars: standard deviation over seeds; dots: each seed."]
    return Drawn("figure3a", title, alt, notes, missing, **saved(figure))


def _bar_at(need: tuple[str, str]) -> float:
    return KINDS.index(need[0]) + (-0.2 if need[1] == "pre" else 0.2)


def _bars(
    axes: Axes, values: dict[tuple[str, str], Stat], each: dict[tuple[str, str], list[float]], title: str
) -> None:
    ends = []
    for need, value in values.items():
        x = _bar_at(need)
        axes.bar(x, value.mean, 0.36, color=COLORS[need[1]], hatch=HATCHES[need[1]], edgecolor="white", linewidth=0.5)
        if value.std is not None:
            axes.errorbar(x, value.mean, value.std, color="black", capsize=3, linewidth=1)
        if len(each[need]) > 1:
            axes.plot([x] * len(each[need]), each[need], ".", color="black", markersize=4)
        top = max(value.mean + (value.std or 0.0), *each[need])
        ends += [top, min(value.mean - (value.std or 0.0), *each[need])]
        axes.annotate(f"{value.mean:.4f}", (x, top), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(KINDS)), [kind_words(kind) for kind in KINDS])
    axes.set_xlim(-0.6, len(KINDS) - 0.4)
    axes.grid(False, axis="x")
    axes.set_title(title)
    zoom(axes, ends, 0.45)


def figure3b(experiment: Experiment) -> Drawn:
    """Cross-entropy at the end of every phase, of all growing runs; the joint ones as lines across."""
    title = "Figure 3b. Validation cross-entropy at the end of each phase of growth"
    alt = "Lines of the validation cross-entropy of pre- and post-norm students over the phases of growth."
    missing = experiment.missing([("grow", placement) for placement in PLACEMENTS])
    growing = [key for key in experiment.groups if not key.kind.startswith("joint")]
    if not growing:
        return Drawn("figure3b", title, alt, missing=missing)
    figure, axes = panels(1, 2, 7.2, 3.1 + legend_height(len(growing) + 2, 2), width_ratios=[3, 2])
    here, published = axes[0]
    phases = range(len(experiment.curriculum))
    handles, labels = [], []
    for key in growing:
        values = [experiment.over_seeds(lambda run, p=p: run.phases[p]["ce"], key) for p in phases]
        means = [value.mean for value in values if value]
        spread = [value.std or 0.0 for value in values if value]
        style = line_of(key, list(experiment.groups))
        drawn = here.errorbar(phases, means, spread if any(spread) else None, capsize=2, **style)
        handles.append(drawn)
        labels.append(key.words)
    for placement in PLACEMENTS:
        if joint := experiment.ce("joint1", placement):
            color = COLORS[placement]
            handles.append(
                here.axhline(
                    joint.mean, color=color, linewidth=1.0, linestyle=(0, (1, 1.5)) if placement == "pre" else "-."
                )
            )
            labels.append(Key("joint1", placement).words)
    here.set_ylabel("validation CE (nats per token)")
    here.set_title("these runs")
    phase_ticks(here, experiment.curriculum)
    for placement in PLACEMENTS:
        color, ce = COLORS[placement], (paper.FIRST_PHASE[placement]["ce"], paper.CE["grow", placement])
        published.plot([0, 2], ce, color=color, linestyle=LINES[placement], marker="o")
    published.set_title("the paper (phase 1 not given)")
    phase_ticks(published, [1, 2, 3])
    legend_below(figure, handles, labels, 2)
    notes = ["Error bars: standard deviation over seeds. Lines across: joint training over one phase's steps."]
    return Drawn("figure3b", title, alt, notes, missing, **saved(figure))


def figure5b(experiment: Experiment) -> Drawn:
    """Cross-entropy at every validation, with the phase changes."""
    title = "Figure 5b. Validation cross-entropy over training"
    alt = "Curves of the validation cross-entropy over the steps, with vertical lines at the phase changes."
    there = [kind for kind in KINDS if any(key.kind == kind for key in experiment.groups)]
    missing = experiment.missing([(kind, placement) for kind in there for placement in PLACEMENTS])
    figure, axes = panels(1, 1, 7.2, 3.1 + legend_height(len(experiment.groups), 2))
    here = axes[0, 0]
    keys = list(experiment.groups)
    seen: list[float] = []
    for key in keys:
        curve = validation_curve(experiment, key)
        steps, means, lows, highs = ([point[i] for point in curve] for i in range(4))
        every = max(1, len(steps) // 8)
        here.plot(steps, means, markevery=every, label=key.words, **line_of(key, keys))
        if lows != highs:
            here.fill_between(steps, lows, highs, color=COLORS[key.placement], alpha=0.15, linewidth=0)
        seen += [value for step, value in zip(steps, means, strict=True) if step > 0] or means
    for end in [*accumulate([experiment.phase_steps] * _longest(experiment))][:-1]:
        here.axvline(end, color=GREY, linewidth=0.8, linestyle=":")
    zoom(here, seen, 0.06)
    here.set_xlabel("training step")
    here.set_ylabel("validation CE (nats per token)")
    handles, labels = here.get_legend_handles_labels()
    legend_below(figure, handles, labels, 2)
    notes = [
        "Dotted lines: phase changes, where the model is validated before and right after. The value before the first step is "
        "left out of the axis' range. Shaded: smallest to largest over seeds."
    ]
    return Drawn("figure5b", title, alt, notes, missing, **saved(figure))


def _longest(experiment: Experiment) -> int:
    return max(len(run.schedule.phases) for run in experiment.runs)


def validation_curve(experiment: Experiment, key: Key) -> list[tuple[int, float, float, float]]:
    """Step, mean, smallest and largest ce over seeds, of the validations (step and phase) that all seeds have."""
    curves = [{(v["step"], v["phase"]): v["ce"] for v in run.validations} for run in experiment.groups[key].values()]
    points: Sequence[tuple[int, int]] = [at for at in curves[0] if all(at in curve for curve in curves)]
    result = []
    for at in points:
        values = [curve[at] for curve in curves]
        result.append((at[0], sum(values) / len(values), min(values), max(values)))
    return result
