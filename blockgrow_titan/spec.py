"""The growth-aware train spec: torchtitan's TrainSpec plus the builders it has no field for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec

from blockgrow_titan.distill.objective import Objective
from blockgrow_titan.documents.batches import DocumentDataLoader, build_collator
from blockgrow_titan.documents.dealing import micro_batching_of
from blockgrow_titan.documents.records import open_tokenizer
from blockgrow_titan.documents.source import source_of
from blockgrow_titan.growth.hooks import PHASE_HOOKS, PhaseHook
from blockgrow_titan.growth.schedule import schedule_of
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.paths import resolve
from blockgrow_titan.teacher.client import TeacherClient, build_teacher_client
from blockgrow_titan.teacher.worlds import World

TeacherClientBuilder = Callable[[JobConfig, World, torch.device], TeacherClient | None]


@dataclass
class GrowthTrainSpec(TrainSpec):
    """What a run is built from; a user's own spec replaces any of it.

    ``build_loss_fn`` gives an ``Objective``: the head applies it, chunk by chunk. ``build_validator_fn`` takes the
    arguments of ``validate.GrowthValidator``.
    """

    build_teacher_client_fn: TeacherClientBuilder = build_teacher_client
    phase_hooks: tuple[type[PhaseHook], ...] = PHASE_HOOKS


def model_args_of(job_config: JobConfig) -> BlockStackArgs:
    """The dimensions that ``model.name`` and ``model.flavor`` stand for."""
    return cast(BlockStackArgs, get_train_spec(job_config.model.name).model_args[job_config.model.flavor])


def build_tokenizer(job_config: JobConfig) -> HuggingFaceTokenizer:
    """The data's tokenizer, from the folder ``model.hf_assets_path``."""
    return open_tokenizer(resolve(job_config.model.hf_assets_path, "model.hf_assets_path"), "model.hf_assets_path")


def build_objective(job_config: JobConfig, **kwargs: object) -> Objective:
    """The objective of ``[distill]`` (Eq. 5 of the paper)."""
    distill = job_config.distill
    return Objective(
        kd_weight=float(distill.kd_weight),
        ce_weight=float(distill.ce_weight),
        temperature=float(distill.temperature),
        chunk_tokens=distill.chunk_tokens,
    )


def build_document_dataloader(
    *, dp_world_size: int, dp_rank: int, tokenizer: HuggingFaceTokenizer, job_config: JobConfig
) -> DocumentDataLoader:
    """The training documents, dealt to this rank.

    The config here may hold torchtitan's multiple of the ranks as ``training.global_batch_size``: the trainer then sets
    the loader's ``global_batch_size`` to what the user configured, and its ``first_step`` before it iterates.
    """
    training = job_config.training
    source = source_of(job_config, tokenizer, "train")
    schedule = schedule_of(job_config)
    return DocumentDataLoader(
        source,
        build_collator(job_config, source.end_of_document_id, training.seq_len),
        micro_batching_of(job_config, "train", model_args_of(job_config).attention_tokens),
        offset_of_step=schedule.data_offset,
        last_step=schedule.total_steps,
        global_batch_size=training.global_batch_size,
        rank=dp_rank,
        world_size=dp_world_size,
        config=training.dataloader,
    )
