"""The model card of an exported student: what it is, where it stands in its run, how good it measured, how to load it."""

import json
from typing import Any

from blockgrow_titan.events import METRICS_FILE, read_events
from blockgrow_titan.hf.checkpoint import StudentCheckpoint
from blockgrow_titan.metrics import plural

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- qwen3
- depth-growing
- distillation
---
# {title}

A Qwen3 block stack of {layers} and {parameters:,} parameters, norm placement `{placement}`, trained with
blockgrow_titan {taught}. It was exported {moment}.

{code}

    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained("PATH"{trust})
    model = AutoModelForCausalLM.from_pretrained("PATH"{trust})

This card names no license: the model's is its owner's to choose.

## Training

| phase | steps | blocks | layers | frozen blocks | |
|---|---|---|---|---|---|
{phases}

Validation at this step, in nats a token: {measured}.

A document ends with `{end_of_document}`; documents of more than {seq_len} tokens were cut there, so positions beyond
that were never trained.

## How it was exported

    python -m tools.convert_hf to-hf {checkpoint} OUT --dtype {dtype}

Weights are {dtypes}; no optimizer state. The run's growth manifest:

```json
{manifest}
```
"""


def model_card(checkpoint: StudentCheckpoint, dtype: str, dtypes: str, parameters: int) -> str:
    """The README.md of an exported student.

    Args:
        checkpoint: Where it comes from.
        dtype: As asked for: "auto" or a dtype's name.
        dtypes: As written, in words.
        parameters: Number of parameters.
    """
    manifest, config, phase = checkpoint.manifest, checkpoint.manifest["config"], checkpoint.phase
    step, teacher = checkpoint.step, config["teacher.path"]
    custom = not checkpoint.layer_cls.is_qwen3
    at = "" if step is None else f"at step {step} of {config['training.steps']}, "
    name = f"{checkpoint.folder.parent.parent.name}, {checkpoint.folder.name}"
    return CARD.format(
        title=name,
        layers=plural(checkpoint.layers, "layer"),
        parameters=parameters,
        placement=config["block_stack.placement"],
        taught=f"by distillation from `{teacher}`" if teacher else "from scratch, without a teacher",
        moment=f"{at}in phase {phase['index']} of {len(manifest['phases'])} (counted from 0)",
        code=(
            "Its norms do not stand where Qwen3's do: it carries its modelling code, which `trust_remote_code` runs "
            "(transformers 4.57 or later)."
            if custom
            else "It is a plain `Qwen3ForCausalLM`."
        ),
        trust=", trust_remote_code=True" if custom else "",
        phases="\n".join(_row(checkpoint, entry) for entry in manifest["phases"]),
        measured=_measured(checkpoint),
        end_of_document=config["documents.end_of_document"],
        seq_len=checkpoint.args.max_seq_len,
        checkpoint=checkpoint.folder.name,
        dtype=dtype,
        dtypes=dtypes,
        manifest=json.dumps(manifest, indent=1),
    )


def _row(checkpoint: StudentCheckpoint, phase: dict[str, Any]) -> str:
    values = (
        phase["index"],
        f"{phase['first_step']} to {phase['last_step']}",
        phase["active_blocks"],
        phase["active_blocks"] * checkpoint.layers_per_block,
        phase["frozen_blocks"],
        "**this model**" if phase is checkpoint.phase else "",
    )
    return f"| {' | '.join(map(str, values))} |"


def _measured(checkpoint: StudentCheckpoint) -> str:
    """ce, ppl and kl of the run's validation at the checkpoint's step, in its phase."""
    path = checkpoint.folder.parent.parent / METRICS_FILE
    found = [
        event
        for event in read_events(str(path))
        if event["event"] == "validation"
        and event["step"] == checkpoint.step
        and event["phase"] == checkpoint.phase["index"]
    ]
    if not found:
        return "not measured"
    names = {"ce": "cross-entropy {:.4f}", "ppl": "perplexity {:.2f}", "kl": "KL to the teacher {:.4f}"}
    return ", ".join(text.format(found[-1][name]) for name, text in names.items() if found[-1].get(name) is not None)
