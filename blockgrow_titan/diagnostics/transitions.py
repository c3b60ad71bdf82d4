"""How the training loss moves around a phase change (paper, Table A4), from the loss of every step.

The paper gives jump, AUC over 1,000 and 5,000 steps and recovery on the 200-step smoothed loss, in phases of 50,000 steps,
the first two relative to the baseline before the change. What it leaves open is stated at each function. Its AUC over 5,000
steps can be below that over 1,000, so both must be means over their window rather than sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

PAPER_PHASE_STEPS = 50_000
PAPER_SMOOTH, PAPER_SHORT, PAPER_LONG = 200, 1_000, 5_000
LEAST_SMOOTH = 5


@dataclass(frozen=True)
class Windows:
    """Steps that a transition is measured over."""

    smooth: int
    """Of the baseline and of the smoothed loss; 200 in the paper."""
    short: int
    """Of the first AUC; 1,000 in the paper."""
    long: int
    """Of the second AUC; 5,000 in the paper."""


@dataclass(frozen=True)
class Transition:
    """One phase change. None stands for what the run has not trained enough steps for."""

    step: int
    """Last step of the phase before it."""
    windows: Windows
    baseline: float
    jump: float | None
    auc_short: float | None
    auc_long: float | None
    recovery: int | None
    """None as well if the phase ends before the loss is back."""


def windows_of(phase_steps: int) -> Windows:
    """The paper's windows, scaled from 50,000 steps to ``phase_steps``, those of the phase after the change.

    The smoothing takes at least ``LEAST_SMOOTH`` steps, and no window is longer than the phase or shorter than the
    smoothing's.
    """
    if phase_steps < 1:
        raise ValueError(f"phase_steps is {phase_steps}: a phase has at least 1 step")
    scale = phase_steps / PAPER_PHASE_STEPS
    smooth = min(phase_steps, max(LEAST_SMOOTH, round(PAPER_SMOOTH * scale)))
    short, long = (min(phase_steps, max(smooth, round(steps * scale))) for steps in (PAPER_SHORT, PAPER_LONG))
    return Windows(smooth, short, long)


def baseline(before: Sequence[float], smooth: int) -> float:
    """Mean of the last ``smooth`` losses before the change (ours: the paper does not say over how many).

    Raises:
        ValueError: If there is no loss.
    """
    if not before:
        raise ValueError("there is no training loss before the change")
    return fmean(before[-smooth:])


def jump(after: Sequence[float], baseline: float) -> float:
    """The first loss after the change minus the baseline (ours: the paper does not say which step).

    That step has not updated the deeper model yet, so this is what growth itself does.

    Raises:
        ValueError: If there is no loss.
    """
    if not after:
        raise ValueError("there is no training loss after the change")
    return after[0] - baseline


def auc(after: Sequence[float], baseline: float, steps: int) -> float:
    """Mean over the first ``steps`` losses after the change of the loss minus the baseline; negative below it.

    Raises:
        ValueError: If there are fewer losses.
    """
    if not 1 <= steps <= len(after):
        raise ValueError(f"the window has {steps} steps and there are {len(after)} losses after the change")
    return fmean(after[:steps]) - baseline


def recovery(after: Sequence[float], baseline: float, smooth: int) -> int | None:
    """The first step after the change, from 1, where the smoothed loss is at most the baseline; None if there is none.

    The smoothed loss at a step is the mean over the ``smooth`` steps around it, all of them after the change (ours: it
    cannot be below smooth / 2 + 1, which with 200 is 101, the smallest value that the paper has).
    """
    if smooth < 1:
        raise ValueError(f"the window has {smooth} steps: it must have at least 1")
    for first in range(len(after) - smooth + 1):
        if fmean(after[first : first + smooth]) <= baseline:
            return first + 1 + smooth // 2
    return None


def training_losses(events: Sequence[dict[str, Any]]) -> list[float]:
    """The loss of steps 1, 2, 3 ... from the events of a ``metrics.jsonl`` (``metrics.read_events``).

    Raises:
        ValueError: If the train lines are not those of consecutive steps from 1 on.
    """
    steps = [event for event in events if event["event"] == "train"]
    for expected, event in enumerate(steps, start=1):
        if event["step"] != expected:
            raise ValueError(f"train line {expected} is of step {event['step']}: the run's metrics.jsonl is not whole")
    return [event["loss"] for event in steps]


def transitions(losses: Sequence[float], phase_steps: Sequence[int]) -> list[Transition]:
    """Every phase change that a run has reached.

    Args:
        losses: The training loss of steps 1, 2, 3 ..., as far as the run has got.
        phase_steps: Steps of each phase (``growth.phase_steps``).

    Raises:
        ValueError: If there are more losses than steps.
    """
    ends = list(accumulate(phase_steps))
    if len(losses) > (ends[-1] if ends else 0):
        raise ValueError(f"there are {len(losses)} losses, but the phases {list(phase_steps)} have fewer steps")
    result = []
    for start, end, steps, begin in zip(ends, ends[1:], phase_steps[1:], [0, *ends], strict=False):
        if len(losses) < start:
            break
        before, after = losses[begin:start], losses[start:end]
        windows = windows_of(steps)
        base = baseline(before, windows.smooth)
        result.append(
            Transition(
                step=start,
                windows=windows,
                baseline=base,
                jump=jump(after, base) if after else None,
                auc_short=auc(after, base, windows.short) if len(after) >= windows.short else None,
                auc_long=auc(after, base, windows.long) if len(after) >= windows.long else None,
                recovery=recovery(after, base, windows.smooth),
            )
        )
    return result
