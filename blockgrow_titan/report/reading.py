"""One run's folder: what the run is, its events, and whether all of it is there.

    summary.json, metrics.jsonl, diagnostics.jsonl -> checked against the manifest and each other -> Run

What a run is comes from its manifest (``growth/manifest.py``), never from its folder's name. A run that is not finished,
or whose files do not agree, is a Run with a ``problem``, and no number of it is used.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from blockgrow_titan.events import DIAGNOSTICS_FILE, METRICS_FILE
from blockgrow_titan.growth.manifest import FILE_NAME, FORMAT, TRAJECTORY_FIELDS
from blockgrow_titan.growth.schedule import GrowthSchedule, build_schedule
from blockgrow_titan.metrics import SUMMARY_FILE, plural, summarize

RUN_FILE = "run.json"  # of tools/run_recipe.py
DEPTH = 3  # folders of run folders: outputs/recipes/tiny/RUN is found from outputs
_SUMMED = ("steps", "valid_tokens", "active_layer_tokens")
_MEASURED = ("ce", "ppl", "kl", "kd")


class Unusable(Exception):
    """Why a run's numbers cannot be used."""


@dataclass(frozen=True)
class Run:
    """A run's folder as it was read."""

    folder: Path
    manifest: dict[str, Any]
    """Empty if there is none."""
    problem: str = ""
    """Why it is left out of the tables; empty if it is whole."""
    train: list[dict[str, Any]] = field(default_factory=list)
    """The train event of steps 1, 2, 3 ..."""
    validations: list[dict[str, Any]] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)
    """The rows of its summary."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Of ``diagnostics.jsonl``."""
    no_records: str = ""
    """Why there are none."""
    scale: str = ""
    """Of the recipe that ran it, if any."""

    @property
    def config(self) -> dict[str, Any]:
        return self.manifest["config"]

    @property
    def seed(self) -> int:
        return self.config["debug.seed"] or 0

    @property
    def placement(self) -> str:
        return self.config["block_stack.placement"]

    @property
    def shard(self) -> int:
        """Documents that its training goes through before it repeats them."""
        return self.manifest["data"]["training"]["documents"]

    @cached_property
    def schedule(self) -> GrowthSchedule:
        return schedule_of_config(self.config)

    def record_at(self, phase: int) -> dict[str, Any]:
        """The diagnostics at a phase's last step."""
        step = self.schedule.phases[phase].last_step
        return next(r for r in reversed(self.records) if (r["step"], r["phase"]) == (step, phase))


def schedule_of_config(config: dict[str, Any]) -> GrowthSchedule:
    """The phases of a manifest's config.

    Raises:
        ValueError: As ``build_schedule``.
    """
    return build_schedule(
        phase_steps=config["growth.phase_steps"],
        active_blocks=config["growth.active_blocks"],
        num_blocks=config["block_stack.num_blocks"],
        total_steps=config["training.steps"],
        freeze=config["growth.freeze"],
        data_at_growth=config["growth.data_at_growth"],
    )


def find_runs(arguments: Sequence[str | Path]) -> list[Path]:
    """The run folders in some folders, each once, in the order of their names.

    Raises:
        ValueError: For a folder that is absent or holds no run.
    """
    found: dict[Path, None] = {}
    for argument in map(Path, arguments):
        if not argument.is_dir():
            what = "is not a folder" if argument.exists() else "does not exist"
            raise ValueError(f"{argument} {what}: give folders of runs, such as outputs/recipes/tiny")
        inside = _runs_in(argument.resolve(), DEPTH)
        if not inside:
            raise ValueError(
                f"{argument} has no run in it (no {METRICS_FILE}, {SUMMARY_FILE} or {RUN_FILE}): give a job.dump_folder, or a "
                "folder of those"
            )
        found |= dict.fromkeys(inside)
    return sorted(found, key=lambda path: (path.name, str(path)))


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's, if only of one that has just started."""
    return any((folder / name).exists() for name in (METRICS_FILE, SUMMARY_FILE, RUN_FILE))


def _runs_in(folder: Path, depth: int) -> list[Path]:
    if is_run(folder):
        return [folder]
    if depth == 0:
        return []
    below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [run for path in below for run in _runs_in(path, depth - 1)]


