"""Tokenise a config's documents ahead of time.

    config -> its sources, as a run builds them -> batches of ids -> OUT.partial, shard by shard -> OUT

A run then sets ``training.dataset = "pretokenized"`` and trains on the same batches without tokenising. The format is
that of ``blockgrow_titan/documents/pretokenized.py``; the shards are written by ``pretokenized_writer.py`` beside it. A
folder counts once it has its final name, which it gets when everything is in it.
"""

import argparse
import contextlib
import fcntl
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if __package__ in (None, ""):  # python tools/prepare_data.py: the package lies beside this folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.environment import enter  # noqa: E402

if __name__ == "__main__":
    enter(__file__)

if TYPE_CHECKING:  # imported late: --help should not wait for torch
    from blockgrow_titan.documents.source import DocumentSource
    from blockgrow_titan.job_config import JobConfig

PLAN_FILE = "plan.json"
SECTIONS = {"train": "training", "validation": "validation"}

DESCRIPTION = """\
Tokenise a config's documents ahead of time, into files that a run reads through memory maps.

What [training] and [validation] of the config name is read as a run would read it (kind, path, text column,
documents.shard_documents, documents.held_out_documents) and tokenised with the tokenizer of model.hf_assets_path, each
document alone and cut to the section's seq_len. OUT then holds a folder for each set, to be named in the config:

    [training]                               [validation]
    dataset = "pretokenized"                 dataset = "pretokenized"
    dataset_path = "OUT/train"               dataset_path = "OUT/validation"

Nothing else changes: the same documents in the same order, the same batches, the same losses. The run may use fewer
documents (documents.shard_documents) or a shorter seq_len; another tokenizer or a longer seq_len is refused."""

EPILOG = """\
An interrupted run leaves its whole shards in OUT.partial; the same command continues after them. OUT appears when it is
complete, and is never overwritten. Disk space: two bytes a token if the vocabulary has at most 65,536 entries, four
otherwise, and 40 a document. Bad documents: with documents.on_bad_document = "stop" the first one ends the command;
with "skip" they are recorded, and a run treats them as it would have treated the text.

examples:
  python -m tools.prepare_data train_configs/grow_post.toml data/austen
  python -m tools.prepare_data my_config.toml data/fineweb --training.dataset fineweb_edu \\
      --training.dataset_path ~/fineweb-edu --documents.shard_documents 3200000

exit status: 0 when OUT is complete, 2 for a mistake (one line says which), 130 for Ctrl-C."""


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see --help")


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this tool's options, and the config's: ``--section.field value``.

    Raises:
        ValueError: For an unknown or wrong option.
    """
    parser = _Parser(
        prog="prepare_data",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s CONFIG OUT [--split ...] [--workers N] [--documents-per-shard N] [--section.field VALUE ...]",
    )
    parser.add_argument("config", metavar="CONFIG", help="the job's TOML file")
    parser.add_argument("out", metavar="OUT", help="folder to make; must not exist")
    parser.add_argument(
        "--split",
        choices=["train", "validation", "both"],
        default="both",
        help="sets to prepare; both (the default) leaves validation out if validation.enable is false",
    )
    parser.add_argument("--workers", type=_positive, metavar="N", help="threads that tokenise; default: every core")
    parser.add_argument(
        "--documents-per-shard",
        type=_positive,
        metavar="N",
        default=50_000,
        help="documents of a file; default: 50,000",
    )
    known, overrides = parser.parse_known_args(arguments)
    if overrides and not re.match(r"--\w+\.", overrides[0]):
        parser.error(f"unrecognized argument {overrides[0]}")
    return known, overrides


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return int(text)


def read_config(path: str, overrides: list[str]) -> "JobConfig":
    """Return the config with its overrides, its types checked and its custom module imported.

    Raises:
        ValueError: For a bad file, field, argument or module.
    """
    from blockgrow_titan.parse import check_types, parse_config

    job_config = parse_config(["--job.config_file", path, *overrides])
    check_types(job_config)
    if module := job_config.experimental.custom_import:
        try:
            importlib.import_module(module)
        except Exception as error:  # a module of the user's may raise anything
            raise ValueError(f'experimental.custom_import is "{module}": {type(error).__name__}: {error}') from error
    return job_config


def open_sources(job_config: "JobConfig", split: str) -> dict[str, "DocumentSource"]:
    """Return the sources of the sets to prepare, as a run would build them."""
    from torchtitan.protocols.train_spec import get_train_spec

    from blockgrow_titan.documents.source import source_of

    if split == "validation" and not job_config.validation.enable:
        raise ValueError("--split is validation, but validation.enable is false: the config has no validation set")
    splits = [split] if split != "both" else ["train", *["validation"] * job_config.validation.enable]
    for name in splits:
        if getattr(job_config, SECTIONS[name]).dataset == "pretokenized":
            raise ValueError(
                f'{SECTIONS[name]}.dataset is "pretokenized", which is tokenised already: name the documents themselves'
            )
    build_tokenizer = get_train_spec(job_config.model.name).build_tokenizer_fn
    assert build_tokenizer is not None
    tokenizer: Any = build_tokenizer(job_config)
    return {name: source_of(job_config, tokenizer, name) for name in splits}


def describe(source: "DocumentSource", job_config: "JobConfig", split: str) -> dict[str, Any]:
    """Return what decides a set's files: the fixed part of its ``dataset.json``."""
    from blockgrow_titan.documents.pretokenized import FORMAT, id_type, tokenizer_fingerprint

    section, documents = getattr(job_config, SECTIONS[split]), job_config.documents
    divided = source.reader.divided_path(section.dataset_path or "")
    return {
        "format": FORMAT,
        "tokenizer": tokenizer_fingerprint(source.tokenizer),
        "id_type": id_type(source.tokenizer),
        "max_length": source.seq_len,
        "source": {
            "kind": section.dataset,
            "path": divided or section.dataset_path,
            "split": split,
            "text_column": documents.text_column,
            "held_out_documents": documents.held_out_documents if divided else None,
        },
        "documents": len(source),
    }


