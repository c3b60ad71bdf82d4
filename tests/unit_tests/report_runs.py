"""Run folders whose every number is known, for the tests of `blockgrow_titan/report`: written at once, nothing is trained.

Step t of a run has TOKENS(t) tokens; its validation at the end of phase p has ce `ces[p]`.
"""

import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blockgrow_titan.diagnostics.statistics import RMS_BINS
from blockgrow_titan.growth.manifest import FORMAT, trajectory_config
from blockgrow_titan.growth.schedule import Phase, build_schedule
from blockgrow_titan.parse import parse_config

ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH, LAYERS = 20, 4, 2
"""Steps of a phase, documents of a step, layers of a block."""
VALIDATION = {"documents": 7, "digest": "c0ffee" * 10}


def tokens_at(step: int) -> int:
    return 100 + step % 7


@functools.cache
def _base() -> str:
    config = parse_config(["--job.config_file", str(ROOT / "train_configs" / "grow_post.toml")])
    return json.dumps(trajectory_config(config))


def write_run(
    folder: Path,
    placement: str,
    active: Sequence[int],
    ces: Sequence[float],
    *,
    seed: int = 42,
    blocks: int = 3,
    steps: int = STEPS,
    freeze: bool = False,
    shard: int | None = None,
    losses: Callable[[int], float] = lambda step: 3.0 + 4.0 / step,
    until: int | None = None,
    diagnosed: bool = True,
    changed: dict[str, Any] | None = None,
) -> Path:
    """Write a run's files.

    Args:
        folder: Where.
        placement: Norm placement.
        active: Active blocks of each phase.
        ces: Validation cross-entropy at the end of each phase.
        seed: Also moves the diagnostics a little.
        blocks: Of the finished student.
        steps: Of each phase.
        freeze: Whether completed blocks freeze.
        shard: Documents of the training set; by default one phase's for growth, all steps' for joint runs.
        losses: The training loss of each step.
        until: Stop before the end, after so many steps: no summary, a checkpoint.
        diagnosed: Whether there is a `diagnostics.jsonl`.
        changed: Fields of the config that are not the usual ones.
    """
    grows, total = len(set(active)) > 1, steps * len(active)
    shard = shard or (steps if grows else total) * BATCH
    config = json.loads(_base()) | {
        "block_stack.placement": placement,
        "block_stack.num_blocks": blocks,
        "block_stack.layers_per_block": LAYERS,
        "growth.phase_steps": [steps] * len(active),
        "growth.active_blocks": [*active],
        "growth.freeze": "completed_blocks" if freeze else "none",
        "training.steps": total,
        "training.global_batch_size": BATCH,
        "documents.shard_documents": shard,
        "debug.seed": seed,
    }
    config |= changed or {}
    schedule = build_schedule(
        phase_steps=[steps] * len(active), active_blocks=[*active], num_blocks=blocks, total_steps=total
    )
    manifest = manifest_of(config, schedule.phases, shard)
    lines, records, rows = [], [], []
    for phase, ce in zip(schedule.phases, ces, strict=True):
        events, row = phase_events(phase, ce, losses)
        lines += [event for event in events if until is None or event["step"] <= until]
        rows.append(row)
        if until is None or phase.last_step <= until:
            records.append(make_record(placement, phase.active_blocks, phase.last_step, phase.index, seed, ce))
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", lines)
    if diagnosed:
        write_lines(folder / "diagnostics.jsonl", records)
    if until is None:
        (folder / "summary.json").write_text(json.dumps({"phases": rows, "manifest": manifest}))
    saved = folder / "checkpoint" / f"step-{until or total}"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text(json.dumps(manifest))
    (folder / "run.json").write_text(json.dumps({"run": folder.name, "scale": "tiny"}))
    return folder


def manifest_of(config: dict[str, Any], phases: Sequence[Phase], shard: int) -> dict[str, Any]:
    """What a report reads of a run's manifest."""
    return {
        "format": FORMAT,
        "config": config,
        "data": {"training": {"documents": shard, "digest": f"{shard:064x}"}, "validation": VALIDATION},
        "model": {"dim": 256, "vocab_size": 4096},
        "phases": [vars(phase) for phase in phases],
        "commit": "0123abc",
    }


