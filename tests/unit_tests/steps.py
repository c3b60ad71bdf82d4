"""Single training steps inside the pool's ranks, and the same step by a plain model in float64.

``take_steps`` is a function for ``rank_pool.run``: it opens the real trainer, runs some of its steps, and returns their
reports with whole gradients and parameters. ``plain_step`` is the reference: one process, one document at a time without
padding, full logits of an unsharded student and of transformers' teacher, and autograd. ``write_teacher`` and
``write_texts`` give both the same input.
"""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo import OptimizedModule
from torchtitan.components.loss import IGNORE_INDEX

from tests.unit_tests.jobs import JOB_VOCAB, WORDS, arguments, full_gradients, full_parameters, open_trainer
from tests.unit_tests.models import save_hf_teacher, small_model

SEQ_LEN, SEED = 24, 7  # those of the base config in jobs.py
COUNTS = [3, 7, 0, 1, 20, 2, 5, 9]  # words of a global batch's documents: uneven, one empty, one truncated

Batch = tuple[dict[str, Any], torch.Tensor]


def write_teacher(workspace: Path, folder: Path, tied: bool = False) -> Path:
    """A teacher with an opinion: weights so large that its distribution is far from uniform, and from the student's."""
    model = save_hf_teacher(folder, vocab_size=JOB_VOCAB, tie_word_embeddings=tied)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 2:
                param.copy_(0.3 * torch.randn(param.shape, generator=generator))
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(workspace / "tokenizer" / file, folder / file)
    return folder


def write_texts(path: Path, counts: list[int], seed: int = 0) -> list[str]:
    """Write documents of so many words each; returns their texts."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=count)) for count in counts]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def step_arguments(workspace: Path, folder: Path, steps: int = 1, blocks: int = 2, **overrides: Any) -> list[str]:
    """The command line for ``take_steps``: one phase, neither checkpoints nor validation, gradients never clipped."""
    fixed = {
        "training__steps": steps,
        "growth__phase_steps": [steps],
        "growth__active_blocks": [blocks],
        "training__max_norm": 1e9,
        "checkpoint__enable": False,
        "validation__enable": False,
    }
    return arguments(workspace, folder, **(fixed | overrides))


@contextmanager
def opened(rank: int, world_size: int, store: dist.Store, args: list[str]) -> Iterator[Any]:
    """The trainer of a student rank, closed with its teacher at the end; None on a teacher rank, once it has served."""
    trainer = open_trainer(rank, world_size, store, args)
    if trainer is None:
        yield None
        return
    try:
        yield trainer
        if trainer.teacher is not None:
            trainer.teacher.close()
    except Exception as error:
        if trainer.teacher is not None:
            trainer.teacher.close(error=str(error))
        raise
    finally:
        trainer.close()
        trainer.world.close()


def run_steps(
    trainer: Any,
    steps: int = 1,
    change: Callable[[Iterable[Batch]], Iterable[Batch]] = iter,
    after: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Train as ``GrowthTrainer.train`` does within a phase; returns what it reports of each step.

    ``change`` may alter the loader's micro-batches before anyone sees them; ``after`` runs after every step.
    """
    reports: list[dict[str, Any]] = []
    trainer.metrics_processor.log_step = lambda step, report, ranks: reports.append(dataclasses.asdict(report))
    batches = trainer.batch_generator(change(trainer.dataloader))
    for _ in range(steps):
        trainer.step += 1
        trainer.train_step(batches)
        after()
    return reports


def take_steps(
    rank: int,
    world_size: int,
    store: dist.Store,
    args: list[str],
    steps: int = 1,
    pad_id: int | None = None,
    noise_seed: int | None = None,
) -> dict[str, Any] | None:
    """A pool function: some steps of the trainer.

    Args:
        args: From ``step_arguments``.
        steps: How many.
        pad_id: Fills the padding instead of the end of document.
        noise_seed: If given, the inputs at ignored positions are drawn at random.

    Returns:
        On student ranks "reports" (one a step), "parameters" (before the first step and after each), "gradients" of the
        last step, "micro_batches" (forwards of this rank) and "compiled_layers".
    """

    def noisy(batches: Iterable[Batch]) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(noise_seed)
        for input_dict, labels in batches:
            noise = torch.randint(JOB_VOCAB, labels.shape, generator=generator)
            yield {**input_dict, "input": torch.where(labels == IGNORE_INDEX, noise, input_dict["input"])}, labels

    with opened(rank, world_size, store, args) as trainer:
        if trainer is None:
            return None
        if pad_id is not None:
            trainer.dataloader.collator.pad_id = pad_id
        (model,) = trainer.model_parts
        parameters = [full_parameters(model)]
        forwards = []
        model.register_forward_pre_hook(lambda *_: forwards.append(1))
        reports = run_steps(
            trainer,
            steps,
            change=iter if noise_seed is None else noisy,
            after=lambda: parameters.append(full_parameters(model)),
        )
        return {
            "reports": reports,
            "parameters": parameters,
            "gradients": full_gradients(model),
            "micro_batches": len(forwards),
            "compiled_layers": sum(isinstance(layer, OptimizedModule) for layer in model.layers.values()),
        }


