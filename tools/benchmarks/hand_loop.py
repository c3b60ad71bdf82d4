"""The loop that a user would write by hand: two transformers models, ``F.kl_div`` on full logits, padding masked.

    python -m tools.benchmarks.hand_loop WORKLOAD.json

Three forms of it, which compute the same: documents padded to the cap with the attention mask passed; the same without the
mask, which causal attention and right padding do not need; padded to the longest document of the micro-batch instead. As
they compute the same, one process takes each of its steps in whichever form it is told to. Documents are tokenised before
the first step, which is in the loop's favour.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.benchmarks.pace import Pace
from tools.benchmarks.workloads import GLOBAL_BATCH, OPTIMIZER, Workload

FORMS = {
    "mask": "padded to the cap, attention mask passed",
    "cap": "padded to the cap, no attention mask",
    "longest": "padded to the longest, no attention mask",
}
IGNORE_INDEX = -100


class HandLoop:
    """Student, teacher, optimizer and documents of a workload's folder.

    Args:
        workload: What is trained.
        dtype: Of both models.
    """

    def __init__(self, workload: Workload, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.workload = workload
        self.student, self.teacher = (
            AutoModelForCausalLM.from_pretrained(workload.folder / name, dtype=dtype) for name in ("student", "teacher")
        )
        self.student.train().get_input_embeddings().requires_grad_(False)
        self.teacher.eval().requires_grad_(False)
        self.trained = [p for p in self.student.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained,
            lr=OPTIMIZER["lr"],
            betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]),
            eps=OPTIMIZER["eps"],
            weight_decay=OPTIMIZER["weight_decay"],
            foreach=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(workload.folder / "teacher")
        end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        ids = tokenizer(workload.texts(), add_special_tokens=False)["input_ids"]
        self.documents = [[*document, end][: workload.cap] for document in ids]

    def step(self, step: int, form: str) -> tuple[float, int]:
        """One optimizer step on the documents of ``step``, from 1; returns loss and valid tokens."""
        first = (step - 1) * GLOBAL_BATCH
        documents = [self.documents[(first + i) % len(self.documents)] for i in range(GLOBAL_BATCH)]
        valid = sum(len(ids) - 1 for ids in documents)
        self.optimizer.zero_grad()
        total = 0.0
        for i in range(0, GLOBAL_BATCH, self.workload.loop_documents):
            loss = self.loss(documents[i : i + self.workload.loop_documents], form) / valid
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.trained, self.workload.max_norm)
        self.optimizer.step()
        return total, valid

    def loss(self, documents: Sequence[Sequence[int]], form: str) -> Tensor:
        """The objective's sum over the valid tokens of a micro-batch."""
        inputs, labels, mask = self.pad(documents, form)
        attention_mask = mask if form == "mask" else None
        with torch.no_grad():
            teacher = self.teacher(inputs, attention_mask=attention_mask, use_cache=False).logits  # [B, S, V]
        student = self.student(inputs, attention_mask=attention_mask, use_cache=False).logits  # [B, S, V]
        log_p, log_q = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
        kl = (F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1) * mask).sum()
        ce = F.cross_entropy(student.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        return self.workload.kd_weight * kl + self.workload.ce_weight * ce

    def pad(self, documents: Sequence[Sequence[int]], form: str) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, labels and attention mask, each [B, S] int64."""
        length = max(len(ids) for ids in documents) if form == "longest" else self.workload.cap
        inputs = torch.zeros(len(documents), length - 1, dtype=torch.int64)
        labels = torch.full_like(inputs, IGNORE_INDEX)
        for row, ids in enumerate(documents):
            inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
            labels[row, : len(ids) - 1] = torch.tensor(ids[1:])
        return inputs, labels, (labels != IGNORE_INDEX).long()


def main(path: str) -> None:
    """Take the steps of a workload at the pace of whoever started this process."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (what follows counts as memory)

    pace = Pace.of_environment("loop")
    pace.appear()
    workload = Workload(**json.loads(Path(path).read_text()))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    loop = HandLoop(workload)
    for model in (loop.student, loop.teacher):
        pace.add(*model.parameters(), *model.buffers())
    step = 0
    while True:
        step += 1
        form = pace.wait(step)
        loss, valid = loop.step(step, form)
        pace.ended(step, loss=loss, valid_tokens=valid)


if __name__ == "__main__":
    main(sys.argv[1])