def phase_events(
    phase: Phase, ce: float, losses: Callable[[int], float], layers: int = LAYERS, batch: int = BATCH
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A phase's lines of `metrics.jsonl` (validated before its first step, half-way and at its last) and its summary."""
    where = {"phase": phase.index, "active_blocks": phase.active_blocks, "active_layers": phase.active_blocks * layers}
    measured = {"ce": ce, "ppl": math.exp(ce), "kl": ce - 2.0, "kd": ce + 0.01}
    validation = {"event": "validation", **where, **measured, "valid_tokens": 1000, "documents": 7, "seconds": 1.0}
    lines = [validation | {"ce": ce + 1.5, "step": phase.first_step - 1}]
    for step in range(phase.first_step, phase.last_step + 1):
        train = {"event": "train", "step": step, **where, "loss": losses(step), "ce": losses(step) + 0.5, "step_s": 0.5}
        train |= {"valid_tokens": tokens_at(step), "active_layer_tokens": tokens_at(step) * where["active_layers"]}
        lines.append(train | {"documents": [(step - 1) * batch, step * batch]})
        if step == phase.last_step - phase.steps // 2:
            lines.append(validation | {"ce": ce + 0.3, "step": step})
    lines.append(validation | {"step": phase.last_step})
    tokens = sum(tokens_at(step) for step in range(phase.first_step, phase.last_step + 1))
    counted = {"valid_tokens": tokens, "active_layer_tokens": tokens * where["active_layers"]}
    return lines, where | measured | counted | {"steps": phase.steps, "seconds": phase.steps * 0.5}


def make_record(placement: str, blocks: int, step: int, phase: int, seed: int, ce: float) -> dict[str, Any]:
    """A line of `diagnostics.jsonl`: block k has delta_ce `removal_of(...)[k]`; the RMS is far wider for pre than for post."""
    scale = 10.0 if placement == "pre" else 1.0
    boundaries = []
    for k in range(blocks + 1):
        histogram = [0] * RMS_BINS
        middle = 64 + (8 * k if placement == "pre" else k)
        histogram[middle - 2 : middle + 3] = [20, 60, 200, 60, 20]
        boundaries.append(
            {
                "mean": scale * (1 + 0.5 * k) * (1 + 0.2 * phase) * (1 + seed / 1e4),
                "std": scale * 0.3 * (1 + k) * (1 + phase),
                "kurtosis": None if k == 0 else 5.0 * k * scale,
                "quantiles": {},
                "histogram": histogram,
            }
        )
    types = {}
    for i, name in enumerate(("document_boundary", "newline", "punctuation", "regular")):
        rms = [scale * (4 - i) * (1 + 0.3 * k) * (1 + phase) for k in range(blocks + 1)]
        types[name] = {"tokens": 90, "rms": rms}
    return {
        "step": step,
        "phase": phase,
        "placement": placement,
        "blocks": blocks,
        "documents": 3,
        "tokens": 360,
        "predictions": 357,
        "ce": ce,
        "bins": {"low": 1e-4, "high": 1e4, "count": RMS_BINS},
        "boundaries": boundaries,
        "token_types": types,
        "removal": [
            {
                "block": k,
                "ce": ce + delta,
                "delta_ce": delta,
                "angular_distance": 0.4 / (k + 1) + (placement == "pre") / 50,
            }
            for k, delta in enumerate(removal_of(placement, blocks, seed))
        ],
        "logit_lens": [ce] * (blocks + 1),
        "gradient_norms": None,
    }


def removal_of(placement: str, blocks: int, seed: int) -> list[float]:
    """Change of cross-entropy without each block."""
    return [(2.0 if placement == "pre" else 3.0) / (k + 1) + seed / 1000 for k in range(blocks)]


def write_lines(path: Path, values: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def ces_of(kind: str, placement: str, seed: int, phases: int) -> list[float]:
    """The validation cross-entropies of the standard runs; the last ones make Delta and interaction known."""
    last = {
        ("joint1", "pre"): 4.13,
        ("joint1", "post"): 4.09,
        ("grow", "pre"): 4.20,
        ("grow", "post"): 4.10,
        ("freeze", "pre"): 4.33,
        ("freeze", "post"): 4.31,
        ("joint2", "post"): 4.00,
        ("joint3", "post"): 3.95,
    }[kind, placement]
    last += {42: 0.0, 43: 0.02, 44: 0.05}[seed] * (1.0 if placement == "pre" else 2.0 if kind == "grow" else 1.5)
    return [last + 0.2 * (phases - 1 - p) for p in range(phases)]


def write_standard(folder: Path, seeds: Sequence[int] = (42,), blocks: int = 3, kinds: Sequence[str] = ()) -> Path:
    """The runs of the recipes `interaction`, `freeze` and `joint_budget`, in folders whose names say nothing."""
    rising = [*range(1, blocks + 1)]
    actives = {"joint1": [blocks], "grow": rising, "freeze": rising, "joint2": [blocks] * 2, "joint3": [blocks] * 3}
    number = 0
    for seed in seeds:
        for kind in kinds or actives:
            for placement in ("pre", "post"):
                if kind in ("joint2", "joint3") and placement == "pre" or blocks == 1 and kind in ("grow", "freeze"):
                    continue
                number += 1
                active = actives[kind]
                ces = ces_of(kind, placement, seed, len(active))
                losses = grow_losses(placement)
                write_run(
                    folder / f"run{number:02}",
                    placement,
                    active,
                    ces,
                    seed=seed,
                    blocks=blocks,
                    freeze=kind == "freeze",
                    losses=losses,
                )
    return folder


def grow_losses(placement: str) -> Callable[[int], float]:
    """2.0 in the last 5 steps of a phase; after a change 2.5 (pre) or 3.0 (post), falling by 0.1 a step to 2.0 again."""
    jump = 0.5 if placement == "pre" else 1.0

    def loss(step: int) -> float:
        since = (step - 1) % STEPS
        return round(max(2.0 if since else 0.0, 2.0 + jump - 0.1 * since), 6)

    return loss
