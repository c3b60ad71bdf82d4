"""What the plugin costs over torchtitan itself: the same model, batches and loss, step by step in turn in one job.

    stock     torchtitan's Trainer and Qwen3, made to run without an accelerator by the overrides of infra/device.py and
              plain sums in gloo's reduce-scatter, as in infra/parallelize.py
    plugin    GrowthTrainer without a teacher, in packed rows (the default) and in micro-batches by count

Nine layers, cross-entropy only, pre-norm as in Qwen3, FSDP2 on two ranks; all documents have one length, so that nobody
pads. Both sides read the same text through this package's loader, of which the stock trainer gets its micro-batches by
count, and both report as usual: the stock one every ``metrics.log_freq`` steps, the plugin also a line of
``metrics.jsonl`` for every step. All start with the same weights, and their losses are compared at every step.
"""

import contextlib
import copy
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.models.qwen3 as titan_qwen3
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools.utils import device_type
from torchtitan.train import Trainer

from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import FLAVORS
from blockgrow_titan.model.init import named_parameters
from blockgrow_titan.parse import parse_config
from blockgrow_titan.paths import resolve
from blockgrow_titan.spec import build_document_dataloader, build_tokenizer
from blockgrow_titan.trainer import GrowthTrainer
from tools.benchmarks.jobs import arguments, record_reports, synchronize, with_trainer
from tools.benchmarks.ranks import run_ranks
from tools.benchmarks.rows import Row, at_most

SUBJECT = "overhead"
BAR = 1.03
PAIRS = 40
WARMUP_STEPS = 3
SEQ_LEN = 130
"""Token ids of a document; one fewer is predicted. torchtitan wants an even number."""
CHARACTERS = 700
"""Of a document's text: more than SEQ_LEN tokens."""
DOCUMENTS = 200
LOSS_TOLERANCE = 1e-5
COMPARED_STEPS = 5
"""Steps whose losses must agree; later, the optimizer has made rounding into a difference of the weights."""
STOCK = "torchtitan"
KINDS = ("packed", "count")
STOCK_SPEC = "qwen3_benchmark"


def _parallelize(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """torchtitan's own, and what gloo needs."""
    model = titan_qwen3.parallelize_qwen3(model, parallel_dims, job_config)
    if device_type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


class _PlainLoader:
    """This rank's micro-batches by count, in the form that torchtitan's trainer takes."""

    def __init__(self, job_config: JobConfig, **arguments: Any) -> None:
        self.loader = build_document_dataloader(job_config=job_config, **arguments)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for input_dict, labels in self.loader:
            yield {"input": input_dict["input"]}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is no state."""


def stock_trainer(job_config: JobConfig) -> Trainer:
    """torchtitan's trainer of its Qwen3 with a job's dimensions and settings. The default process group must exist."""
    plugin_config = copy.deepcopy(job_config)
    plugin_config.documents.micro_batching = "count"
    student = FLAVORS[job_config.model.flavor]
    student.update_from_config(job_config)
    flavor = Qwen3ModelArgs(**{name: getattr(student, name) for name in vars(Qwen3ModelArgs())})
    spec = replace(
        titan_qwen3.get_train_spec(),
        model_args={"benchmark": flavor},
        parallelize_fn=_parallelize,
        build_dataloader_fn=lambda *, job_config, **given: _PlainLoader(plugin_config, **given),
        build_tokenizer_fn=build_tokenizer,
        build_validator_fn=None,
        state_dict_adapter=None,
    )
    with contextlib.suppress(ValueError):  # registered already
        register_train_spec(STOCK_SPEC, spec)
    config = copy.deepcopy(job_config)
    config.model.name, config.model.flavor = STOCK_SPEC, "benchmark"
    return Trainer(config)


class Side:
    """A trainer whose steps are taken one by one.

    Attributes:
        seconds: Of every step.
        losses: Of every step, over all ranks.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.batches = trainer.batch_generator(trainer.dataloader)

    def step(self) -> None:
        """Take a step, with the metrics of it, while the clock runs; then note its loss."""
        self.trainer.step += 1
        synchronize()
        started = time.perf_counter()
        self.trainer.train_step(self.batches)
        synchronize()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(self.loss())

    def loss(self) -> float:
        """Of the last step, over all ranks."""
        raise NotImplementedError


class StockSide(Side):
    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.recent: list[torch.Tensor] = []
        forward_backward_step = trainer.forward_backward_step

        def recorded(**kwargs: Any) -> torch.Tensor:
            self.recent.append(forward_backward_step(**kwargs))
            return self.recent[-1]

        trainer.forward_backward_step = recorded

    def loss(self) -> float:
        total = torch.stack([loss.detach() for loss in self.recent]).sum()
        self.recent.clear()
        dist.all_reduce(total)
        return float(total)


class PluginSide(Side):
    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.reports = record_reports(trainer)

    def loss(self) -> float:
        return self.reports[-1].loss


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give a model the parameters of another with the same names, sharded in the same way."""
    given = dict(named_parameters(source))
    taken = dict(named_parameters(target))
    assert given.keys() == taken.keys(), given.keys() ^ taken.keys()
    with torch.no_grad():
        for name, parameter in taken.items():
            parameter.copy_(given[name])


def take_turns(sides: Sequence[Side], rounds: int) -> None:
    """One step of each side a round; each side is the first of a round as often as the others."""
    for turn in range(rounds):
        first = turn % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            side.step()


def command_line(folder: Path, kind: str, steps: int, **overrides: Any) -> list[str]:
    """The plugin's job."""
    given: dict[str, Any] = {
        "block_stack__placement": "pre",
        "block_stack__num_blocks": 3,
        "block_stack__layers_per_block": 3,
        "growth__phase_steps": [steps],
        "growth__active_blocks": [3],
        "teacher__path": "",
        "distill__kd_weight": 0,
        "distill__ce_weight": 1,
        "documents__micro_batching": kind,
        "training__dataset_path": folder / "documents.jsonl",
        "training__seq_len": SEQ_LEN,
        "training__local_batch_size": 4,
        "training__global_batch_size": 8,
        "training__steps": steps,
    }
    return arguments(folder / kind, **given | overrides)


def write_documents(path: Path, count: int = DOCUMENTS) -> None:
    """Documents of the bundled corpus that are longer than the model's rows."""
    corpus = Path(resolve("package:blockgrow_titan/assets/corpus/austen_train.jsonl"))
    text = " ".join(json.loads(line)["text"] for line in corpus.read_text().splitlines())
    pieces = (text[i * CHARACTERS : (i + 1) * CHARACTERS] for i in range(count))
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))


