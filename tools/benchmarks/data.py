"""The input pipeline against the training that it feeds, and how long it takes to start late in a run.

    documents -> lengths of the step's documents -> dealing -> ids -> tensors -> micro-batches of one rank

Rates are of one rank's loader with all that a step needs, and of real steps of ``train_configs/grow_post.toml`` in its
first phase, the fastest to train, on two ranks. At the paper's size the training's rate is that of ``tools/plan.py``
(``train_configs/qwen3_8b/grow_post.toml``, 16 H100, first phase), and the documents are the bundled corpus cut to lengths
like those of the paper. Where documents are tokenised as they are read, every rank tokenises all of a step's, whose
lengths the dealing looks at; ahead-of-time tokens have their lengths beside them.
"""

import contextlib
import io
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from torchtitan.components.loss import IGNORE_INDEX

from blockgrow_titan.documents.batches import DocumentDataLoader
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.parse import parse_config
from blockgrow_titan.paths import resolve
from blockgrow_titan.planning import HARDWARE, Assumptions, Plan, make_plan
from blockgrow_titan.spec import build_document_dataloader, build_tokenizer
from tools.benchmarks.jobs import BASE_CONFIG, arguments, record_reports, with_trainer
from tools.benchmarks.ranks import ROOT, run_ranks
from tools.benchmarks.rows import Row, at_least, at_most, interleaved, median_ratio

SUBJECT = "data"
BAR = 10
TRAIN_STEPS = 15
LATE = 1_000_000
START_REPEATS = 31
PAPER_CONFIG = "train_configs/qwen3_8b/grow_post.toml"
PAPER_RANKS = 16
PAPER_TOKENS = 972
"""Mean tokens of a document of the paper's."""
PAPER_DOCUMENTS = 1024
RANKS = (1, 8, 64)


def training_rate(rank: int, world_size: int, folder: str) -> dict[str, float] | None:
    """Tokens, documents and seconds of a step of the tiny config's first phase, on a student's rank."""

    def measure(trainer: Any) -> dict[str, float]:
        reports = record_reports(trainer)
        data_iterator = trainer.batch_generator(trainer.dataloader)
        for trainer.step in range(1, TRAIN_STEPS + 1):
            trainer.train_step(data_iterator)
        reports = reports[3:]  # the first make the optimizer's state and fill the look-ahead
        return {
            "tokens": statistics.mean(report.valid_tokens for report in reports),
            "documents": trainer.job_config.training.global_batch_size,
            "seconds": statistics.median(report.step_s for report in reports),
        }

    steps = {"training__steps": TRAIN_STEPS + 10, "growth__phase_steps": [TRAIN_STEPS + 10]}
    return with_trainer(measure, arguments(Path(folder), growth__active_blocks=[1], **steps))


def tiny_config(steps: int = 2 * LATE, **training: Any) -> JobConfig:
    """The tiny config as one phase of so many steps."""
    job_config = parse_config(["--job.config_file", str(BASE_CONFIG)])
    job_config.training.steps = steps
    job_config.growth.phase_steps, job_config.growth.active_blocks = [], []
    for name, value in training.items():
        setattr(job_config.training, name, value)
    return job_config


def loader_of(job_config: JobConfig, workers: int = 0, world_size: int = 1) -> DocumentDataLoader:
    """The loader of rank 0 as a run builds it."""
    job_config.training.dataloader.num_workers = workers
    return build_document_dataloader(
        dp_world_size=world_size, dp_rank=0, tokenizer=build_tokenizer(job_config), job_config=job_config
    )


