"""The diagnostics of saved students, on one batch for all of them.

The first checkpoint's run says which documents and which tokenizer, as its manifest has them; each student is built
unsharded in fp32. So a checkpoint of an fp32 run has the numbers that its run wrote at that step, within rounding; a run in
bf16 wrote those of its bf16 forward.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.diagnostics.batch import FixedBatch, default_tokens, fixed_batch
from blockgrow_titan.diagnostics.probes import probe
from blockgrow_titan.diagnostics.recorder import record_of
from blockgrow_titan.documents.pretokenized import tokenizer_fingerprint
from blockgrow_titan.documents.records import open_tokenizer
from blockgrow_titan.documents.source import DocumentSource, build_source
from blockgrow_titan.growth.manifest import data_differences
from blockgrow_titan.hf.checkpoint import StudentCheckpoint, open_checkpoint
from blockgrow_titan.metrics import plural
from blockgrow_titan.paths import resolve

ROWS, CHUNK_TOKENS = 8, 1024


def diagnose(
    folders: Sequence[str | Path],
    *,
    tokens: int = -1,
    documents: str | None = None,
    dataset: str | None = None,
    text_column: str | None = None,
    tokenizer: str | None = None,
    custom_import: str | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """One record for each checkpoint.

    Args:
        folders: ``.../checkpoint/step-N`` of students with one vocabulary; any depths and placements.
        tokens: Of the batch; -1: twice the longest document, 2 x 2048 at most.
        documents: File or folder of documents; None for the validation documents of the first checkpoint's run.
        dataset: Kind of ``documents``; None for "jsonl" if it ends so, else for that of the run's.
        text_column: As ``documents.text_column``; None for the run's.
        tokenizer: Its folder; None for that of the first checkpoint's run.
        custom_import: Module that registers the placements; None for the one that each run imported.
        device: Where the students run, one after the other.
        progress: Called with a line before each.

    Returns:
        Records as ``recorder.py`` describes them, without gradient norms, with "checkpoint", "step" and "phase".

    Raises:
        ValueError: If a folder is no student's checkpoint, two do not share a vocabulary and tokenizer, or documents or
            tokenizer are not there or, without ``documents``, are not those of the run; or there is no such device.
    """
    device = _checked_device(device)
    students = [_open(folder, custom_import) for folder in folders]
    first = students[0]
    for other in students[1:]:
        if other.args.vocab_size != first.args.vocab_size:
            raise ValueError(
                f"{first.folder} has a vocabulary of {first.args.vocab_size}, {other.folder} one of "
                f"{other.args.vocab_size}: they cannot read the same tokens"
            )
    reader = _tokenizer(students, tokenizer)
    seq_len = min(first.manifest["config"]["validation.seq_len"], *(s.args.max_seq_len for s in students))
    source = _source(first, reader, seq_len, documents, dataset, text_column)
    batch = fixed_batch(source, default_tokens(seq_len) if tokens == -1 else tokens, ROWS)
    largest = max(int(micro_batch.inputs.max()) for micro_batch in batch.micro_batches)
    if largest >= first.args.vocab_size:
        raise ValueError(
            f"the tokenizer gives the id {largest}, but the students have a vocabulary of {first.args.vocab_size}: name "
            "the right one with --tokenizer"
        )
    records = []
    for student in students:
        progress(f"{student.folder}: {plural(student.layers, 'layer')}, {batch.tokens:,} tokens")
        records.append(_record(student, batch, device))
    return records


def _checked_device(name: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        raise ValueError(f"the device {name} cannot be used ({str(error).splitlines()[0]}): try cpu") from None


def _open(folder: str | Path, custom_import: str | None) -> StudentCheckpoint:
    student = open_checkpoint(folder, custom_import)
    if not isinstance(student, StudentCheckpoint):
        raise ValueError(f"{folder} is a converted teacher: give the .../checkpoint/step-N folder of a student's run")
    return student


def _record(student: StudentCheckpoint, batch: FixedBatch, device: torch.device) -> dict[str, Any]:
    model = student.build().to(device)
    probed = probe(model, batch, chunk_tokens=CHUNK_TOKENS, device=device)
    where = {"checkpoint": str(student.folder), "step": student.step, "phase": student.phase["index"]}
    return where | record_of(probed, batch, model) | {"gradient_norms": None}


def _tokenizer(students: Sequence[StudentCheckpoint], folder: str | None) -> HuggingFaceTokenizer:
    """The one that is given, or that of the first student's run, which those of the others must agree with."""
    fields = {s.manifest["config"]["model.hf_assets_path"]: s for s in students}
    if folder:
        return _load_tokenizer(folder, "--tokenizer")
    first, *others = (_load_tokenizer(path, f"model.hf_assets_path of {s.folder}") for path, s in fields.items())
    for (path, student), other in zip(list(fields.items())[1:], others, strict=True):
        if tokenizer_fingerprint(other) != tokenizer_fingerprint(first):
            raise ValueError(
                f'{student.folder} was trained with the tokenizer in "{path}", {students[0].folder} with another one: their '
                "tokens are not the same, so they cannot be compared (--tokenizer DIR does it all the same)"
            )
    return first


def _load_tokenizer(path: str, field: str) -> HuggingFaceTokenizer:
    try:
        folder = Path(resolve(path, field))
    except ValueError as error:
        raise ValueError(f"{error}; or name the tokenizer's folder with --tokenizer") from None
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{field} is {folder}, which has no tokenizer.json: name its folder with --tokenizer")
    return open_tokenizer(str(folder), field)


def _source(
    first: StudentCheckpoint,
    tokenizer: HuggingFaceTokenizer,
    seq_len: int,
    documents: str | None,
    dataset: str | None,
    text_column: str | None,
) -> DocumentSource:
    config = first.manifest["config"]
    if not documents and not config["validation.enable"]:
        raise ValueError(f"{first.folder} was trained without validation documents: give some with --documents")
    kind = dataset or ("jsonl" if documents and documents.endswith(".jsonl") else config["validation.dataset"])
    try:
        source = build_source(
            kind,
            documents or config["validation.dataset_path"],
            tokenizer,
            text_column=text_column or config["documents.text_column"],
            end_of_document=config["documents.end_of_document"],
            seq_len=seq_len,
            held_out_documents=config["documents.held_out_documents"],
            on_bad_document=config["documents.on_bad_document"],
            split="validation",
            field="--documents" if documents else "validation.dataset_path",
        )
    except ValueError as error:
        raise ValueError(f"{error}; see --documents, --dataset, --text-column and --tokenizer") from None
    then = first.manifest.get("data", {}).get("validation")
    if then and not documents:
        changed = data_differences({"validation": then}, {"validation": source.identity()}, "it had", "there are now")
        if changed:
            raise ValueError(
                f"{first.folder} was validated on other documents: {changed}. Put the old files back, or name those to use "
                "with --documents"
            )
    return source