def read_run(folder: Path) -> Run:
    """Read a run's folder; what is wrong with it is in ``problem``."""
    manifest: dict[str, Any] = {}
    scale = _scale(folder)
    try:
        summary = _read_summary(folder)
        manifest = _checked_manifest(summary["manifest"] if summary else _newest_manifest(folder))
        schedule = schedule_of_config(manifest["config"])
        events = _read_lines(folder / METRICS_FILE)
        train = _train_events(events, schedule.total_steps)
        if summary is None:
            raise Unusable(f"unfinished: it has trained {len(train)} of {plural(schedule.total_steps, 'step')}")
        _check_summary(summary, events, schedule)
        validations = [event for event in events if event["event"] == "validation"]
        for event in validations:
            if not _is_finite(event["ce"]):
                raise Unusable(f"diverged: its validation ce at step {event['step']} is {event['ce']}")
        records, no_records = _read_records(folder, schedule)
    except (Unusable, ValueError) as error:
        problem = " ".join(str(error).split())
        if METRICS_FILE in problem and (folder / SUMMARY_FILE).exists():  # its command finds it complete
            problem += "; to train it again, remove its folder"
        return Run(folder, manifest, problem=problem, scale=scale)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        problem = f"corrupt: its files are not as a run writes them ({type(error).__name__}: {error})"
        return Run(folder, manifest, problem=" ".join(problem.split()), scale=scale)
    return Run(folder, manifest, "", train, validations, summary["phases"], records, no_records, scale)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise Unusable(f"unreadable: {path.name} cannot be read ({error.strerror})") from None
    except ValueError:
        what = "is empty" if path.stat().st_size == 0 else "is not whole"
        raise Unusable(f"corrupt: {path.name} {what} (the run's command writes it again)") from None