def pretokenize(job_config: JobConfig, config: Path, folder: Path) -> None:
    """Tokenise a config's training documents ahead of time, and point the config to them."""
    from tools.prepare_data import main

    training = job_config.training
    given = ["--training.dataset_path", training.dataset_path, "--training.seq_len", str(training.seq_len)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = main([str(config), str(folder), "--split", "train", *given])
    assert status == 0, f"prepare_data ended with status {status}"
    training.dataset, training.dataset_path = "pretokenized", str(folder / "train")


def read_steps(loader: DocumentDataLoader, steps: int, first_step: int = 1) -> int:
    """Take the micro-batches of some steps; returns their valid tokens."""
    tokens = 0
    micro_batches = loader.iterate_from(first_step)
    for _ in range(steps):
        last_of_step = False
        while not last_of_step:
            input_dict, labels = next(micro_batches)
            tokens += int((labels != IGNORE_INDEX).sum())
            last_of_step = input_dict["last_of_step"]
    return tokens


def loader_rows(folder: Path) -> Iterator[Row]:
    """What a rank's loader delivers at the tiny config, against what training takes."""
    ranks = run_ranks("tools.benchmarks.data:training_rate", 2, folder=str(folder / "job"))
    train = next(result for result in ranks if result is not None)
    consumed = train["tokens"] / train["seconds"]
    yield Row(SUBJECT, "tiny: training takes", consumed, "tokens/s", note="first phase, two ranks")
    ahead_of_time = tiny_config()
    pretokenize(ahead_of_time, BASE_CONFIG, folder / "tiny")
    steps = 200
    loaders = {
        f"{what}, {workers} workers": loader_of(config, workers)
        for what, config in (("text", tiny_config()), ("ahead of time", ahead_of_time))
        for workers in (0, 2)
    }
    tokens = {name: read_steps(loader, steps) for name, loader in loaders.items()}
    assert len(set(tokens.values())) == 1, f"the same documents, but {tokens} tokens"
    seconds = interleaved({name: partial(read_steps, loader, steps) for name, loader in loaders.items()})
    for name, loader in loaders.items():
        second = statistics.median(seconds[name])
        rate, documents = tokens[name] / second, steps * loader.global_batch_size / second
        note = f"{rate:,.0f} tokens/s, {documents:,.0f} documents/s, start of the workers included"
        yield at_least(SUBJECT, f"tiny: loader over training: {name}", rate / consumed, "x", BAR, note)


def late_step(loader: DocumentDataLoader) -> int:
    """A step near ``LATE`` with the documents of step 1."""
    return 1 + len(loader.source) * round(LATE / len(loader.source))


def start_rows(folder: Path) -> Iterator[Row]:
    """How long the first micro-batch takes at the first step and late in a run, both with the same documents."""
    for what in ("text", "ahead of time"):
        job_config = tiny_config()
        if what != "text":
            pretokenize(job_config, BASE_CONFIG, folder / "start")
        loader = loader_of(job_config)
        late = late_step(loader)

        def first(step: int, loader: DocumentDataLoader = loader) -> None:
            next(loader.iterate_from(step))

        seconds = interleaved({"early": partial(first, 1), "late": partial(first, late)}, START_REPEATS, warmups=3)
        early = statistics.median(seconds["early"])
        ratio = median_ratio(seconds["late"], seconds["early"])
        note = f"{1e3 * early:.1f} ms at step 1"
        yield at_most(SUBJECT, f"first micro-batch at step {late:,} over step 1: {what}", ratio, "x", 1.1, note)


def paper_plan() -> Plan:
    """The plan of the paper's run on H100s."""
    return make_plan(
        parse_config(["--job.config_file", str(ROOT / PAPER_CONFIG)]),
        PAPER_RANKS,
        Assumptions(HARDWARE["h100"], mfu=0.4, tokens_per_document=PAPER_TOKENS),
    )


def write_documents(path: Path, seq_len: int, count: int = PAPER_DOCUMENTS) -> None:
    """Documents of log-normal lengths around the paper's mean, made of the bundled corpus."""
    corpus = Path(resolve("package:blockgrow_titan/assets/corpus/austen_train.jsonl"))
    text = "\n\n".join(json.loads(line)["text"] for line in corpus.read_text().splitlines())
    characters = len(text) / len(build_tokenizer(tiny_config()).encode(text, add_bos=False, add_eos=False))
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(PAPER_TOKENS) - 0.5, 1.0, count), 16, seq_len) * characters
    starts = rng.integers(0, len(text) - int(lengths.max()), count)
    with open(path, "w") as file:
        for start, length in zip(starts.tolist(), lengths.astype(int).tolist(), strict=True):
            file.write(json.dumps({"text": text[start : start + length]}) + "\n")


def paper_rows(folder: Path) -> Iterator[Row]:
    """Seconds that a rank's loader takes for a step of the paper's, against the step's own time."""
    plan = paper_plan()
    training = plan.job_config.training
    step_s = max(plan.world_seconds(plan.phases[0].step))
    yield Row(
        SUBJECT,
        "paper: training takes",
        plan.step_tokens / step_s,
        "tokens/s",
        note=f"{plan.step_tokens / step_s / plan.layout.num_students:,.0f} a student's rank: {PAPER_RANKS} H100 at 40% "
        f"of their peak, by the plan; a step of {training.global_batch_size} documents in {step_s:.2f} s",
    )
    write_documents(folder / "paper.jsonl", training.seq_len)
    text = tiny_config(
        dataset_path=str(folder / "paper.jsonl"),
        seq_len=training.seq_len,
        local_batch_size=training.local_batch_size,
        global_batch_size=training.global_batch_size,
    )
    ahead_of_time = tiny_config(**{name: getattr(text.training, name) for name in vars(training)})
    pretokenize(ahead_of_time, BASE_CONFIG, folder / "paper")
    students = plan.layout.num_students
    runs: dict[str, Callable[[], int]] = {}
    steps = 4
    for what, config in (("text", text), ("ahead of time", ahead_of_time)):
        for world_size in RANKS:
            loader = loader_of(config, world_size=world_size)
            runs[f"{what}, rank 0 of {world_size}"] = partial(read_steps, loader, steps)
    seconds = interleaved(runs)
    for name, taken in seconds.items():
        of_step = statistics.median(taken) / steps
        note = f"{1e3 * of_step:.1f} ms for its share of a step; one process, no workers"
        if f"of {students}" == name[-len(f"of {students}") :]:
            yield at_least(SUBJECT, f"paper: loader over training: {name}", step_s / of_step, "x", BAR, note)
        else:
            yield Row(
                SUBJECT,
                f"paper: step over loader, the step's time of {students}: {name}",
                step_s / of_step,
                "x",
                note=note,
            )


def run() -> Iterator[Row]:
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": "false"}),  # one core a loader, as where all ranks load
    ):
        folder = Path(name)
        yield from loader_rows(folder)
        yield from start_rows(folder)
        yield from paper_rows(folder)
