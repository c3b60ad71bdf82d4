"""A toy job on FineWeb-Edu, on the fly and prepared ahead; `tools/prepare_data.py` inside a test's process."""

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.documents.source import DocumentSource, source_of
from blockgrow_titan.job_config import ConfigError
from blockgrow_titan.parse import parse_config
from tests.unit_tests.document_kinds import write_fineweb
from tests.unit_tests.jobs import arguments
from tools.prepare_data import main

HELD_OUT, SHARD = 5, 21


def command(workspace: Path, out: Path, overrides: dict[str, Any], *options: str) -> list[str]:
    """The command line that prepares a toy job's documents, 8 a shard; overrides are ``section__field=value``."""
    job = arguments(workspace, workspace / "never_made", **overrides)
    return [str(workspace / "base.toml"), str(out), "--documents-per-shard", "8", *options, *job[4:]]


@contextlib.contextmanager
def process_as_before() -> Iterator[None]:
    """Put back the environment and the root logger, which the tool sets."""
    root = logging.getLogger()
    handlers, level, environment = root.handlers[:], root.level, dict(os.environ)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)


def prepare(workspace: Path, out: Path, overrides: dict[str, Any]) -> Path:
    """Prepare a toy job's documents; returns the folder."""
    with process_as_before():
        assert main(command(workspace, out, overrides)) == 0
    return out


def write_documents(workspace: Path, folder: Path) -> Path:
    """The workspace's 40 documents, one of them empty, some longer than seq_len, as FineWeb-Edu: three files."""
    texts = [json.loads(line)["text"] for line in (workspace / "train.jsonl").read_text().splitlines()]
    return write_fineweb(folder, texts, file_ends=(8, 30), row_group_size=6)


def on_the_fly(fineweb: Path, **overrides: Any) -> dict[str, Any]:
    """Overrides of a job on FineWeb-Edu."""
    kinds = {f"{section}__dataset": "fineweb_edu" for section in ("training", "validation")}
    paths = {f"{name}_path": str(fineweb) for name in kinds}
    numbers = {"documents__held_out_documents": HELD_OUT, "documents__shard_documents": SHARD}
    return kinds | paths | numbers | overrides


def ahead(out: Path, **overrides: Any) -> dict[str, Any]:
    """Overrides of the same job on what was prepared of it."""
    sets = {"training": "train", "validation": "validation"}
    kinds = {f"{section}__dataset": "pretokenized" for section in sets}
    paths = {f"{section}__dataset_path": str(out / name) for section, name in sets.items()}
    return on_the_fly(out) | kinds | paths | overrides


def sources(workspace: Path, overrides: dict[str, Any]) -> dict[str, DocumentSource]:
    job_config = parse_config(arguments(workspace, workspace / "never_made", **overrides))
    tokenizer = HuggingFaceTokenizer(job_config.model.hf_assets_path)
    return {split: source_of(job_config, tokenizer, split) for split in ("train", "validation")}


def refusal(workspace: Path, overrides: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        sources(workspace, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)
