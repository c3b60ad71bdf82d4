"""Do two models say the same? Logits in fp32 on the same text, one beside the other.

Each side is a student's checkpoint (run by the training model), a converted teacher (run as the teacher is in training) or
a Hugging Face folder (run by transformers, modelling code in the folder included). The text's token ids are cut into
documents no longer than either model was made for; each starts at position 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import torch
from tokenizers import Tokenizer

from blockgrow_titan.hf.checkpoint import StudentCheckpoint, open_checkpoint
from blockgrow_titan.paths import resolve
from blockgrow_titan.teacher.files import CONFIG, DCP_METADATA, TeacherFiles
from blockgrow_titan.teacher.model import build_teacher

TOKENIZER = "tokenizer.json"
MAX_LENGTH = 512
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. "
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; 東京は日本の首都です。 Привет, мир! "
    "def add(a, b):\n    return a + b  # 2 + 2 == 4\n"
)


@dataclass(frozen=True)
class Difference:
    """How far two models' logits are apart.

    Attributes:
        largest: Largest absolute difference of a logit.
        mean: Mean absolute difference.
        tokens: Tokens compared.
        position: Position in the text, in tokens, of the largest.
        token: That token.
        tolerance: What was asked for.
    """

    largest: float
    mean: float
    tokens: int
    position: int
    token: str
    tolerance: float

    @property
    def within(self) -> bool:
        """Whether the largest difference is at most the tolerance; False for NaN."""
        return self.largest <= self.tolerance


@dataclass(frozen=True)
class _Model:
    """One side: token ids [1, S] int64 -> logits [S, V] fp32."""

    path: str
    vocab_size: int
    max_length: int
    tokenizer: str | None
    logits: Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def verify(
    a: str | Path,
    b: str | Path,
    *,
    text: str | None = None,
    tolerance: float = 1e-4,
    tokenizer: str | None = None,
    custom_import: str | None = None,
) -> Difference:
    """Compare the logits of two models on a text.

    Args:
        a: A student's checkpoint, a converted teacher's, or a Hugging Face folder, whose own code is run if it has any.
        b: The same.
        text: What they read; None for a few sentences in several scripts.
        tolerance: The largest difference that counts as the same.
        tokenizer: Folder of the tokenizer; None for that of the two models, which must agree.
        custom_import: Module that registers a student's placement; None for the one that its run imported.

    Returns:
        The difference, in fp32.

    Raises:
        ValueError: If a side is no model, is damaged, their vocabularies or tokenizers differ, or the text is empty or no
            Unicode.
    """
    if not tolerance >= 0:
        raise ValueError(f"the tolerance is {tolerance}: it must be a number from 0")
    text = TEXT if text is None else text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("the text is not UTF-8: give some that is with --text or --text-file") from error
    models = [_open(Path(path).expanduser().absolute(), custom_import) for path in (a, b)]
    sizes = [model.vocab_size for model in models]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{models[0].path} has a vocabulary of {sizes[0]}, {models[1].path} one of {sizes[1]}: they cannot be compared"
        )
    ids, tokens = _tokenize(text, models, tokenizer)
    length = min(MAX_LENGTH, *(model.max_length for model in models))
    largest, position, total = -1.0, 0, 0.0
    for start in range(0, len(ids), length):
        document = torch.tensor(ids[start : start + length])[None]  # (1, S)
        difference = (models[0].logits(document).double() - models[1].logits(document).double()).abs()  # (S, V)
        total += difference.sum().item()
        worst = difference.amax(-1)  # (S)
        if not (isnan(largest) or worst.max().item() <= largest):  # NaN counts as the largest, the first as its place
            largest, position = worst.max().item(), start + int(worst.argmax())
    return Difference(largest, total / (len(ids) * sizes[0]), len(ids), position, tokens[position], tolerance)


def _tokenize(text: str, models: list[_Model], tokenizer: str | None) -> tuple[list[int], list[str]]:
    """Ids and tokens of the text, by the tokenizer that is given, or that both models have."""
    folders = [tokenizer] if tokenizer else list(dict.fromkeys(m.tokenizer for m in models if m.tokenizer))
    if not folders:
        raise ValueError(
            f"neither {models[0].path} nor {models[1].path} has a tokenizer: give its folder with --tokenizer"
        )
    encodings = []
    for folder in folders:
        path = Path(resolve(folder, "the tokenizer"))
        if not (path / TOKENIZER).is_file():
            raise ValueError(f"there is no {path / TOKENIZER}: give the tokenizer's folder with --tokenizer")
        encodings.append(read_tokenizer(path).encode(text, add_special_tokens=False))
    if any(encoding.ids != encodings[0].ids for encoding in encodings):
        raise ValueError(
            f"the tokenizers in {folders[0]} and {folders[1]} give other ids for the text: name the right one with --tokenizer"
        )
    ids, tokens = encodings[0].ids, encodings[0].tokens
    if not ids:
        raise ValueError("the text holds no token: give some with --text or --text-file")
    if max(ids) >= models[0].vocab_size:
        raise ValueError(
            f"the tokenizer in {folders[0]} gives the id {max(ids)}, but the models have a vocabulary of "
            f"{models[0].vocab_size}: name the right one with --tokenizer"
        )
    return ids, tokens


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a folder.

    Raises:
        ValueError: If its file is damaged.
    """
    try:
        return Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"{folder / TOKENIZER} cannot be read ({error}): download it again") from error


def _open(path: Path, custom_import: str | None) -> _Model:
    if (path / CONFIG).is_file() and not (path / DCP_METADATA).is_file():
        return _hugging_face(path)
    source = open_checkpoint(path, custom_import)
    return _student(source) if isinstance(source, StudentCheckpoint) else _teacher(source)


def _student(source: StudentCheckpoint) -> _Model:
    model, config = source.build(), source.manifest["config"]
    try:
        tokenizer = resolve(config["model.hf_assets_path"])
    except ValueError:
        tokenizer = None  # the other side may have it
    return _Model(
        str(source.folder),
        source.args.vocab_size,
        source.args.max_seq_len,
        tokenizer,
        lambda ids: model(ids)[0],
    )


def _teacher(source: TeacherFiles) -> _Model:
    teacher = build_teacher(
        source, dtype=torch.float32, device=torch.device("cpu"), max_seq_len=source.args.max_seq_len
    )
    head = source.head().float()  # (V, D)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return teacher.hidden_states(ids[0], torch.tensor([ids.shape[1]])) @ head.T  # (S, V)

    return _Model(
        source.folder, source.args.vocab_size, source.args.max_seq_len, _tokenizer_in(Path(source.folder)), logits
    )


def _hugging_face(path: Path) -> _Model:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=True).eval()
    except Exception as error:  # whatever transformers, safetensors and the folder's own code raise
        first = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"transformers cannot load {path} ({type(error).__name__}: {first})") from error
    config = model.config
    return _Model(
        str(path),
        config.vocab_size,
        config.max_position_embeddings,
        _tokenizer_in(path),
        lambda ids: model(ids, use_cache=False).logits[0],
    )


def _tokenizer_in(path: Path) -> str | None:
    return str(path) if (path / TOKENIZER).is_file() else None
