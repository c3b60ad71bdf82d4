"""The growth manifest: what a run is, written into every checkpoint and checked on resume.

``config`` holds the fields that decide the trajectory (what is trained, on what, in which order). Fields that only
decide how fast it goes (ranks, micro-batches, prefetch, compile, logging) are left out, so that a run may resume on
another machine. A run whose config no longer matches stops and says which field differs. ``data`` says which documents
the training and the validation set held, by count and digest; files that changed under the same path stop a run too.
``model`` and ``custom_import`` are what it takes to build the student again without the config, for export. ``commit``
names the code that wrote the manifest, for whoever reads the results; nothing compares it.
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockgrow_titan.checkpoint_files import write_json
from blockgrow_titan.growth.schedule import GrowthSchedule
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.model.init import named_parameters

FILE_NAME = "manifest.json"
FORMAT = 2

DataIdentity = dict[str, dict[str, int | str]]
"""``{"training": {"documents", "digest"}, "validation": ...}``: how many documents a set holds, and which."""

# Dimensions of the student, the same in every phase.
MODEL_DIMENSIONS = (
    "vocab_size",
    "dim",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "hidden_dim",
    "max_seq_len",
    "rope_theta",
    "norm_eps",
    "init_std",
)

TRAJECTORY_FIELDS: dict[str, tuple[str, ...]] = {
    "model": ("name", "flavor", "hf_assets_path", "converters"),
    "block_stack": ("placement", "num_blocks", "layers_per_block"),
    "growth": (
        "phase_steps",
        "active_blocks",
        "freeze",
        "train_boundary",
        "optimizer_at_growth",
        "lr_at_growth",
        "data_at_growth",
        "new_block_init",
        "hooks",
    ),
    "distill": ("kd_weight", "ce_weight", "temperature"),
    "teacher": ("path", "dtype"),
    "documents": ("text_column", "end_of_document", "shard_documents", "held_out_documents", "on_bad_document"),
    "training": (
        "dataset",
        "dataset_path",
        "seq_len",
        "global_batch_size",
        "steps",
        "max_norm",
        "dtype",
        "mixed_precision_param",
        "mixed_precision_reduce",
    ),
    "validation": ("enable", "dataset", "dataset_path", "seq_len"),
    "optimizer": ("name", "lr", "beta1", "beta2", "eps", "weight_decay"),
    "lr_scheduler": ("warmup_steps", "total_steps", "decay_ratio", "decay_type", "min_lr_factor"),
    "debug": ("seed",),
}


def trajectory_config(job_config: JobConfig) -> dict[str, Any]:
    """``{"section.field": value}`` of every field that decides the trajectory."""
    return {
        f"{section}.{name}": getattr(getattr(job_config, section), name)
        for section, names in TRAJECTORY_FIELDS.items()
        for name in names
    }


def trainable_fqns(model: nn.Module) -> list[str]:
    """FQNs of the parameters that get a gradient."""
    return [fqn for fqn, param in named_parameters(model) if param.requires_grad]


def code_commit(root: Path | None = None) -> str | None:
    """The commit of the checkout that this code is run from, with "-dirty" if a tracked file differs from it.

    Args:
        root: The checkout; None: the folder that the package lies in.

    Returns:
        None if that is no checkout (an installed wheel, a download), or git is not there or does not answer.
    """
    root = root or Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # never another repository that an installed package happens to lie in
        return None
    command = ["git", "--no-optional-locks", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def build_manifest(
    job_config: JobConfig,
    schedule: GrowthSchedule,
    args: BlockStackArgs,
    model_cls: type[nn.Module],
    data: DataIdentity,
) -> dict[str, Any]:
    """The manifest of a run.

    Args:
        job_config: The job's config.
        schedule: Its phases.
        args: Model arguments of any phase.
        model_cls: Class of the model, built on meta to name the trainable parameters of each phase.
        data: Which documents its sets hold (``identity.py``).
    """
    phases = []
    for phase in schedule.phases:
        with torch.device("meta"):
            model = model_cls(args.for_phase(phase, job_config))
        phases.append(dataclasses.asdict(phase) | {"trainable": trainable_fqns(model)})
    layers = args.layers_per_block
    manifest = {
        "format": FORMAT,
        "config": trajectory_config(job_config),
        "data": data,
        "custom_import": job_config.experimental.custom_import,
        "model": {name: getattr(args, name) for name in MODEL_DIMENSIONS},
        "phases": phases,
        "layers_of_block": {
            str(block): list(range(block * layers, (block + 1) * layers))
            for block in range(job_config.block_stack.num_blocks)
        },
    }
    if commit := code_commit():
        manifest["commit"] = commit
    return json.loads(json.dumps(manifest))  # the same types as when it is read back


def write_manifest(folder: str, manifest: dict[str, Any]) -> None:
    """Write ``manifest.json`` into a checkpoint's folder, whole or not at all."""
    os.makedirs(folder, exist_ok=True)
    write_json(os.path.join(folder, FILE_NAME), manifest)


