"""How cost grows with depth, vocabulary, ranks and documents: times at doubled sizes, and the exponent of their growth.

The exponent is the slope of a straight line through log(time) over log(size), of all sizes shown: 1 is proportional, 0 flat,
2 quadratic. Training steps are real, on one rank, each rank's work of a larger job. What grows with the number of ranks
is what every rank does alone before and between steps: it is measured on one process over torch's fake process group.
"""

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torchtitan.protocols.train_spec import get_train_spec

from blockgrow_titan.documents.dealing import MICRO_BATCHING, MicroBatching, documents_of_offset
from blockgrow_titan.documents.jsonl import JsonlReader
from blockgrow_titan.documents.records import ReaderConfig
from blockgrow_titan.documents.source import DocumentSource
from blockgrow_titan.events import EventFile
from blockgrow_titan.growth.schedule import schedule_of
from blockgrow_titan.infra.footprint import fake_world, student_on_meta
from blockgrow_titan.infra.parallelize import data_parallel_dims
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import FLAVORS
from blockgrow_titan.parse import parse_config
from blockgrow_titan.planning import HARDWARE, Assumptions, busiest_documents, make_plan
from blockgrow_titan.spec import build_tokenizer
from blockgrow_titan.teacher.worlds import WorldLayout
from blockgrow_titan.trainer import GrowthTrainer
from tools.benchmarks.jobs import BASE_CONFIG, arguments, with_trainer
from tools.benchmarks.overhead import PluginSide, take_turns, write_documents
from tools.benchmarks.ranks import ROOT, run_ranks
from tools.benchmarks.rows import REPEATS, Row, at_most, interleaved

SUBJECT = "scaling"
BAR = 1.15
FLAT = 0.15

LAYERS = (2, 4, 8, 16)
VOCABULARIES = (8_192, 16_384, 32_768, 65_536, 131_072)
DOCUMENTS = (4_096, 8_192, 16_384, 32_768, 65_536)
BATCHES = (64, 128, 256, 512, 1024, 2048, 4096)
RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STEPS = (2_000, 4_000, 8_000, 16_000)
PAPER_CONFIG = "train_configs/qwen3_8b/grow_post.toml"
SEQ_LEN = 8192
MEAN_TOKENS = 972


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log(seconds) over log(sizes), by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def growth(name: str, runs: Mapping[int, Callable[[], object]], bar: float = BAR, note: str = "") -> Row:
    """The exponent of some functions' times, by their sizes, called in turn."""
    taken = interleaved({str(size): run for size, run in runs.items()})
    return growth_of(name, {int(size): seconds for size, seconds in taken.items()}, bar, note)


def growth_of(name: str, taken: Mapping[int, Sequence[float]], bar: float = BAR, note: str = "") -> Row:
    """The exponent of repeated times by their sizes."""
    medians = {size: statistics.median(seconds) for size, seconds in taken.items()}
    times = ", ".join(f"{size:,}: {readable(seconds)}" for size, seconds in medians.items())
    value = exponent([*medians], [*medians.values()])
    return at_most(SUBJECT, name, value, "exponent", bar, f"{times}{'; ' if note else ''}{note}")


def readable(seconds: float) -> str:
    """A time with its unit."""
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{1e3 * seconds:.3g} ms"
        if seconds >= 1e-3
        else f"{1e6 * seconds:.3g} us"
    )


# Depth and vocabulary: real training steps.


def step_seconds(rank: int, world_size: int, folder: str, steps: int) -> dict[str, dict[str, list[float]]] | None:
    """Seconds of the steps of students of several depths and vocabularies, which take turns on one rank."""
    variants = {f"layers {layers}": {"layers": layers} for layers in LAYERS}
    variants |= {f"vocabulary {size}": {"vocabulary": size} for size in VOCABULARIES}
    lines = {name: _command_line(Path(folder), name, steps, **sizes) for name, sizes in variants.items()}
    first = next(iter(lines))

    def measure(trainer: Any) -> dict[str, dict[str, list[float]]]:
        trainers = {first: trainer} | {
            name: GrowthTrainer(parse_config(line), trainer.world) for name, line in lines.items() if name != first
        }
        sides = {}
        for name, each in trainers.items():
            if each is not trainer:
                each.metrics_processor.start(each.schedule, each.phase, 0)
            sides[name] = PluginSide(each)
        take_turns([*sides.values()], steps)
        return {name: {"seconds": side.seconds[2:]} for name, side in sides.items()}

    return with_trainer(measure, lines[first])


def _command_line(folder: Path, name: str, steps: int, layers: int = 2, vocabulary: int = 4096) -> list[str]:
    flavor = f"scaling_{layers}_{vocabulary}"
    dim = 256 if vocabulary == 4096 else 128
    args = FLAVORS["tiny"]
    args.vocab_size, args.dim = vocabulary, dim
    FLAVORS[flavor] = args
    return arguments(
        folder / name.replace(" ", "_"),
        model__flavor=flavor,
        block_stack__num_blocks=layers,
        growth__phase_steps=[steps + 10],
        growth__active_blocks=[layers],
        teacher__path="",
        distill__kd_weight=0,
        distill__ce_weight=1,
        training__dataset_path=folder / "documents.jsonl",
        training__seq_len=130,
        training__local_batch_size=2,
        training__global_batch_size=2,
        training__steps=steps + 10,
    )


def step_rows(folder: Path) -> Iterator[Row]:
    write_documents(folder / "documents.jsonl")
    (taken,) = run_ranks("tools.benchmarks.scaling:step_seconds", 1, folder=str(folder), steps=REPEATS + 2)
    for what, sizes in (("layers", LAYERS), ("vocabulary", VOCABULARIES)):
        yield growth_of(f"train step over {what}", {size: taken[f"{what} {size}"]["seconds"] for size in sizes})


