"""Train the bundled tokenizer: a byte-level BPE of 4,096 entries over the corpus's train split.

The flow: read the ``text`` of every document of the train split, split it with GPT-2's pattern (a word keeps its
leading space and never shares a token with punctuation), map it to bytes, and merge the most frequent pairs until the
vocabulary holds one special token, 256 bytes and 3,839 merges. There is no normaliser and every byte is in the
vocabulary, so any text survives a round trip. Encoding adds no token: the loader appends the end-of-document token.

Run from the repository's root; the same corpus gives the same files, byte for byte::

    python tools/assets/make_tokenizer.py
"""

import argparse
import json
import os
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

ASSETS = Path(__file__).resolve().parents[2] / "blockgrow_titan" / "assets"
END_OF_DOCUMENT = "<|endoftext|>"


def read_texts(path: Path, text_column: str = "text") -> list[str]:
    """The ``text_column`` of every record of a jsonl file, in file order."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line)[text_column] for line in file]


def train_tokenizer(texts: list[str], vocab_size: int = 4096) -> Tokenizer:
    """Byte-level BPE over ``texts`` with exactly ``vocab_size`` entries; id 0 is the end-of-document token.

    Raises:
        ValueError: ``texts`` is too small to give ``vocab_size`` entries.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the texts give {tokenizer.get_vocab_size()} entries, not --vocab_size = {vocab_size}: "
            "give more text or ask for fewer entries"
        )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which torchtitan and transformers both load."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_DOCUMENT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, default=ASSETS / "corpus" / "austen_train.jsonl")
    parser.add_argument("--out", type=Path, default=ASSETS / "tokenizer")
    parser.add_argument("--vocab_size", type=int, default=4096)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread: the order of counting never depends on the machine
    texts = read_texts(args.train)
    tokenizer = train_tokenizer(texts, args.vocab_size)
    write_tokenizer(tokenizer, args.out)
    tokens = sum(len(encoding.ids) + 1 for encoding in tokenizer.encode_batch(texts))
    print(
        f"{args.out}: {tokenizer.get_vocab_size()} entries, {len(texts)} documents, {tokens} tokens with document ends"
    )


if __name__ == "__main__":
    main()
