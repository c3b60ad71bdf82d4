"""Real jobs inside a benchmark's ranks: what they read, and their trainer, handed over where it would start to train.

``with_trainer`` goes the way of the launcher (config, worlds, student or teacher), so that what is measured is what runs.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

from blockgrow_titan.metrics import StepReport
from blockgrow_titan.model.args import FLAVORS, BlockStackArgs
from blockgrow_titan.parse import parse_config
from blockgrow_titan.paths import resolve
from blockgrow_titan.teacher.worlds import rendezvous
from blockgrow_titan.train import launch
from tools.benchmarks.ranks import ROOT

Result = TypeVar("Result")

BASE_CONFIG = ROOT / "train_configs" / "grow_post.toml"
QWEN3_VOCAB = 151_936
_tiny = FLAVORS["tiny"]
_tiny.vocab_size = QWEN3_VOCAB
FLAVORS["tiny_qwen3_vocab"] = _tiny  # for a benchmark only: the tiny dimensions under Qwen3's vocabulary


def hf_config(args: BlockStackArgs, layers: int) -> Any:
    """The ``Qwen3Config`` of these dimensions, with untied embeddings."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.hidden_dim,
        num_hidden_layers=layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.max_seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": args.rope_theta},
        rms_norm_eps=args.norm_eps,
        tie_word_embeddings=False,
    )


def write_teacher(folder: Path, layers: int, vocab_size: int = 4096) -> Path:
    """A random Qwen3 of the tiny flavor's dimensions in Hugging Face format, with the bundled tokenizer."""
    from transformers import Qwen3ForCausalLM

    args = FLAVORS["tiny"]  # a copy
    args.vocab_size = vocab_size
    config = hf_config(args, layers)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve(f"package:blockgrow_titan/assets/tokenizer/{name}", "tokenizer"), folder / name)
    return folder


def arguments(folder: Path, **overrides: Any) -> list[str]:
    """The command line of a job that writes to ``folder / "out"``, without validation and checkpoints.

    Overrides of ``train_configs/grow_post.toml`` are ``section__field=value``.
    """
    result = ["--job.config_file", str(BASE_CONFIG), "--job.dump_folder", str(folder / "out")]
    result += ["--validation.no-enable", "--checkpoint.no-enable", "--metrics.no-enable_tensorboard"]
    for name, value in overrides.items():
        values = value if isinstance(value, list) else [value]
        result += [f"--{name.replace('__', '.')}", *map(str, values)]
    return result


def with_trainer(measure: Callable[[Any], Result], command_line: Sequence[str]) -> Result | None:
    """Run this rank's share of a job; instead of being trained, its trainer is given to ``measure``.

    Returns:
        What ``measure`` returned; None on a teacher's rank, which serves until the students stop.
    """
    from blockgrow_titan.trainer import GrowthTrainer

    results: list[Result] = []

    class Measured(GrowthTrainer):
        def train(self) -> None:
            self.metrics_processor.start(self.schedule, self.phase, 0)
            results.append(measure(self))
            if self.teacher is not None:
                self.teacher.close()

    with mock.patch("blockgrow_titan.trainer.GrowthTrainer", Measured):
        launch(parse_config(list(command_line)), *rendezvous())
    return results[0] if results else None


def record_reports(trainer: Any) -> list[StepReport]:
    """A list that every step of a trainer extends by its report."""
    reports: list[StepReport] = []
    log_step = trainer.metrics_processor.log_step

    def record(step: int, report: StepReport, student_ranks: int) -> None:
        reports.append(report)
        log_step(step, report, student_ranks)

    trainer.metrics_processor.log_step = record
    return reports


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