def measure_sides(
    rank: int, world_size: int, folder: str, rounds: int, overrides: dict[str, Any] | None = None
) -> dict[str, dict[str, list[float]]] | None:
    """Seconds and losses of the steps of each side, on one rank of the job."""
    lines = {kind: command_line(Path(folder), kind, rounds + 10, **overrides or {}) for kind in KINDS}

    def measure(packed: Any) -> dict[str, dict[str, list[float]]]:
        count = GrowthTrainer(parse_config(lines["count"]), packed.world)
        count.metrics_processor.start(count.schedule, count.phase, 0)
        stock = stock_trainer(parse_config(lines["count"]))
        for other in (count, stock):
            copy_weights(packed.model_parts[0], other.model_parts[0])
        sides = {STOCK: StockSide(stock), "packed": PluginSide(packed), "count": PluginSide(count)}
        take_turns([*sides.values()], rounds)
        count.close()
        return {name: {"seconds": side.seconds, "losses": side.losses} for name, side in sides.items()}

    return with_trainer(measure, lines["packed"])


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of two sides' losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def interval_of_median(values: Sequence[float], resamples: int = 4000) -> tuple[float, float]:
    """The middle 95% of the medians of resamples with replacement (the percentile bootstrap), always the same ones."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[round(0.025 * resamples)], medians[round(0.975 * resamples) - 1]


def rows_of(sides: dict[str, dict[str, list[float]]]) -> Iterator[Row]:
    """The figures from what ``measure_sides`` returned.

    Raises:
        AssertionError: If the losses of the first steps differ: the sides would not compute the same.
    """
    stock = sides[STOCK]
    yield Row(SUBJECT, "step of torchtitan", statistics.median(stock["seconds"][WARMUP_STEPS:]), "s")
    for kind in KINDS:
        side = sides[kind]
        early = largest_difference(side["losses"][:COMPARED_STEPS], stock["losses"][:COMPARED_STEPS])
        assert early <= LOSS_TOLERANCE, f"{kind}: losses differ by {early:.1e}: {side['losses']} {stock['losses']}"
        pairs = zip(side["seconds"][WARMUP_STEPS:], stock["seconds"][WARMUP_STEPS:], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        low, high = interval_of_median(ratios)
        overall = sum(side["seconds"][WARMUP_STEPS:]) / sum(stock["seconds"][WARMUP_STEPS:])
        includes = f", which includes {BAR}" if low <= BAR <= high else ""
        note = (
            f"95% interval {low:.3f} to {high:.3f}{includes}; {len(ratios)} pairs; whole time {overall:.3f}; losses within "
            f"{early:.1e} in {COMPARED_STEPS} steps, {largest_difference(side['losses'], stock['losses']):.1e} in all"
        )
        yield at_most(SUBJECT, f"step over torchtitan's: {kind}", statistics.median(ratios), "x", BAR, note)


def run() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        write_documents(Path(name, "documents.jsonl"))
        ranks = run_ranks("tools.benchmarks.overhead:measure_sides", 2, folder=name, rounds=WARMUP_STEPS + PAIRS)
    yield from rows_of(ranks[0])
