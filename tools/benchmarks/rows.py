"""What a benchmark yields, and how it takes times: ``Row``, ``interleaved``, ``tensor_peak``."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from blockgrow_titan.infra.footprint import TensorBytes

REPEATS = 5


@dataclass(frozen=True)
class Row:
    """One figure of a benchmark."""

    subject: str
    name: str
    value: float
    unit: str
    bar: str = ""
    """What it is held against, such as ">= 2.2"; empty for a figure that only informs."""
    holds: bool | None = None
    """Whether it does; None without a bar."""
    note: str = ""
    """What a reader must know to read the figure, such as its confidence interval."""


def at_least(subject: str, name: str, value: float, unit: str, bar: float, note: str = "") -> Row:
    """A figure that should be ``bar`` or more."""
    return Row(subject, name, value, unit, f">= {bar:g}", value >= bar, note)


def at_most(subject: str, name: str, value: float, unit: str, bar: float, note: str = "") -> Row:
    """A figure that should be ``bar`` or less."""
    return Row(subject, name, value, unit, f"<= {bar:g}", value <= bar, note)


def interleaved(
    runs: Mapping[str, Callable[[], object]], repeats: int = REPEATS, warmups: int = 1
) -> dict[str, list[float]]:
    """Seconds of each of some functions, called in turn so that a slow spell of the machine meets all of them.

    Args:
        runs: The functions by name.
        repeats: Times that each is measured.
        warmups: Rounds before, not measured.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warmups + repeats):
        for name, run in runs.items():
            gc.collect()
            started = time.perf_counter()
            run()
            if turn >= warmups:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def median_ratio(numerator: list[float], denominator: list[float]) -> float:
    """The median of the paired ratios of two lists from ``interleaved``."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def tensor_peak(run: Callable[[], object], *present: Tensor) -> int:
    """Bytes of tensors alive at the same time at most while ``run`` runs, beyond those that were there before.

    Args:
        run: The function.
        present: The tensors that were there before and that ``run`` uses: else a view of one counts as a new tensor.
    """
    gc.collect()
    with TensorBytes() as counted:
        counted.add(*present)
        before = counted.live
        counted.reset_peak()
        run()
    return counted.peak - before
