"""Reads the two files that a job leaves for other tools, `metrics.jsonl` and `summary.json`, and its console.

The functions named `check_...` are the checks that many definitions share. Those that take the dump folder alone go
into `OverrideDefinitions.checks` as they are, the others through `functools.partial`.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"


def log_file(dump: Path, launch: int) -> Path:
    """Where the harness keeps the console output of a launch (counted from 0): beside the dump folder, not in it."""
    return dump.parent / f"launch_{launch}.log"


def console(dump: Path, launch: int = 0) -> str:
    """The console output, stdout and stderr together, of a launch."""
    return log_file(dump, launch).read_text(errors="replace")


def read_events(dump: Path, event: str = "") -> list[Event]:
    """The lines of `metrics.jsonl` in their order.

    Args:
        dump: The job's dump folder.
        event: Only lines of this kind: 'train', 'validation', 'growth', 'checkpoint' or 'resume'. Empty: all.

    Raises:
        ValueError: If a line is not a JSON object, naming it.
    """
    events = []
    for number, line in enumerate((dump / METRICS_FILE).read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{dump / METRICS_FILE}:{number} is not JSON ({error}): {line[:200]}") from None
        if not event or record["event"] == event:
            events.append(record)
    return events


def train_lines(dump: Path) -> dict[int, Event]:
    """The train line of each step, by step. Raises AssertionError if a step has two."""
    lines: dict[int, Event] = {}
    for line in read_events(dump, "train"):
        assert line["step"] not in lines, f"{METRICS_FILE} has two train lines of step {line['step']}"
        lines[line["step"]] = line
    return lines


def train_values(dump: Path, field: str) -> list[Any]:
    """One field of the train lines, in the order of the steps."""
    return [line[field] for _, line in sorted(train_lines(dump).items())]


def validations(dump: Path) -> dict[int, list[Event]]:
    """The validation lines of each phase, in their order."""
    phases: dict[int, list[Event]] = {}
    for line in read_events(dump, "validation"):
        phases.setdefault(line["phase"], []).append(line)
    return phases


def last_validations(dump: Path) -> dict[int, Event]:
    """The last validation line of each phase: the scheduled endpoint."""
    return {phase: lines[-1] for phase, lines in validations(dump).items()}


def read_summary(dump: Path) -> dict[str, Any]:
    """`summary.json`, written when a run has finished."""
    return json.loads((dump / SUMMARY_FILE).read_text())


def check_steps(dump: Path, steps: int) -> None:
    """There is exactly one train line for each of the steps 1 to `steps`, in order, with a finite loss."""
    found = [line["step"] for line in read_events(dump, "train")]
    assert found == list(range(1, steps + 1)), f"train lines of steps {found}, expected each of 1 to {steps} once"
    for step, line in train_lines(dump).items():
        assert math.isfinite(line["loss"]), f"step {step}: loss is {line['loss']}"


def check_learning(dump: Path) -> None:
    """In every phase the last validation ce is below the first."""
    phases = validations(dump)
    assert phases, f"{METRICS_FILE} has no validation line"
    for phase, lines in phases.items():
        first, last = lines[0]["ce"], lines[-1]["ce"]
        assert len(lines) > 1, f"phase {phase} has a single validation line"
        assert last < first, f"phase {phase}: validation ce went from {first:.4f} to {last:.4f}"


def check_summary(dump: Path, active_blocks: Sequence[int]) -> None:
    """`summary.json` has one row for each phase, with these depths and the figures of the phase's last validation."""
    rows = read_summary(dump)["phases"]
    found = [row["active_blocks"] for row in rows]
    assert found == list(active_blocks), f"{SUMMARY_FILE} has phases of {found} blocks, expected {list(active_blocks)}"
    ends = last_validations(dump)
    for row in rows:
        for field in ("ce", "ppl"):
            end = ends[row["phase"]][field]
            assert row[field] == end, f"phase {row['phase']}: {field} is {row[field]}, the last validation's is {end}"


def check_same(dump: Path, other: str, fields: Sequence[str] = ("loss",), first_step: int = 1) -> None:
    """The train lines of `dump` and `dump / other` agree bit for bit in `fields`, from `first_step` on."""
    ours, theirs = train_lines(dump), train_lines(dump / other)
    assert ours.keys() == theirs.keys(), f"steps {sorted(ours)} here, {sorted(theirs)} in {other}"
    for step in sorted(ours):
        for field in fields if step >= first_step else ():
            here, there = ours[step][field], theirs[step][field]
            assert here == there, f"step {step}: {field} is {here!r} here and {there!r} in {other}"
