"""The integration harness, with a small script in place of `run_train.sh`."""

import json
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.integration_tests import OverrideDefinitions
from tests.integration_tests.reading import (
    check_learning,
    check_same,
    check_steps,
    check_summary,
    console,
    read_events,
    train_lines,
)
from tests.integration_tests.run_tests import Outcome, run_all, run_one, select, write_junit

# Called as: LAUNCHER --job.config_file CONFIG --job.dump_folder DUMP [BODY], where BODY is shell code.
LAUNCHER = """#!/bin/bash
dump=$4
mkdir -p "$dump"
line() { echo "{\\"event\\": \\"train\\", \\"step\\": $1, \\"loss\\": ${2:-1.5}}" >>"$dump/metrics.jsonl"; }
eval "${5:-}"
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    script = tmp_path / "launcher.sh"
    script.write_text(LAUNCHER)
    script.chmod(0o755)
    return script


def _write(dump: Path, events: list[dict]) -> None:
    dump.mkdir(parents=True, exist_ok=True)
    (dump / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def _validation(phase: int, step: int, ce: float) -> dict:
    return {"event": "validation", "phase": phase, "step": step, "ce": ce, "ppl": 2 * ce}


def test_launches_share_a_dump_folder(tmp_path: Path, launcher: Path) -> None:
    seen: list[Path] = []
    body = 'line $((NGPU)); echo "$* EXTRA=$EXTRA"'
    definition = OverrideDefinitions(
        [[body], [body, "{dump}/x"]], ngpu=[1, 2], config="some.toml", env={"EXTRA": "7"}, checks=[seen.append]
    )
    outcome = run_one(definition, tmp_path / "test", launcher)
    dump = tmp_path / "test" / "dump"
    assert outcome.failure == "" and seen == [dump]
    assert list(train_lines(dump)) == [1, 2]
    assert console(dump, 1) == f"--job.config_file some.toml --job.dump_folder {dump} {body} {dump}/x EXTRA=7\n"


@pytest.mark.parametrize(
    "definition, message",
    [
        (OverrideDefinitions([["echo the cause; exit 3"], []]), "launch 0 ended with status 3\nthe last 1 lines of"),
        (
            OverrideDefinitions([["line 1"]], checks=[partial(check_steps, steps=2)]),
            "train lines of steps [1], expected",
        ),
        (OverrideDefinitions([[]], checks=[check_learning]), "FileNotFoundError"),
        (OverrideDefinitions([[]], expect_failure="bad"), "launch 0 succeeded, but should fail with: bad"),
        (OverrideDefinitions([["echo good; exit 2"]], expect_failure="bad"), "launch 0 did not print: bad"),
        (OverrideDefinitions([["line 1"]], kill_at_step=2), "launch 0 ended with status 0 before it could be killed"),
        (OverrideDefinitions([["sleep 60"]], timeout=0.1), "longer than 0.1 s and was killed"),
    ],
)
def test_what_fails_a_test(tmp_path: Path, launcher: Path, definition: OverrideDefinitions, message: str) -> None:
    assert message in run_one(definition, tmp_path / "test", launcher).failure


def test_an_expected_failure_passes(tmp_path: Path, launcher: Path) -> None:
    definition = OverrideDefinitions([[], ["echo 'x is 3, must be 2' >&2; exit 2"]], expect_failure="must be 2")
    assert run_one(definition, tmp_path / "test", launcher).failure == ""


def test_kill_at_step_ends_every_process(tmp_path: Path, launcher: Path) -> None:
    # The rank is in a session of its own, like torchrun's, and would go on if only the launcher were killed.
    first = "setsid sleep 60 & echo $! >$dump/pid; line 1; line 2; wait"
    definition = OverrideDefinitions([[first], ["line 3"]], kill_at_step=2)
    outcome = run_one(definition, tmp_path / "test", launcher)
    dump = tmp_path / "test" / "dump"
    assert outcome.failure == "" and list(train_lines(dump)) == [1, 2, 3]
    assert not psutil.pid_exists(int((dump / "pid").read_text()))


def test_counts_and_report(tmp_path: Path, launcher: Path, capsys: pytest.CaptureFixture[str]) -> None:
    definitions = [
        OverrideDefinitions([["exit 1"]], "fails", "a"),
        OverrideDefinitions([[], []], "passes", "b"),
        OverrideDefinitions([["exit 1"]], "is skipped", "c", disabled="needs a GPU"),
    ]
    assert run_all(definitions, tmp_path / "tests", tmp_path / "report.xml", launcher) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[ 1/3] a: fails ... FAILED") and lines[-1] == "1 passed, 1 failed, 1 skipped"
    assert "[ 3/3] c: is skipped ... skipped: needs a GPU" in lines
    suite = ET.parse(tmp_path / "report.xml").getroot()
    assert [suite.get(k) for k in ("tests", "failures", "errors", "skipped")] == ["3", "1", "0", "1"]
    assert [d.test_name for d in select(definitions, ["b"])] == ["b"]
    with pytest.raises(ValueError, match="--test_name is d, must be of: a, b, c"):
        select(definitions, ["b", "d"])


def test_reading_and_checks(tmp_path: Path) -> None:
    events = [{"event": "train", "step": step, "loss": 1 / step} for step in (1, 2)]
    events += [_validation(0, 0, 3.0), _validation(0, 1, 2.5), _validation(1, 1, 2.7), _validation(1, 2, 2.6)]
    _write(tmp_path, events)
    check_steps(tmp_path, 2)
    check_learning(tmp_path)
    rows = [{"phase": p, "active_blocks": p + 1, "ce": ce, "ppl": 2 * ce} for p, ce in ((0, 2.5), (1, 2.6))]
    (tmp_path / "summary.json").write_text(json.dumps({"phases": rows}))
    check_summary(tmp_path, [1, 2])
    with pytest.raises(AssertionError, match=r"phases of \[1, 2\] blocks, expected \[3\]"):
        check_summary(tmp_path, [3])
    rows[1]["ce"] = 2.7
    (tmp_path / "summary.json").write_text(json.dumps({"phases": rows}))
    with pytest.raises(AssertionError, match="phase 1: ce is 2.7, the last validation's is 2.6"):
        check_summary(tmp_path, [1, 2])

    _write(tmp_path / "same", events)
    check_same(tmp_path, "same")
    _write(tmp_path / "other", [events[0] | {"loss": 1.0 + 1e-15}, events[1]])
    with pytest.raises(AssertionError, match="step 1: loss is 1.0 here and 1.000000000000001 in other"):
        check_same(tmp_path, "other")
    check_same(tmp_path, "other", first_step=2)


def test_reading_refuses_what_it_must(tmp_path: Path) -> None:
    _write(tmp_path, [{"event": "train", "step": 1, "loss": float("nan")}])
    with pytest.raises(AssertionError, match="step 1: loss is nan"):
        check_steps(tmp_path, 1)
    _write(tmp_path, [{"event": "train", "step": 1}] * 2)
    with pytest.raises(AssertionError, match="two train lines of step 1"):
        train_lines(tmp_path)
    _write(tmp_path, [_validation(0, 0, 3.0), _validation(0, 1, 3.0)])
    with pytest.raises(AssertionError, match="phase 0: validation ce went from 3.0000 to 3.0000"):
        check_learning(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"event": "train"}\n{"event": ')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is not JSON"):
        read_events(tmp_path)


def test_colours_in_a_failure_leave_the_report_readable(tmp_path: Path) -> None:
    """The last lines of a log go into the report, and torchtitan's console is coloured."""
    write_junit([Outcome("coloured", failure="\x1b[31mloss\x1b[39m is nan\n")], tmp_path / "report.xml")
    failure = ET.parse(tmp_path / "report.xml").find(".//failure")
    assert failure is not None and failure.text == "[31mloss[39m is nan\n"
