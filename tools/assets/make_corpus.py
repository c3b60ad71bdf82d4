"""Write the bundled corpus from a folder with ``austen_train.jsonl`` and ``austen_validation.jsonl`` in book order.

The trainer takes documents in file order and never shuffles. The source's train split goes book by book, so a run
would end on whichever book comes last; this script writes it in a fixed mixed order instead: the lines sorted by the
SHA-256 of the seed and the line, which is the same on every machine. Lines are copied byte for byte, and the validation
split keeps its order.

Run from the repository's root::

    python tools/assets/make_corpus.py --source FOLDER
"""

import argparse
import hashlib
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[2] / "blockgrow_titan" / "assets"


def mixed(lines: list[bytes], seed: int) -> list[bytes]:
    """``lines`` in the order of the SHA-256 of ``"{seed}:"`` and the line."""
    return sorted(lines, key=lambda line: hashlib.sha256(b"%d:" % seed + line).digest())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=ASSETS / "corpus")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        name = f"austen_{split}.jsonl"
        lines = (args.source / name).read_bytes().splitlines(keepends=True)
        lines = mixed(lines, args.seed) if split == "train" else lines
        (args.out / name).write_bytes(b"".join(lines))
        print(f"{args.out / name}: {len(lines)} documents")


if __name__ == "__main__":
    main()
