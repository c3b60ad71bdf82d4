"""Export the bundled teacher from a finished ``train_configs/teacher.toml`` run.

The flow: take the checkpoint with the lowest validation cross-entropy; read its parameters; write a Hugging Face folder
(config, bf16 safetensors, tokenizer); load that folder with transformers and measure it again, since rounding to bf16
is part of what users get; write the model card from those figures and the n-gram baseline's.

Run from the repository's root::

    NGPU=1 ./run_train.sh --job.config_file train_configs/teacher.toml
    python -m tools.assets.make_teacher --run outputs/teacher
"""

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import blockgrow_titan.infra.device  # noqa: F401  (before torchtitan: see there)
from blockgrow_titan.events import read_events
from blockgrow_titan.hf.checkpoint import StudentCheckpoint
from blockgrow_titan.hf.to_hf import qwen3_config
from blockgrow_titan.model.model import BlockStackModel
from blockgrow_titan.model.state_dict_adapter import BlockStackStateDictAdapter
from tools.assets.ngram_baseline import ASSETS, KneserNey, tokenize

MAX_BYTES = 15_000_000

CARD = """---
license: bsd-3-clause
library_name: transformers
---
# The bundled teacher

A Qwen3 of {layers} layers, hidden size {dim}, {parameters:,} parameters (embeddings untied, bf16), trained from scratch
by this project on the train split of the bundled corpus (`../corpus`) with the bundled tokenizer (`../tokenizer`). It is
a small stand-in for a real teacher: good enough to distil from in minutes on a laptop.

    NGPU=1 ./run_train.sh --job.config_file train_configs/teacher.toml
    python -m tools.assets.make_teacher --run outputs/teacher

| | |
|---|---|
| seed | {seed} |
| step time, summed over the run | {minutes:.0f} minutes on one CPU core |
| global batch | {global_batch} documents, each cut to {seq_len} tokens |
| checkpoint | step {step} of {total_steps}, the best by validation of the {candidates} that were kept |
| seen until then | {documents:,} documents ({epochs:.1f} passes), {tokens:,} predicted tokens |
| train cross-entropy (mean over the last pass before it) | {train_ce:.4f} |
| validation cross-entropy, in training | {training_ce:.4f} |
| validation cross-entropy, this folder in fp32 (`transformers`) | **{ce:.4f}** (perplexity {ppl:.1f}) |

Natural logarithms, a token; {predicted:,} predicted tokens of {validation_documents} documents. On the same tokens
`python -m tools.assets.ngram_baseline` (interpolated modified Kneser-Ney, counted on whole train documents) gives
{unigram:.4f} for the unigram and {trigram:.4f} for the trigram.
"""


def choose(events: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """The validation of the best checkpoint, and how many checkpoints were compared."""
    saved = {event["step"] for event in events if event["event"] == "checkpoint"}
    candidates = [event for event in events if event["event"] == "validation" and event["step"] in saved]
    return min(candidates, key=lambda event: event["ce"]), len(candidates)


def write_folder(out: Path, model: BlockStackModel) -> None:
    """Config, weights in bf16, and the tokenizer."""
    args = model.model_args
    out.mkdir(parents=True, exist_ok=True)
    config = qwen3_config(args, "bfloat16", end_of_document=0)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = BlockStackStateDictAdapter(args).to_hf(model.state_dict())
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "tokenizer" / name, out / name)
    size = (out / "model.safetensors").stat().st_size
    if size > MAX_BYTES:
        raise ValueError(
            f"{out / 'model.safetensors'} has {size:,} bytes, more than the {MAX_BYTES:,} that the package takes"
        )


@torch.no_grad()
def measure(folder: Path, documents: list[list[int]]) -> float:
    """Mean next-token cross-entropy of a Hugging Face folder, fp32, one document at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for ids in documents:
        if len(ids) < 2:
            continue
        logits = model(torch.tensor([ids[:-1]])).logits[0].double()
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
        count += len(ids) - 1
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="dump folder of the finished run")
    parser.add_argument("--out", type=Path, default=ASSETS / "teacher")
    options = parser.parse_args()

    events = read_events(str(options.run / "metrics.jsonl"))
    best, candidates = choose(events)
    checkpoint = StudentCheckpoint(options.run / "checkpoint" / f"step-{best['step']}")
    model, config = checkpoint.build(), checkpoint.manifest["config"]
    write_folder(options.out, model)

    seq_len = config["training.seq_len"]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer" / "tokenizer.json"))
    train, validation = (
        tokenize(ASSETS / "corpus" / f"austen_{split}.jsonl", tokenizer, "text", "<|endoftext|>")
        for split in ("train", "validation")
    )
    validation = [ids[:seq_len] for ids in validation]
    unigram, trigram = (
        KneserNey(train, order, tokenizer.get_vocab_size()).cross_entropy(validation)[0] for order in (1, 3)
    )
    ce = measure(options.out, validation)
    steps = [event for event in events if event["event"] == "train" and event["step"] <= best["step"]]
    documents = best["step"] * config["training.global_batch_size"]
    last_pass = steps[-max(1, len(train) // config["training.global_batch_size"]) :]
    card = CARD.format(
        layers=model.model_args.n_layers,
        dim=model.model_args.dim,
        parameters=sum(p.numel() for p in model.parameters()),
        seed=config["debug.seed"],
        minutes=sum(event["step_s"] for event in events if event["event"] == "train") / 60,
        global_batch=config["training.global_batch_size"],
        seq_len=seq_len,
        step=best["step"],
        total_steps=config["training.steps"],
        candidates=candidates,
        documents=documents,
        epochs=documents / len(train),
        tokens=sum(event["valid_tokens"] for event in steps),
        train_ce=sum(e["ce"] * e["valid_tokens"] for e in last_pass) / sum(e["valid_tokens"] for e in last_pass),
        training_ce=best["ce"],
        ce=ce,
        ppl=math.exp(ce),
        predicted=sum(max(len(ids) - 1, 0) for ids in validation),
        validation_documents=len(validation),
        unigram=unigram,
        trigram=trigram,
    )
    (options.out / "README.md").write_text(card)
    print(card)


if __name__ == "__main__":
    main()