def read_manifest(folder: str) -> dict[str, Any]:
    """Read a checkpoint's manifest.

    Raises:
        ValueError: If the folder has none, or one that is not JSON or not of this format; the text names it.
    """
    path = os.path.join(folder, FILE_NAME)
    try:
        with open(path) as file:
            manifest = json.load(file)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {FILE_NAME}, so it is not a checkpoint of this plugin: give another one, or train in another "
            "job.dump_folder"
        ) from None
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, numbers too long, lists too deep
        raise ValueError(
            f"{path} is not valid JSON ({error}): use the checkpoint before it (to resume from that, delete {folder})"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not of format {FORMAT}, so {folder} was written by another version of this plugin: use that "
            "version, or train in another job.dump_folder"
        )
    if not isinstance(manifest.get("config"), dict) or not _is_identity(manifest.get("data", {})):
        raise ValueError(f"{path} is damaged: use the checkpoint before it (to resume from that, delete {folder})")
    return manifest


def _is_identity(data: Any) -> bool:
    """Whether this is a ``DataIdentity``."""
    return isinstance(data, dict) and all(
        isinstance(kept, dict) and isinstance(kept.get("documents"), int) and isinstance(kept.get("digest"), str)
        for kept in data.values()
    )


def check_config(saved: dict[str, Any], job_config: JobConfig, folder: str) -> None:
    """Refuse a config that is not the one a checkpoint was written with.

    Raises:
        ValueError: Naming each field that differs, its value then and now, and the ways out.
    """
    now = json.loads(json.dumps(trajectory_config(job_config)))
    then = saved["config"]
    different = [
        f"{name} was {then.get(name)!r} and is now {now.get(name)!r}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]
    if different:
        raise ValueError(
            f"{folder} was written by a run with another config: {'; '.join(different)}. Put the old value back to resume, "
            "or start anew with another --job.dump_folder (or delete this one)"
        )


def data_differences(then: DataIdentity, now: DataIdentity, before: str, after: str) -> str:
    """Which sets differ and how, with the words for each side; empty if none does."""

    def text(identity: dict[str, Any] | None) -> str:
        return f"{identity['documents']} documents (digest {identity['digest'][:16]})" if identity else "nothing"

    return "; ".join(
        f"{name}: {before} {text(then.get(name))}, {after} {text(now.get(name))}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    )


def check_data(saved: dict[str, Any], data: DataIdentity, folder: str) -> None:
    """Refuse documents that are not those a checkpoint was trained and validated on.

    Raises:
        ValueError: Naming each set that differs, its count and digest then and now, and the ways out.
    """
    if different := data_differences(saved.get("data", {}), data, "it had", "there are now"):
        raise ValueError(
            f"{folder} was written by a run on other documents, under the same config: {different}. Put the old files back "
            "to resume, or start anew with another --job.dump_folder (or delete this one)"
        )
