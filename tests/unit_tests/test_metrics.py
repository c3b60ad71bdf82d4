"""metrics.jsonl and summary.json: what is read, dropped on resume, summed up and shown."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from blockgrow_titan import events
from blockgrow_titan.events import EventFile, keep_until, read_events
from blockgrow_titan.metrics import closing_table, duration, perplexity, plural, summarize, write_summary

MANIFEST = {"phases": [{"index": 0, "last_step": 2}, {"index": 1, "last_step": 4}, {"index": 2, "last_step": 6}]}


def event(kind: str, step: int, phase: int, **fields: Any) -> dict[str, Any]:
    return {
        "event": kind,
        "step": step,
        "phase": phase,
        "active_blocks": phase + 1,
        "active_layers": phase + 1,
    } | fields


def train(step: int, phase: int, tokens: int) -> dict[str, Any]:
    return event("train", step, phase, valid_tokens=tokens, active_layer_tokens=tokens * (phase + 1), step_s=0.5)


EVENTS = [
    event("validation", 0, 0, ce=8.0, ppl=2981.0),
    train(1, 0, 10),
    train(2, 0, 20),
    event("validation", 2, 0, ce=5.0, ppl=148.4, kl=0.5, kd=3.0),
    event("checkpoint", 2, 0),
    event("growth", 2, 1),
    event("validation", 2, 1, ce=6.0, ppl=403.4),
    train(3, 1, 30),
    train(4, 1, 40),
    event("validation", 4, 1, ce=4.0, ppl=54.6, kl=0.4, kd=2.5),
]


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(EVENTS[0]) + "\n" + json.dumps(EVENTS[1]) + "\n" + '{"event": "tra')
    assert read_events(str(path)) == EVENTS[:2]
    assert read_events(str(tmp_path / "absent")) == []


def test_resume_keeps_what_will_not_come_again() -> None:
    assert keep_until(EVENTS, 2, 0) == EVENTS[:5]  # growth and the next phase's first validation come again
    assert keep_until(EVENTS, 3, 1) == EVENTS[:8]
    assert keep_until(EVENTS, 4, 1) == EVENTS


@pytest.mark.parametrize("tail_bytes", [1, 150, 400, 1 << 16])
@pytest.mark.parametrize(("step", "phase"), [(0, 0), (1, 0), (2, 0), (2, 1), (3, 1), (4, 1), (9, 1)])
def test_a_file_is_taken_up_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail_bytes: int, step: int, phase: int
) -> None:
    """Whatever is read of it at a time, what stays is what ``keep_until`` keeps of all of it."""
    monkeypatch.setattr(events, "TAIL_BYTES", tail_bytes)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in EVENTS) + '{"event": "tra')
    kept = keep_until(EVENTS, step, phase) if step else []
    file = EventFile(str(path))
    assert file.take_up(step, phase) == [event for event in kept if event["step"] == step]
    file.write({"event": "resume", "step": step})
    file.file.close()
    assert read_events(str(path)) == [*kept, {"event": "resume", "step": step}]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("rest", ["", '{"event": "check', None])
def test_the_record_of_a_run_that_was_killed_behind_its_last_save_is_completed(
    tmp_path: Path, rest: str | None
) -> None:
    """Its last checkpoint's line is absent, cut or there; in the end it is there, once."""
    path = tmp_path / "metrics.jsonl"
    whole = [e for e in EVENTS if e["event"] != "checkpoint"]
    last = {"event": "checkpoint"} | {n: whole[-1][n] for n in ("step", "phase", "active_blocks", "active_layers")}
    lines = whole if rest is not None else [*whole, last]
    path.write_text("".join(json.dumps(event) + "\n" for event in lines) + (rest or ""))
    events.complete_events(str(path), last["step"])
    assert path.read_text().endswith("\n") and read_events(str(path)) == [*whole, last]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_is_taken_up_where_there_is_none(tmp_path: Path) -> None:
    for step in (0, 3):
        assert EventFile(str(tmp_path / f"{step}.jsonl")).take_up(step, 0) == []


def test_summary_counts_by_phase_and_takes_the_endpoint() -> None:
    rows = summarize(EVENTS, MANIFEST)["phases"]
    assert rows == [
        {"phase": 0, "active_blocks": 1, "active_layers": 1, "steps": 2, "skipped_steps": 0, "valid_tokens": 30, "active_layer_tokens": 30,
         "ce": 5.0, "ppl": 148.4, "kl": 0.5, "kd": 3.0, "seconds": 1.0},
        {"phase": 1, "active_blocks": 2, "active_layers": 2, "steps": 2, "skipped_steps": 0, "valid_tokens": 70, "active_layer_tokens": 140,
         "ce": 4.0, "ppl": 54.6, "kl": 0.4, "kd": 2.5, "seconds": 1.0},
    ]  # fmt: skip


def test_a_skipped_step_counts_as_a_step_and_its_tokens_do_not() -> None:
    events = [e | {"event": "skipped"} if (e["event"], e["step"]) == ("train", 2) else e for e in EVENTS]
    summary = summarize(events, MANIFEST)
    assert [(row["steps"], row["skipped_steps"]) for row in summary["phases"]] == [(2, 1), (2, 0)]
    assert summary["phases"][0]["valid_tokens"] == 10
    assert "skipped steps" in closing_table(summary)[0]
    assert "skipped steps" not in closing_table(summarize(EVENTS, MANIFEST))[0]


def test_summary_without_validation_or_teacher(tmp_path: Path) -> None:
    events = [e for e in EVENTS if e["event"] == "train"]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    summary = write_summary(str(tmp_path), MANIFEST)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert all(row[name] is None for row in summary["phases"] for name in ("ce", "ppl", "kl", "kd"))
    assert not any(name in closing_table(summary)[0] for name in (" ce", " kl"))


def test_closing_table_has_a_row_a_phase_and_aligned_columns() -> None:
    lines = closing_table(summarize(EVENTS, MANIFEST))
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert lines[0].split()[0] == "phase" and "4.0000" in lines[2]


def test_duration_and_perplexity() -> None:
    assert [duration(s) for s in (0, 5.4, 184, 3720)] == ["0s", "5s", "3m04s", "1h02m"]
    assert [plural(n, "layer") for n in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]
    assert perplexity(2.0) == math.exp(2.0) and perplexity(1e6) == math.inf
