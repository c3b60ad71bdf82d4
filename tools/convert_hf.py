"""Models in and out of Hugging Face's format: teachers to checkpoints, students to folders that transformers loads.

    python -m tools.convert_hf from-hf HF_DIR OUT        a Qwen3 folder -> a teacher's checkpoint (DCP)
    python -m tools.convert_hf to-hf CHECKPOINT OUT      a student at any depth -> a Hugging Face folder
    python -m tools.convert_hf verify A B                the largest difference of their logits

Each has a --help of its own. No accelerator and no process group is needed. A refusal is one line on stderr and exit
status 2; Ctrl-C leaves nothing half-written.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # python tools/convert_hf.py: find the package as python -m does
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.path.insert(1, str(Path.cwd()))
from tools.environment import enter  # noqa: E402

if __name__ == "__main__":
    enter(__file__)

FROM_HF = """Convert a Hugging Face folder of a dense Qwen3 to a teacher's checkpoint.

HF_DIR has config.json and safetensors: one file or an index of several, embeddings tied or not, bfloat16, float16 or
float32. OUT becomes a checkpoint of torch's distributed format (DCP) in torchtitan's parameter names, with config and
tokenizer beside it; values and dtypes stay as they are. teacher.path takes HF_DIR and OUT alike; from OUT every rank
reads the rows that it holds.

Every tensor that is missing, unexpected or misshapen is named before anything is written; values that are not finite
are refused. OUT must be absent or empty, and appears whole or not at all.

memory: well below the largest file, plus 1 GB.
"""
FROM_HF_EXAMPLE = """example:
  python -m tools.convert_hf from-hf ~/models/Qwen3-8B-Base ~/models/qwen3-8b-dcp
"""
TO_HF = """Export a student, at any depth, as a folder that transformers loads.

CHECKPOINT is a run's DUMP_FOLDER/checkpoint/step-N, at the end of any phase or inside one; its depth is read from it. A
folder that from-hf wrote is turned back, bit for bit.

OUT gets config.json, generation_config.json, the tokenizer, safetensors with an index, and a model card with the growth
manifest and the validation measured at that step. A pre-norm student is a plain Qwen3ForCausalLM. Any other placement
brings one modelling file with the placement's own source, which needs torch and transformers only: load it with
trust_remote_code=True. A placement that was registered by a module of yours is found through the run's
experimental.custom_import; its class must be self-contained (torch, nn, F and its own modules), and is refused otherwise.

memory: the tensors of one file (--max-shard-size), in the checkpoint's dtype or the exported one, whichever is wider,
plus 1 GB.
"""
TO_HF_EXAMPLE = """examples:
  python -m tools.convert_hf to-hf outputs/grow_post/checkpoint/step-60 exported/one-block
  python -m tools.convert_hf to-hf outputs/grow_post/checkpoint/step-180 exported/student --dtype bfloat16
  python -m tools.convert_hf verify outputs/grow_post/checkpoint/step-180 exported/student --tolerance 0.1
"""
VERIFY = """Compare the logits of two models on a text, in fp32 on the CPU.

A and B are each a student's checkpoint, a converted teacher's, or a Hugging Face folder. A checkpoint is run by the
training code, a folder by transformers; modelling code in the folder is executed, so verify only folders that you trust.
A long text is read in pieces of at most 512 tokens, or as many as the models were made for.

prints: the largest absolute difference of a logit and where it is, and the mean.
exit status: 0 if the largest is within the tolerance, 1 if not, 2 if the two cannot be compared.
memory: both models in fp32.
"""
VERIFY_EXAMPLE = """examples:
  python -m tools.convert_hf verify outputs/grow_post/checkpoint/step-180 exported/student
  python -m tools.convert_hf verify ~/models/Qwen3-0.6B-Base ~/models/qwen3-0.6b-dcp --text-file README.md
"""


def parser() -> argparse.ArgumentParser:
    """The command line; builds no model and imports nothing large."""
    raw = argparse.RawDescriptionHelpFormatter
    result = argparse.ArgumentParser("python -m tools.convert_hf", description=__doc__, formatter_class=raw)
    commands = result.add_subparsers(dest="command", required=True, metavar="{from-hf,to-hf,verify}")

    command = commands.add_parser("from-hf", description=FROM_HF, epilog=FROM_HF_EXAMPLE, formatter_class=raw)
    command.add_argument("hf_folder", metavar="HF_DIR", help="Hugging Face folder of a Qwen3")
    command.add_argument("out", metavar="OUT", help="the checkpoint's folder, absent or empty")

    command = commands.add_parser("to-hf", description=TO_HF, epilog=TO_HF_EXAMPLE, formatter_class=raw)
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="a step-N folder, or what from-hf wrote")
    command.add_argument("out", metavar="OUT", help="the Hugging Face folder, absent or empty")
    command.add_argument("--dtype", default="auto", help="auto (as stored; the default), float32, bfloat16 or float16")
    command.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="the most bytes in a file, as in 5GB (the default)"
    )
    _add_common(command)

    command = commands.add_parser("verify", description=VERIFY, epilog=VERIFY_EXAMPLE, formatter_class=raw)
    command.add_argument("a", metavar="A", help="checkpoint or Hugging Face folder")
    command.add_argument("b", metavar="B", help="checkpoint or Hugging Face folder")
    text = command.add_mutually_exclusive_group()
    text.add_argument("--text", help="what they read (default: a few sentences in several scripts)")
    text.add_argument("--text-file", type=Path, metavar="FILE", help="the same, from a file")
    command.add_argument(
        "--tolerance", type=float, default=1e-4, help="the largest difference that passes (default: 1e-4)"
    )
    _add_common(command)
    return result


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tokenizer", metavar="DIR", help="folder of the tokenizer, if it is not where the run had it"
    )
    command.add_argument(
        "--import",
        dest="custom_import",
        metavar="MODULE",
        help="module that registers the student's placement (default: the run's experimental.custom_import)",
    )


def run(options: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status."""
    import blockgrow_titan.infra.device  # noqa: F401  (before torchtitan: see there)

    if options.command == "from-hf":
        from blockgrow_titan.hf.from_hf import convert

        convert(options.hf_folder, options.out, progress=True)
        print(f"wrote {options.out}")
        return 0

    common = {"tokenizer": options.tokenizer, "custom_import": options.custom_import}
    if options.command == "to-hf":
        from blockgrow_titan.hf.to_hf import to_hf
        from blockgrow_titan.metrics import plural

        done = to_hf(
            options.checkpoint,
            options.out,
            dtype=options.dtype,
            max_shard_size=options.max_shard_size,
            progress=True,
            **common,
        )
        print(
            f"wrote {done.folder}: {plural(done.layers, 'layer')}, {done.parameters:,} parameters in {done.dtypes}, "
            f"{plural(done.tensors, 'tensor')} in {plural(done.files, 'file')}"
        )
        return 0

    from blockgrow_titan.hf.verify import verify

    text = options.text
    if options.text_file:
        text = options.text_file.read_bytes().decode("utf-8", "surrogateescape")  # verify refuses what is no UTF-8
    difference = verify(options.a, options.b, text=text, tolerance=options.tolerance, **common)
    print(
        f"largest difference {difference.largest:.3e} at token {difference.position} ({difference.token!r}), mean "
        f"{difference.mean:.3e}, over {difference.tokens} tokens: "
        f"{'within' if difference.within else 'NOT within'} {difference.tolerance:g}"
    )
    return 0 if difference.within else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: nothing half-written remains", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