@contextlib.contextmanager
def partial_folder(out: str, plan: dict[str, Any]) -> Iterator[str]:
    """``OUT.partial`` for one plan; becomes OUT at the end of the ``with`` block.

    Raises:
        ValueError: If it was begun with another plan, is not this tool's, or another process works in it.
    """
    from blockgrow_titan.documents.pretokenized_writer import write_json

    partial = f"{out}.partial"
    path = os.path.join(partial, PLAN_FILE)
    if not os.path.isdir(partial) or set(os.listdir(partial)) <= {f"{PLAN_FILE}.tmp"}:
        os.makedirs(partial, exist_ok=True)
        write_json(path, plan)
    try:
        with open(path) as file:
            begun = json.load(file)
    except (OSError, ValueError):
        raise ValueError(f"{partial} exists, but has no {PLAN_FILE} of this tool's: move it away") from None
    if begun != plan:
        flat = [_flatten(begun), _flatten(plan)]
        different = [
            f"{name} was {flat[0].get(name)!r} and is now {flat[1].get(name)!r}"
            for name in sorted(flat[0].keys() | flat[1].keys())
            if flat[0].get(name) != flat[1].get(name)
        ]
        raise ValueError(
            f"{partial} was begun with another config: {'; '.join(different)}. Use that config to continue, or delete "
            f"{partial} to start over"
        )
    with open(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing {partial}: wait for it") from None
        yield partial
        os.rename(partial, out)
    os.remove(os.path.join(out, PLAN_FILE))


def _flatten(plan: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in plan.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def prepare(arguments: Sequence[str]) -> None:
    """Do what the command line says.

    Raises:
        ValueError, ConfigError: For a mistake of the user's, in one line.
    """
    options, overrides = parse_arguments(arguments)
    out = os.path.abspath(os.path.expanduser(options.out))
    if os.path.lexists(out):
        raise ValueError(f"OUT = {out} exists already: give another folder, or delete this one")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    if options.workers:
        os.environ["RAYON_NUM_THREADS"] = str(options.workers)  # read once, before the first batch

    from blockgrow_titan.infra import device  # noqa: F401  (before torchtitan: see there)

    from torchtitan.tools.logging import init_logger, logger  # isort: skip
    from tqdm import tqdm

    from blockgrow_titan.documents.pretokenized_writer import PretokenizedWriter

    init_logger()
    job_config = read_config(options.config, overrides)
    sources = open_sources(job_config, options.split)
    plan: dict[str, Any] = {name: describe(source, job_config, name) for name, source in sources.items()}
    skip_bad = job_config.documents.on_bad_document == "skip"
    plan |= {
        "documents_per_shard": options.documents_per_shard,
        "on_bad_document": job_config.documents.on_bad_document,
    }
    with partial_folder(out, plan) as partial:
        for name, source in sources.items():
            writer = PretokenizedWriter(
                source, plan[name], os.path.join(partial, name), options.documents_per_shard, skip_bad
            )
            if writer.done:
                logger.info(f"{name}: continues after document {writer.done} of {len(source)}, which {partial} holds")
            started, tokens = time.monotonic(), 0
            with tqdm(total=len(source), initial=writer.done, desc=name, unit=" documents", disable=None) as bar:
                for batch_documents, batch_tokens in writer.write():
                    tokens += batch_tokens
                    speed = f"{tokens / (time.monotonic() - started):,.0f} tokens/s"
                    bar.set_postfix_str(speed, refresh=False)
                    bar.update(batch_documents)
            logger.info(f"{name}: all {len(source)} documents are written")
    for name in sources:
        section = SECTIONS[name]
        logger.info(f'[{section}] dataset = "pretokenized", dataset_path = "{os.path.join(out, name)}"')


def main(arguments: Sequence[str]) -> int:
    """Run the tool; returns the exit status."""
    try:
        prepare(arguments)
    except KeyboardInterrupt:
        print("Stopped. The same command continues after the last whole shard", file=sys.stderr)
        return 130
    except Exception as error:
        from blockgrow_titan.job_config import ConfigError

        if not isinstance(error, ValueError | OSError | ConfigError):
            raise
        print(f"Error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