# Documents: what a rank does with them before the first step, and between steps.


def lengths(count: int) -> list[int]:
    """Log-normal lengths of documents, as the paper's."""
    drawn = np.random.default_rng(0).lognormal(math.log(MEAN_TOKENS) - 0.5, 1.0, count)
    return [int(n) for n in np.clip(drawn, 1, SEQ_LEN - 1)]


def dealing_rows() -> Iterator[Row]:
    for kind in MICRO_BATCHING:
        micro_batching = MicroBatching(kind, documents=4, tokens=4 * SEQ_LEN, attention_tokens=SEQ_LEN)
        by_batch = {size: partial(micro_batching.deal, lengths(size), 8) for size in BATCHES}
        yield growth(f"dealing over documents of a step, 8 ranks: {kind}", by_batch)
        by_ranks = {ranks: partial(micro_batching.deal, lengths(4096), ranks) for ranks in RANKS}
        yield growth(f"dealing over ranks, 4,096 documents a step: {kind}", by_ranks)
    late = {t: partial(documents_of_offset, t, 4096, 3_200_000) for t in (10, 100, 1_000, 10_000, 100_000)}
    yield growth("documents of a step over the step's number", late, FLAT)


def document_rows(folder: Path) -> Iterator[Row]:
    """Finding the documents of a JSONL file, and telling whether they are the same as before."""
    job_config = parse_config(["--job.config_file", str(BASE_CONFIG)])
    tokenizer = build_tokenizer(job_config)
    text = json.dumps({"text": "It is a truth universally acknowledged. " * 20})
    configs = {}
    for count in DOCUMENTS:
        path = folder / f"{count}.jsonl"
        path.write_text(f"{text}\n" * count)
        configs[count] = ReaderConfig(str(path), "training.dataset_path", "text", "train", -1, 0, 256, tokenizer)
    yield growth(
        "index over documents: jsonl", {count: partial(JsonlReader, config) for count, config in configs.items()}
    )
    sources = {
        count: DocumentSource(
            JsonlReader(config), tokenizer, end_of_document_id=0, seq_len=256, num_documents=count, skip_bad=False
        )
        for count, config in configs.items()
    }
    yield growth("identity over documents: jsonl", {count: source.identity for count, source in sources.items()})


def resume_rows(folder: Path) -> Iterator[Row]:
    """Taking up ``metrics.jsonl`` where a checkpoint left it."""
    event = {"event": "train", "phase": 0, "active_blocks": 1, "active_layers": 3} | {
        f"value_{i}": 1 / 3 for i in range(16)
    }
    runs = {}
    for steps in STEPS:
        path = folder / f"metrics_{steps}.jsonl"
        path.write_text("".join(json.dumps(event | {"step": step}) + "\n" for step in range(1, steps + 1)))

        def take_up(path: Path = path, steps: int = steps) -> None:
            file = EventFile(str(path))
            file.take_up(steps, 0)
            file.close()

        runs[steps] = take_up
    yield growth("resume over steps: metrics.jsonl", runs)


# Ranks: what each of them does alone, over a fake process group.


def _build_student(job_config: JobConfig, ranks: int) -> None:
    args = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
    args.update_from_config(job_config)
    with fake_world(0, ranks):
        dims = data_parallel_dims(job_config, ranks)
        student_on_meta(job_config, args.for_phase(schedule_of(job_config).phases[-1], job_config), dims)


def _layout_of_all(ranks: int) -> None:
    """What a run asks of its layout, for the ranks that ask most."""
    for teachers in (ranks // 2, max(1, ranks // 8), ranks - max(1, ranks // 8)):
        layout = WorldLayout(ranks - teachers, teachers)
        layout.routes()
        layout.students_of(0)
        layout.teachers_of(0)


def _without_cache(best_layout: Callable[[], object]) -> Callable[[], object]:
    """What a first call costs."""

    def call() -> object:
        busiest_documents.cache_clear()
        return best_layout()

    return call


def rank_rows() -> Iterator[Row]:
    config = partial(parse_config, ["--job.config_file", str(ROOT / PAPER_CONFIG)])
    sharded = config()
    yield growth(
        "world and student of 9 layers (meta) over ranks: FSDP",
        {ranks: partial(_build_student, sharded, ranks) for ranks in RANKS},
        FLAT,
    )
    runs = {}
    for ranks in RANKS[3:]:
        replicated = config()
        replicated.parallelism.data_parallel_shard_degree = 8
        replicated.parallelism.data_parallel_replicate_degree = ranks // 8
        runs[ranks] = partial(_build_student, replicated, ranks)
    yield growth("world and student of 9 layers (meta) over ranks: HSDP of 8", runs, BAR)
    yield growth("routes of the two worlds over ranks", {ranks: partial(_layout_of_all, ranks) for ranks in RANKS})
    plan = make_plan(config(), 16, Assumptions(HARDWARE["h100"], mfu=0.4, tokens_per_document=MEAN_TOKENS))
    plans = {ranks: replace(plan, layout=WorldLayout(ranks // 2, ranks // 2)) for ranks in RANKS}
    yield growth(
        "the plan's best division over ranks",
        {ranks: _without_cache(each.best_layout) for ranks, each in plans.items()},
    )


def run() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from step_rows(folder)
        yield from dealing_rows()
        yield from document_rows(folder)
        yield from resume_rows(folder)
        yield from rank_rows()
