"""Validation: total loss over total tokens, over every document of the set (invariant 8).

The whole set is dealt to the ranks like a training batch, every rank runs the same number of micro-batches (empty ones
where the set does not divide), and the sums are float64. So any world size and batch size agree, the same layout run
twice is bit-equal, and uneven ranks never hang. torchtitan's validator averages batch means instead.
"""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import BaseValidator
from torchtitan.tools.logging import logger

from blockgrow_titan.diagnostics.recorder import Diagnostics
from blockgrow_titan.distill.head import LossTargets
from blockgrow_titan.distill.objective import Objective
from blockgrow_titan.documents.batches import Batch, build_collator, lengths_of
from blockgrow_titan.documents.dealing import micro_batching_of
from blockgrow_titan.documents.source import source_of
from blockgrow_titan.growth.schedule import GrowthSchedule
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.metrics import GrowthMetricsProcessor, perplexity
from blockgrow_titan.spec import model_args_of
from blockgrow_titan.teacher.client import TeacherClient


class GrowthValidator(BaseValidator):
    """Evaluates the student, with the training objective's ce and, with a teacher, kl and kd.

    Args:
        job_config: The job's config: ``validation``, ``documents`` and ``teacher.prefetch``.
        dp_rank: This rank among the student's ranks.
        dp_world_size: The student's ranks.
        tokenizer: The data's tokenizer.
        objective: The training objective.
        schedule: Phases; every phase's last step is validated.
        teacher: The teacher's client or None.
        metrics_processor: Where results are logged.
        device: Where the student is.
    """

    def __init__(
        self,
        job_config: JobConfig,
        *,
        dp_rank: int,
        dp_world_size: int,
        tokenizer: HuggingFaceTokenizer,
        objective: Objective,
        schedule: GrowthSchedule,
        teacher: TeacherClient | None,
        metrics_processor: GrowthMetricsProcessor,
        device: torch.device,
    ) -> None:
        super().__init__(job_config)
        self.source = source_of(job_config, tokenizer, "validation")
        self.collate = build_collator(job_config, self.source.end_of_document_id, job_config.validation.seq_len)
        micro_batching = micro_batching_of(job_config, "validation", model_args_of(job_config).attention_tokens)
        lengths = (
            self._lengths(dp_rank, dp_world_size, device) if micro_batching.needs_lengths else [0] * len(self.source)
        )
        self.batches = micro_batching.deal(lengths, dp_world_size)[dp_rank]
        self.objective, self.teacher, self.device = objective, teacher, device
        self.metrics_processor = metrics_processor
        self.last_steps = {phase.last_step for phase in schedule.phases}
        self.diagnostics = Diagnostics(job_config, self.source, device) if job_config.diagnostics.enable else None
        self.gradient_norms: dict[str, Any] | None = None  # of the last training step, if the trainer took them

    def _lengths(self, rank: int, world_size: int, device: torch.device) -> list[int]:
        """The lengths of all documents; where the reader does not know them, each rank tokenises its share."""
        documents = range(len(self.source))
        known = lengths_of(self.source, documents)
        if known is not None:
            return known
        lengths = torch.zeros(len(documents), dtype=torch.int64)
        for i in documents[rank::world_size]:
            lengths[i] = len(self.source[i]) - 1
        lengths = lengths.to(device)
        dist.all_reduce(lengths)
        return lengths.tolist()

    def should_validate(self, step: int) -> bool:
        """Every ``validation.freq`` steps and at the last step of each phase."""
        return step in self.last_steps or step % self.job_config.validation.freq == 0

    def _micro_batches(self) -> Iterator[Batch]:
        """Micro-batches with their teacher's "ticket", the teacher working up to ``teacher.prefetch`` ahead."""
        ahead: deque[Batch] = deque()
        for documents in self.batches:
            input_dict, labels = self.collate([self.source[i] for i in documents])
            ticket = None
            if self.teacher:
                ticket = self.teacher.submit(input_dict["input"], labels, input_dict.get("document_lengths"))
            ahead.append(({**input_dict, "ticket": ticket}, labels))
            if len(ahead) > self.job_config.teacher.prefetch:
                yield ahead.popleft()
        yield from ahead

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> dict[str, Any]:
        """Evaluate on every document and log the result; then, if enabled, take and log the diagnostics.

        Returns:
            ``{"loss", "ce", "ppl", "kl", "kd", "valid_tokens", "documents"}``: means per valid token over the set;
            kl and kd are None without a teacher.
        """
        (model,) = model_parts
        started = time.perf_counter()
        model.eval()
        sums = torch.zeros(5, dtype=torch.float64, device=self.device)  # loss, ce, kl, kd, valid tokens
        for input_dict, labels in self._micro_batches():
            labels = labels.to(self.device)
            targets = LossTargets(
                labels=labels,
                objective=self.objective,
                scale=1.0,
                teacher_hidden=self.teacher.result(input_dict["ticket"]) if self.teacher else None,
                teacher_head=self.teacher.head_weight if self.teacher else None,
            )
            losses = model(input_dict["input"].to(self.device), targets, input_dict.get("document_lengths"))
            valid = (labels != IGNORE_INDEX).sum()
            sums += torch.stack([losses.loss, losses.ce, losses.kl, losses.kd, valid]).double()
        dist.all_reduce(sums)
        if self.teacher:
            self.teacher.pop_wait_seconds()  # training's figure must not hold validation's waiting
        result = self._result(sums.tolist(), step)
        self.metrics_processor.log_validation(step, result, time.perf_counter() - started)
        if self.diagnostics:
            self._diagnose(model, step)
        model.train()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward, head and root stay gathered; a save or growth now needs shards
        return result

    def _diagnose(self, model: nn.Module, step: int) -> None:
        assert self.diagnostics is not None
        started = time.perf_counter()
        record = self.diagnostics.measure(model, self.gradient_norms)
        self.gradient_norms = None  # a validation right after growth has none: the deeper model has not trained yet
        self.metrics_processor.log_diagnostics(step, record, time.perf_counter() - started)

    def _result(self, sums: list[float], step: int) -> dict[str, Any]:
        *totals, tokens = sums
        if tokens == 0:
            logger.warning("The validation set has no token to predict: every document is empty")
        loss, ce, kl, kd = (total / max(tokens, 1) for total in totals)
        with_teacher = self.teacher is not None
        return {
            "loss": loss,
            "ce": ce,
            "ppl": perplexity(ce),
            "kl": kl if with_teacher else None,
            "kd": kd if with_teacher else None,
            "valid_tokens": int(tokens),
            "documents": len(self.source),
        }