@dataclasses.dataclass(frozen=True)
class PlainStep:
    """The reference: means over valid tokens, and the gradients of ``loss``."""

    loss: float
    ce: float
    kl: float
    kd: float
    lengths: list[int]
    gradients: dict[str, np.ndarray]


def document_ids(workspace: Path, text: str) -> torch.Tensor:
    """A document as transformers' tokenizer reads it, its end appended, truncated."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(workspace / "tokenizer")
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return torch.tensor(ids[:SEQ_LEN])


def plain_student(placement: str, blocks: int, teacher: Any) -> Any:
    """An unsharded student as it starts, in float64; embedding, head and boundary norm are the teacher's, if any."""
    changes = {"vocab_size": JOB_VOCAB, "seed": SEED, "train_embedding": teacher is None}
    student = small_model(placement, blocks, **changes).double()
    if teacher is not None:
        with torch.no_grad():
            student.tok_embeddings.weight.copy_(teacher.get_input_embeddings().weight)
            student.output.weight.copy_(teacher.get_output_embeddings().weight)
            student.norm.weight.copy_(teacher.model.norm.weight)
    return student


def plain_step(
    workspace: Path,
    teacher_folder: Path | None,
    texts: list[str],
    placement: str = "post",
    blocks: int = 2,
    kd_weight: float = 0.7,
    ce_weight: float = 0.3,
    temperature: float = 1.0,
) -> PlainStep:
    """Loss and gradients of the student's first step on these documents (Eq. 5, over all valid tokens)."""
    from transformers import Qwen3ForCausalLM

    teacher = None
    if teacher_folder is not None:
        teacher = Qwen3ForCausalLM.from_pretrained(teacher_folder, dtype=torch.float64).eval()
    student = plain_student(placement, blocks, teacher)
    ce = kl = kd = torch.zeros((), dtype=torch.float64)
    lengths = []
    for text in texts:
        ids = document_ids(workspace, text)
        inputs, labels = ids[None, :-1], ids[1:]
        lengths.append(len(labels))
        if not len(labels):
            continue
        logits = student(inputs)[0]
        ce = ce + F.cross_entropy(logits, labels, reduction="sum")
        if teacher is not None:
            with torch.no_grad():
                teacher_log_probs = F.log_softmax(teacher(inputs).logits[0] / temperature, -1)
            log_probs = F.log_softmax(logits / temperature, -1)
            kl = kl + F.kl_div(log_probs, teacher_log_probs, log_target=True, reduction="sum")
            kd = kd - (teacher_log_probs.exp() * log_probs).sum()
    ce, kl, kd = (value / sum(lengths) for value in (ce, kl, kd))
    loss = kd_weight * temperature**2 * kl + ce_weight * ce
    loss.backward()
    return PlainStep(
        *(value.item() for value in (loss, ce, kl, kd)),
        lengths=lengths,
        gradients={n: p.grad.numpy() for n, p in student.named_parameters() if p.grad is not None},
    )


def assert_same_gradients(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], rel: float = 1e-5) -> None:
    """||got - expected|| <= rel * ||expected|| for every parameter."""
    assert got.keys() == expected.keys()
    for fqn, gradient in expected.items():
        error = np.linalg.norm(got[fqn].astype(np.float64) - gradient)
        assert error <= rel * np.linalg.norm(gradient), f"{fqn}: {error} of {np.linalg.norm(gradient)}"


def assert_step_is(result: dict[str, Any], expected: PlainStep) -> None:
    """The first step of ``take_steps`` is the reference's: losses within 1e-6, gradients within 1e-5."""
    (report,) = result["reports"]
    assert report["valid_tokens"] == sum(expected.lengths)
    assert report["loss"] == pytest.approx(expected.loss, rel=1e-6)
    for name in ("ce", "kl", "kd"):
        assert (report[name] or 0.0) == pytest.approx(getattr(expected, name), rel=1e-6), name
    assert_same_gradients(result["gradients"], expected.gradients)