def _scale(folder: Path) -> str:
    try:
        return str(json.loads((folder / RUN_FILE).read_text())["scale"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _read_summary(folder: Path) -> dict[str, Any] | None:
    path = folder / SUMMARY_FILE
    return _read_json(path) if path.exists() else None


def _newest_manifest(folder: Path) -> dict[str, Any]:
    steps = sorted(
        (int(path.parent.name[5:]), path)
        for path in folder.glob(f"checkpoint/step-*/{FILE_NAME}")
        if path.parent.name[5:].isdecimal()
    )
    if not steps:
        raise Unusable("unfinished: it has no checkpoint and no summary yet, so what it is is not known")
    return _read_json(steps[-1][1])


def _checked_manifest(manifest: Any) -> dict[str, Any]:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Unusable(f"corrupt: its manifest is not of format {FORMAT}, which this version reads")
    config, data = manifest["config"], manifest["data"]
    missing = [
        f"{section}.{name}"
        for section, names in TRAJECTORY_FIELDS.items()
        for name in names
        if f"{section}.{name}" not in config
    ]
    if (
        missing
        or not {"documents", "digest"} <= data["training"].keys()
        or not {"dim", "vocab_size"} <= manifest["model"].keys()
    ):
        raise Unusable(
            f"corrupt: its manifest lacks {', '.join(missing) or 'the training documents or model dimensions'}"
        )
    return manifest


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, all of which must be whole."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise Unusable(f"corrupt: it has no {path.name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"corrupt: {path.name} cannot be read ({error})") from None
    if not text:
        raise Unusable(f"corrupt: {path.name} is empty")
    *lines, rest = text.split("\n")
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except ValueError:
            raise Unusable(f"corrupt: line {number} of {path.name} is no JSON") from None
        if not isinstance(event, dict):
            raise Unusable(f"corrupt: line {number} of {path.name} is no object")
        events.append(event)
    if rest:
        raise Unusable(f"unfinished: {path.name} is cut in the middle of line {len(lines) + 1}")
    return events


def _train_events(events: Sequence[dict[str, Any]], total: int) -> list[dict[str, Any]]:
    if skipped := [event["step"] for event in events if event["event"] == "skipped"]:
        raise Unusable(
            f"it skipped {plural(len(skipped), 'step')}, the first of them {skipped[0]}, whose loss or gradient norm was not "
            "finite: it has not learned from the documents that the other runs have"
        )
    train = [event for event in events if event["event"] == "train"]
    for expected, event in enumerate(train, start=1):
        if event["step"] != expected:
            raise Unusable(
                f"corrupt: train line {expected} of {METRICS_FILE} is of step {event['step']}: lines are missing"
            )
        if not all(_is_finite(event[name]) for name in ("loss", "ce", "valid_tokens", "active_layer_tokens")):
            raise Unusable(f"diverged: the loss of step {expected} is {event['loss']}, ce {event['ce']}")
        begin, end = event["documents"]
        if not 0 <= begin < end:
            raise Unusable(f"corrupt: the documents of step {expected} are {event['documents']}")
    if len(train) > total:
        raise Unusable(f"corrupt: {METRICS_FILE} has {len(train)} steps, the run's manifest {total}")
    return train


def _check_summary(summary: dict[str, Any], events: list[dict[str, Any]], schedule: GrowthSchedule) -> None:
    """A summary must be complete, and what its run's events say."""
    done = sum(row["steps"] for row in summary["phases"])
    if done < schedule.total_steps:
        raise Unusable(f"unfinished: it has trained {done} of {plural(schedule.total_steps, 'step')}")
    phases = [{"index": p.index, "last_step": p.last_step, "active_blocks": p.active_blocks} for p in schedule.phases]
    recomputed = summarize(events, {"phases": phases})["phases"]
    if len(recomputed) != len(phases) or len(summary["phases"]) != len(phases):
        raise Unusable(f"corrupt: {SUMMARY_FILE} and {METRICS_FILE} do not have the phases of its manifest")
    for row, again, phase in zip(summary["phases"], recomputed, schedule.phases, strict=True):
        for name in ("phase", "active_blocks", "active_layers", *_SUMMED, *_MEASURED):
            if row[name] != again[name]:
                raise Unusable(
                    f"corrupt: {SUMMARY_FILE} has {name} {row[name]} in phase {phase.index}, {METRICS_FILE} {again[name]}"
                )
        if (row["active_blocks"], row["steps"]) != (phase.active_blocks, phase.steps):
            raise Unusable(f"corrupt: phase {phase.index} of {SUMMARY_FILE} is not that of its manifest")
        if row["ce"] is None:
            raise Unusable(f"it was not validated at the end of phase {phase.index} (validation.enable)")
        if not all(row[name] is None or _is_finite(row[name]) for name in _MEASURED):
            raise Unusable(f"diverged: its validation ce in phase {phase.index} is {row['ce']}")


def _read_records(folder: Path, schedule: GrowthSchedule) -> tuple[list[dict[str, Any]], str]:
    """The diagnostics, or why there are none: they are optional, so without them the run's losses still count."""
    path = folder / DIAGNOSTICS_FILE
    if not path.exists():
        return [], "it was run without diagnostics.enable"
    try:
        records = _read_lines(path)
        at = {(record["step"], record["phase"]) for record in records}
        for phase in schedule.phases:
            if (phase.last_step, phase.index) not in at:
                raise Unusable(f"{DIAGNOSTICS_FILE} has no record at step {phase.last_step}")
        for record in records:
            _check_record(record, schedule)
    except Unusable as error:
        return (
            [],
            f"its diagnostics cannot be used: {str(error).removeprefix('corrupt: ').removeprefix('unfinished: ')}",
        )
    except (KeyError, TypeError, AttributeError, IndexError, ValueError):
        return [], f"its diagnostics cannot be used: {DIAGNOSTICS_FILE} is not as a run writes it"
    return records, ""


def _check_record(record: dict[str, Any], schedule: GrowthSchedule) -> None:
    blocks = schedule.phases[record["phase"]].active_blocks
    whole = (
        record["blocks"] == len(record["removal"]) == blocks
        and len(record["boundaries"]) == blocks + 1
        and all(len(kind["rms"]) == blocks + 1 for kind in record["token_types"].values())
        and all(len(boundary["histogram"]) == record["bins"]["count"] for boundary in record["boundaries"])
        and all({"mean", "std", "kurtosis"} <= boundary.keys() for boundary in record["boundaries"])
        and all({"delta_ce", "angular_distance"} <= removal.keys() for removal in record["removal"])
    )
    if not whole:
        raise Unusable(f"the record at step {record['step']} is not of {plural(blocks, 'block')}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
