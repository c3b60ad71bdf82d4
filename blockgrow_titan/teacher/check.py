"""Does the teacher fit the student? Checked from files alone, before any process group or model exists."""

import json
import os
from dataclasses import replace

from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.tools.logging import logger

from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.paths import resolve
from blockgrow_titan.teacher.files import CONFIG, DCP_METADATA, INDEX, SINGLE, open_teacher
from blockgrow_titan.teacher.layout import model_args


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
    if may_be_absent and (absent := absent_files(path)):
        logger.warning(f"teacher.path is {path}: {absent}. A run would be refused")
        teacher = _described(path)
    else:
        teacher = open_teacher(resolve(path, "teacher.path")).args
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
    return replace(_described(job_config.teacher.path) or args, max_seq_len=job_config.training.seq_len)


def _described(path: str) -> Qwen3ModelArgs | None:
    """What the teacher's ``config.json`` says, None if it is not there."""
    try:
        file = resolve(os.path.join(path, CONFIG), "teacher.path")
    except ValueError:
        return None
    with open(file, encoding="utf-8") as opened:
        return model_args(json.load(opened), f"teacher.path {path}")


def _tokenizer_file(path: str) -> bool:
    try:
        return bool(resolve(os.path.join(path, "tokenizer.json"), "teacher.path"))
    except ValueError:
        return False


def absent_files(path: str) -> str:
    """What is not there of the weights of the teacher at ``teacher.path``, in words; empty if every file is."""
    try:
        folder = resolve(path, "teacher.path")
    except ValueError:
        return "there is no such folder"
    if os.path.isfile(os.path.join(folder, DCP_METADATA)):
        return ""
    index = os.path.join(folder, INDEX)
    if not os.path.isfile(index):
        return "" if os.path.isfile(os.path.join(folder, SINGLE)) else "it holds no weights"
    with open(index, encoding="utf-8") as file:
        names = sorted(set(json.load(file)["weight_map"].values()))
    absent = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    return f"{absent[0]} is not there" if absent else ""


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
    # both as the library writes them: files of different versions of it differ without any difference in meaning
    theirs = json.loads(HuggingFaceTokenizer(folder).tokenizer.to_str())
    ours = json.loads(tokenizer.tokenizer.to_str())
    # Whatever changes the ids of a text; truncation, padding and decoding do not.
    for part in ("normalizer", "pre_tokenizer", "model", "added_tokens"):
        if theirs.get(part) != ours.get(part):
            raise ValueError(
                f"teacher.path {folder} has another tokenizer than model.hf_assets_path {tokenizer.tokenizer_path} "
                f"(tokenizer.json differs in its {part}): the teacher would read other words; point model.hf_assets_path "
                "at the teacher's folder"
            )
