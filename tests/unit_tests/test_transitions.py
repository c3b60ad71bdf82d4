"""Jump, AUC and recovery on curves whose answers are known."""

import math

import pytest

from blockgrow_titan.diagnostics.transitions import (
    Windows,
    auc,
    baseline,
    jump,
    recovery,
    training_losses,
    transitions,
    windows_of,
)


def test_windows_are_the_papers_scaled() -> None:
    assert windows_of(50_000) == Windows(200, 1_000, 5_000)
    assert windows_of(100_000) == Windows(400, 2_000, 10_000)
    assert windows_of(5_000) == Windows(20, 100, 500)
    assert windows_of(400) == Windows(5, 8, 40)  # the smoothing takes 5 steps at least
    assert windows_of(60) == Windows(5, 5, 6)
    assert windows_of(3) == Windows(3, 3, 3)
    with pytest.raises(ValueError, match="phase_steps is 0"):
        windows_of(0)


def test_each_function_on_a_few_numbers() -> None:
    assert baseline([9.0, 9.0, 1.0, 3.0], 2) == 2.0
    assert baseline([1.0, 3.0], 200) == 2.0  # a phase shorter than the window
    assert jump([2.5, 7.0], 2.0) == 0.5
    assert auc([3.0, 4.0, 100.0], 2.0, 2) == 1.5
    assert auc([1.0, 1.0], 2.0, 2) == -1.0
    for call in (
        lambda: baseline([], 2),
        lambda: jump([], 2.0),
        lambda: auc([1.0], 2.0, 2),
        lambda: auc([1.0], 2.0, 0),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(ValueError, match="at least 1"):
        recovery([1.0], 2.0, 0)


def test_recovery_is_where_the_smoothed_loss_is_back() -> None:
    assert recovery([3.0, 2.0, 1.0], 2.0, 1) == 2
    assert recovery([1.0] * 300, 2.0, 200) == 101  # the least that the paper's window gives
    assert recovery([3.0] * 500, 2.0, 200) is None
    assert recovery([1.0] * 199, 2.0, 200) is None  # too few steps to tell
    # One low step does not count: its window of 3 does, from steps 4 to 6, around step 5.
    assert recovery([5.0, 1.9, 5.0, 2.0, 2.0, 2.0], 2.0, 3) == 5


def test_an_exponential_recovery() -> None:
    """before: 2.0; after: 2.0 + 0.3 * exp(-n / 1000) - 0.03, which crosses 2.0 at n = 1000 * ln 10."""
    steps = 50_000
    after = [2.0 + 0.3 * math.exp(-n / 1000) - 0.03 for n in range(steps)]
    (change,) = transitions([2.0] * steps + after, [steps, steps])
    assert (change.step, change.windows, change.baseline) == (steps, Windows(200, 1_000, 5_000), pytest.approx(2.0))
    assert change.jump == pytest.approx(0.27)
    assert change.auc_short == pytest.approx(0.3 * (1 - math.exp(-1)) - 0.03, abs=2e-4)  # the integral's mean
    assert change.auc_long == pytest.approx(0.3 * (1 - math.exp(-5)) / 5 - 0.03, abs=1e-4)
    assert change.recovery == pytest.approx(1000 * math.log(10), abs=5)


def test_each_change_has_its_own_phases() -> None:
    """Ramps: nothing from before the previous change or after the next one is seen."""
    losses = [100.0] * 5 + [4.0] * 15 + [5.0] * 10 + [3.0] * 10 + [50.0] * 5
    first, second, third = transitions(losses, [20, 10, 10, 10])
    assert [(c.step, c.baseline, c.jump) for c in (first, second, third)] == [
        (20, 4.0, 1.0),
        (30, 5.0, -2.0),
        (40, 3.0, 47.0),
    ]
    assert (first.auc_short, first.auc_long, first.recovery) == (1.0, 1.0, None)  # it recovers in the next phase only
    assert (second.auc_short, second.recovery) == (-2.0, 3)
    assert third.auc_short == 47.0 and third.recovery is None
    short = transitions([9.0] * 10 + [4.0] * 2 + [5.0] * 10, [10, 2, 10])
    assert short[1].baseline == 4.0  # of two steps, where the window would take five


def test_a_run_that_has_not_got_there() -> None:
    phases = [20, 20, 20]
    assert transitions([], phases) == transitions([1.0] * 19, phases) == []
    (at,) = transitions([1.0] * 20, phases)  # the change is due, no step has followed
    assert (at.step, at.baseline, at.jump, at.auc_short, at.recovery) == (20, 1.0, None, None, None)
    (few,) = transitions([1.0] * 20 + [2.0] * 3, phases)
    assert (few.jump, few.auc_short, few.auc_long) == (1.0, None, None)
    assert transitions([1.0] * 20, [20]) == []
    with pytest.raises(ValueError, match="61 losses"):
        transitions([1.0] * 61, phases)


def test_losses_of_a_metrics_file() -> None:
    events = [{"event": "validation", "step": 0, "ce": 9.0}, {"event": "train", "step": 1, "loss": 3.0}]
    assert training_losses(events) == [3.0] and training_losses([]) == []
    assert training_losses([*events, {"event": "growth", "step": 1}, {"event": "train", "step": 2, "loss": 2.0}]) == [
        3.0,
        2.0,
    ]
    for steps in ((2,), (1, 3), (1, 1)):
        with pytest.raises(ValueError, match="is not whole"):
            training_losses([{"event": "train", "step": step, "loss": 1.0} for step in steps])
