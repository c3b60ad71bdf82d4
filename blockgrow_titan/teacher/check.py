"""Does the teacher fit the student? Checked from files alone, before any process group or model exists."""

import os
from dataclasses import replace

from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.tools.logging import logger

from blockgrow_titan.documents.records import open_tokenizer, tokenizer_parts
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.paths import resolve
from blockgrow_titan.teacher.files import AbsentFiles, TeacherFiles, open_teacher


def check_teacher(
    job_config: JobConfig, args: BlockStackArgs, tokenizer: HuggingFaceTokenizer | None, *, may_be_absent: bool = False
) -> None:
    """Refuse a teacher that does not fit the student: hidden size, vocabulary, length, tokenizer.

    The teacher is a Hugging Face folder or a converted checkpoint. What they share is its embedding, head and final norm,
    so its layers, heads and intermediate size are free: they need not be the flavor's.

    Args:
        job_config: The job's config; without ``teacher.path`` there is nothing to check.
        args: The student's dimensions.
        tokenizer: The data's tokenizer; None: it is not there to compare with.
        may_be_absent: In a dry run: files that are not there are a warning, and what is there is checked.

    Raises:
        ValueError: Naming both values, or what is wrong with the teacher's files.
        NotImplementedError: If the teacher's config asks for what torchtitan's Qwen3 does not have.
    """
    path = job_config.teacher.path
    if not path:
        return
    teacher: Qwen3ModelArgs | None
    try:
        teacher = _open(path).args
    except AbsentFiles as error:
        if not may_be_absent:
            raise
        logger.warning(f"{error}. A run would be refused")
        teacher = error.args_of_config
    if teacher is not None:
        _check_dimensions(job_config, args, teacher)
    if tokenizer is not None and not (may_be_absent and not _tokenizer_file(path)):
        _check_same_tokenizer(job_config, resolve(path, "teacher.path"), tokenizer)


def teacher_args(job_config: JobConfig, args: Qwen3ModelArgs) -> Qwen3ModelArgs:
    """The dimensions of a teacher whose files may be absent, for documents of ``training.seq_len`` tokens.

    Args:
        job_config: The job's config, with ``teacher.path``.
        args: The flavor's dimensions, taken where the teacher has no ``config.json``: a published Qwen3's are its own.
    """
    try:
        args = _open(job_config.teacher.path).args
    except AbsentFiles as error:
        args = error.args_of_config or args
    return replace(args, max_seq_len=job_config.training.seq_len)


def _open(path: str) -> TeacherFiles:
    try:
        folder = resolve(path, "teacher.path")
    except ValueError as error:
        raise AbsentFiles(str(error)) from None
    return open_teacher(folder)


def _tokenizer_file(path: str) -> bool:
    try:
        return bool(resolve(os.path.join(path, "tokenizer.json"), "teacher.path"))
    except ValueError:
        return False


def _check_dimensions(job_config: JobConfig, args: BlockStackArgs, teacher: Qwen3ModelArgs) -> None:
    path, flavor = job_config.teacher.path, f'model.flavor "{job_config.model.flavor}"'
    if teacher.vocab_size != args.vocab_size:
        raise ValueError(
            f"teacher.path {path} has a vocabulary of {teacher.vocab_size}, but {flavor} has {args.vocab_size}: both form "
            "logits over the same vocabulary; choose the flavor that fits the teacher"
        )
    if teacher.dim != args.dim:
        raise ValueError(
            f"teacher.path {path} has hidden size {teacher.dim}, but {flavor} has {args.dim}: the student copies the "
            "teacher's embedding and head; choose the flavor that fits the teacher"
        )
    if job_config.training.seq_len > teacher.max_seq_len:
        raise ValueError(
            f"training.seq_len is {job_config.training.seq_len}, beyond the {teacher.max_seq_len} positions of the teacher "
            f"in {path}: lower training.seq_len"
        )


def _check_same_tokenizer(job_config: JobConfig, folder: str, tokenizer: HuggingFaceTokenizer) -> None:
    """Equal sizes are not enough: the teacher must read the ids as the data's tokenizer wrote them."""
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path):
        raise ValueError(
            f"teacher.path {folder} has no tokenizer.json, so its tokenizer cannot be compared: add the file"
        )
    theirs, ours = tokenizer_parts(open_tokenizer(folder, "teacher.path")), tokenizer_parts(tokenizer)
    for part in ours:
        if theirs[part] != ours[part]:
            raise ValueError(
                f"teacher.path {folder} has another tokenizer than model.hf_assets_path {tokenizer.tokenizer_path} "
                f"(tokenizer.json differs in its {part}): the teacher would read other words; point model.hf_assets_path "
                "at the teacher's folder"
            )
