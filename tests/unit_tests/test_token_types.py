"""Token types: by the text of a token, so that two tokenizers agree on the same sentence."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from blockgrow_titan.diagnostics.token_types import (
    DOCUMENT_BOUNDARY,
    NEWLINE,
    PUNCTUATION,
    REGULAR,
    TOKEN_TYPES,
    TokenTyper,
    type_of_text,
)
from blockgrow_titan.paths import resolve

END = "<|endoftext|>"
SENTENCE = 'So, "No" — 3 $ of 4?\n\nYes.\n'


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("\n", NEWLINE),
        ("\r\n", NEWLINE),
        (" \n\n\t", NEWLINE),
        ("  ", REGULAR),
        ("\t", REGULAR),
        ("", REGULAR),
        (".", PUNCTUATION),
        (" —", PUNCTUATION),
        (".\n\n", PUNCTUATION),  # a piece that the Qwen tokenizer has
        ("。", PUNCTUATION),
        ("$", PUNCTUATION),
        (" +=", PUNCTUATION),
        ("👍", PUNCTUATION),
        ("'s", REGULAR),
        ("(x", REGULAR),
        ("3", REGULAR),
        ("½", REGULAR),  # category No: a number
        ("的", REGULAR),
        (" der", REGULAR),
        ("\u0301", REGULAR),  # a combining accent alone
        ("\ufffd", REGULAR),  # part of a character
        (".\ufffd", REGULAR),
        ("\x00", REGULAR),
    ],
)
def test_texts(text: str, kind: int) -> None:
    assert type_of_text(text) == kind, text


def byte_level(workspace: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(workspace / "tokenizer"))


def bundled(workspace: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(resolve("package:blockgrow_titan/assets/tokenizer"))


def words_with_metaspace(folder: Path) -> HuggingFaceTokenizer:
    """A tokenizer of another family: a space is part of the next word as in SentencePiece; pieces are whole words."""
    pieces = ["▁So", ",", "▁", "No", '"', "▁—", "▁3", "▁$", "▁of", "▁4", "?", "\n", "Yes", ".", END, "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([END])
    marks = [pre_tokenizers.Split(mark, "isolated") for mark in ("\n", ",", '"', "?", ".")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), *marks])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return HuggingFaceTokenizer(str(folder))


@pytest.mark.parametrize("name", ["workspace", "bundled", "metaspace"])
def test_a_known_sentence(workspace: Path, tmp_path: Path, name: str) -> None:
    """Which characters of the sentence each type covers, whatever the pieces are."""
    build = {"workspace": byte_level, "bundled": bundled, "metaspace": lambda _: words_with_metaspace(tmp_path)}[name]
    tokenizer = build(workspace)
    end = tokenizer.token_to_id(END)
    encoding = tokenizer.tokenizer.encode(SENTENCE, add_special_tokens=False)
    assert "[UNK]" not in encoding.tokens
    ids = [*encoding.ids, end]
    types = TokenTyper(tokenizer, end)(ids)
    covered: dict[str, str] = dict.fromkeys(TOKEN_TYPES, "")
    for (start, stop), kind in zip(encoding.offsets, types[:-1], strict=True):
        covered[TOKEN_TYPES[kind]] += SENTENCE[start:stop].strip(" ")
    assert types[0] == types[-1] == DOCUMENT_BOUNDARY and types.count(DOCUMENT_BOUNDARY) == 2
    assert covered["newline"] == "\n\n\n"
    first = SENTENCE[slice(*encoding.offsets[0])]
    assert first + covered["regular"].replace("—", "") == "SoNo3of4Yes"
    dash = "—" if "—" in encoding.tokens or name == "metaspace" else ""  # else three pieces that are no characters
    assert covered["punctuation"] == f',""{dash}$?.'


def test_document_boundaries_come_first(workspace: Path) -> None:
    """A first token that is a newline, an end of document in the middle, and a document that is nothing else."""
    tokenizer = byte_level(workspace)
    end, newline, full_stop = (tokenizer.token_to_id(token) for token in (END, "Ċ", "."))
    types_of = TokenTyper(tokenizer, end)
    assert types_of([newline, newline, end, full_stop]) == [DOCUMENT_BOUNDARY, NEWLINE, DOCUMENT_BOUNDARY, PUNCTUATION]
    assert types_of([end]) == [DOCUMENT_BOUNDARY]
    assert types_of([]) == []
    assert types_of([full_stop, full_stop]) == [DOCUMENT_BOUNDARY, PUNCTUATION]
