"""Does the teacher fit the student? Checked from files alone, before any process group or model exists."""

import json
import os

from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.paths import resolve
from blockgrow_titan.teacher.model import TeacherFiles


def check_teacher(job_config: JobConfig, args: BlockStackArgs, tokenizer: HuggingFaceTokenizer) -> None:
    """Refuse a teacher that does not fit the student: hidden size, vocabulary, length, tokenizer.

    Raises:
        ValueError: Naming both values.
    """
    if not job_config.teacher.path:
        return
    folder = resolve(job_config.teacher.path, "teacher.path")
    teacher = TeacherFiles(folder).args
    flavor = f'model.flavor "{job_config.model.flavor}"'
    if teacher.vocab_size != args.vocab_size:
        raise ValueError(
            f"teacher.path {folder} has a vocabulary of {teacher.vocab_size}, but {flavor} has {args.vocab_size}: both form "
            "logits over the same vocabulary; choose the flavor that fits the teacher"
        )
    if teacher.dim != args.dim:
        raise ValueError(
            f"teacher.path {folder} has hidden size {teacher.dim}, but {flavor} has {args.dim}: the student copies the "
            "teacher's embedding and head; choose the flavor that fits the teacher"
        )
    if job_config.training.seq_len > teacher.max_seq_len:
        raise ValueError(
            f"training.seq_len is {job_config.training.seq_len}, beyond the {teacher.max_seq_len} positions of the teacher "
            f"in {folder}: lower training.seq_len"
        )
    _check_same_tokenizer(job_config, folder, tokenizer)


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
