"""What all figures share: colours, markers, one way to open and to save them.

Pre-norm is blue and solid, post-norm is vermilion and dashed (bars: hatched), in every figure: colours of Okabe and Ito's
palette, which people with any colour vision tell apart, and line styles that remain in grey.
"""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from blockgrow_titan.report.experiment import Key

COLORS = {"pre": "#0072B2", "post": "#D55E00"}
LINES: dict[str, Any] = {"pre": "-", "post": (0, (4, 1.5))}
HATCHES = {"pre": "", "post": "////"}
GREY = "#555555"
MARKERS = "osD^vPX*<>hdp"
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "path",
    "svg.hashsalt": "blockgrow_titan",
    "savefig.facecolor": "white",
}
PNG_DPI = 160


@dataclass(frozen=True)
class Drawn:
    """A figure, or why there is none."""

    id: str
    title: str
    alt: str
    """What it shows, for who cannot see it."""
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    png: bytes = b""
    """Empty if no run has what it would show."""
    svg: bytes = b""


@contextmanager
def styled() -> Iterator[None]:
    """Within it, figures look as those of a report, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, Any]:
    """A figure of width x height inches and its axes, a [rows, columns] array."""
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def saved(figure: Figure) -> dict[str, bytes]:
    """The two files of a figure, the same bytes for the same figure."""
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=PNG_DPI, metadata={"Software": None})
    figure.set_layout_engine("none")  # as it was laid out for the first file
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return {"png": png.getvalue(), "svg": svg.getvalue()}


def legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int) -> None:
    """One legend for all panels, under them, where it covers nothing."""
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(labels)), handlelength=3.2)


def legend_height(entries: int, columns: int) -> float:
    """Inches that a legend below the panels takes."""
    return 0.17 * math.ceil(entries / columns)


def line_of(key: Key, order: Sequence[Key]) -> dict[str, Any]:
    """How the line of some runs looks: placement by colour and dashes, kind and variant by marker; joint ones are open."""
    kinds = list(dict.fromkeys((k.kind, k.variant) for k in order))
    color = COLORS[key.placement]
    joint = key.kind.startswith("joint")
    return {
        "color": color,
        "linestyle": LINES[key.placement],
        "linewidth": 1.0 if joint or key.variant else 1.8,
        "marker": MARKERS[kinds.index((key.kind, key.variant)) % len(MARKERS)],
        "markerfacecolor": "white" if joint else color,
    }


def shade(placement: str, index: int, count: int) -> tuple[float, float, float]:
    """The placement's colour, lighter for the earlier ones of ``count``."""
    strength = 1.0 if count == 1 else 0.35 + 0.65 * index / (count - 1)
    r, g, b = to_rgb(COLORS[placement])
    return (1 - strength * (1 - r), 1 - strength * (1 - g), 1 - strength * (1 - b))


def phase_ticks(axes: Axes, blocks: Sequence[int]) -> None:
    """One tick for each phase, with its active blocks under it, and what they are."""
    axes.set_xticks(range(len(blocks)), [f"{i}\n[{count}]" for i, count in enumerate(blocks)])
    axes.set_xlabel("phase [active blocks]")
    axes.set_xlim(-0.4, len(blocks) - 0.6)


def log_axis(axes: Axes, which: str, values: Sequence[float]) -> None:
    """A logarithmic axis ("x" or "y") around some values, with plain numbers at few places; linear if one is not above zero."""
    if not values or min(values) <= 0:
        return
    low, high = min(values) / 1.3, max(values) * 1.3
    if high / low < 10:  # so that there is a place with a number
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(10), middle * math.sqrt(10)
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    if which == "x":
        axes.set_xlim(low, high)
    else:
        axes.set_ylim(low, high)
    few = high / low < 200
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=9 if few else 6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def zoom(axes: Axes, values: Sequence[float], room: float = 0.25) -> None:
    """Let the y axis span the values and some room at both ends."""
    low, high = min(values), max(values)
    margin = max((high - low) * room, abs(high) * 1e-3, 1e-6)
    axes.set_ylim(low - margin, high + margin)
