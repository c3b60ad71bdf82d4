"""Looks inside saved students: residual stream, token types, block removal, logit lens.

    python -m tools.diagnose CHECKPOINT [--against CHECKPOINT ...]

CHECKPOINT is a run's DUMP_FOLDER/checkpoint/step-N, at the end of any phase or inside one. Students of any depth and
placement stand side by side, all on one batch: the first tokens of the validation documents of CHECKPOINT's run, in an
order seeded with 42. These are the numbers of diagnostics.jsonl, which a run with diagnostics.enable writes at every
validation, but for gradient norms. Statistics are in float64, the students in fp32.

- residual RMS: root mean square of each token's hidden state at every block boundary. "After the entry" is what the first
  block gets.
- token types: document boundary (a document's first token, the end-of-document token), newline (line breaks and white
  space), punctuation (marks and symbols without a letter or digit), regular (the rest), by the decoded text of a token.
- whole-block removal: cross-entropy without the block minus with it. The block is bypassed with its norms; the
  model-boundary norm stays. Angular distance: arccos of the clamped cosine over pi, per token, averaged.
- logit lens: cross-entropy of each boundary through the placement's way to the head (pre: the boundary norm, post: nothing).

A refusal is one line on stderr and exit status 2.
memory: one student at a time in fp32, the states of one batch, plus 1 GB.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # python tools/diagnose.py: find the package as python -m does
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.path.insert(1, str(Path.cwd()))
from tools.environment import enter  # noqa: E402

if __name__ == "__main__":
    enter(__file__)

EXAMPLES = """examples:
  python -m tools.diagnose outputs/grow_post/checkpoint/step-180
  python -m tools.diagnose outputs/grow_post/checkpoint/step-180 --against outputs/grow_pre/checkpoint/step-180 \\
      --against outputs/grow_post/checkpoint/step-60 --json compared.json
"""


def parser() -> argparse.ArgumentParser:
    """The command line; builds no model and imports nothing large."""
    raw = argparse.RawDescriptionHelpFormatter
    result = argparse.ArgumentParser(
        "python -m tools.diagnose", description=__doc__, epilog=EXAMPLES, formatter_class=raw
    )
    result.add_argument("checkpoint", metavar="CHECKPOINT", help="a student's step-N folder")
    result.add_argument(
        "--against", action="append", default=[], metavar="CHECKPOINT", help="another one beside it; may be repeated"
    )
    result.add_argument(
        "--json", type=Path, metavar="FILE", help="write the records there too, histograms and all quantiles included"
    )
    result.add_argument(
        "--tokens",
        type=int,
        default=-1,
        metavar="N",
        help="tokens of the batch (default: twice the run's validation.seq_len, 2 x 2048 at most)",
    )
    result.add_argument("--documents", metavar="PATH", help="documents to read instead of the run's validation set")
    result.add_argument(
        "--dataset", metavar="KIND", help="their kind: jsonl, parquet, ... (default: by name, the run's)"
    )
    result.add_argument("--text-column", metavar="NAME", help="field of a record that holds its text")
    result.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer, if it is not where the run had it")
    result.add_argument(
        "--import",
        dest="custom_import",
        metavar="MODULE",
        help="module that registers the placements (default: each run's experimental.custom_import)",
    )
    result.add_argument("--device", default="cpu", help="where the students run (default: cpu)")
    return result


def run(options: argparse.Namespace) -> None:
    """Do what the command line says."""
    import blockgrow_titan.infra.device  # noqa: F401, I001  (before torchtitan: see there)

    from blockgrow_titan.diagnostics.checkpoints import diagnose
    from blockgrow_titan.diagnostics.tables import comparison

    if options.tokens != -1 and options.tokens < 2:
        raise ValueError(f"--tokens is {options.tokens}: it must be at least 2, or -1")
    records = diagnose(
        [options.checkpoint, *options.against],
        tokens=options.tokens,
        documents=options.documents,
        dataset=options.dataset,
        text_column=options.text_column,
        tokenizer=options.tokenizer,
        custom_import=options.custom_import,
        device=options.device,
        progress=lambda line: print(line, file=sys.stderr),
    )
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    print("\n".join(comparison(records)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        run(options)
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
