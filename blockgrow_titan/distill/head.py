"""The student's language-modelling head, which computes the distillation loss inside its own forward.

Without targets it is a linear layer: hidden states in, logits out. With targets it selects the valid positions, runs
``chunked_distillation`` on them and returns the loss sums. All chunks live in one autograd node in one module call, so
as an FSDP2 unit of its own (``fully_shard(head, reshard_after_forward=False)``) the head costs one all-gather and one
reduce-scatter a call, however many chunks there are, and also on a rank without a valid token.
"""

import torch
from torch import Tensor, nn

from blockgrow_titan.distill.objective import IGNORE_INDEX, LossSums, Objective, chunked_distillation


class LossTargets:
    """What the head needs beside hidden states to compute the loss of one micro-batch.

    Args:
        labels: [B, S] int64, the next token of each position, IGNORE_INDEX where a position does not count.
        objective: Weights, temperature and chunk size.
        scale: The loss is multiplied by it, for instance 1 / valid tokens of the global batch.
        teacher_hidden: [N, D_t], the teacher's final, normed hidden states at the N valid positions, row by row.
        teacher_head: [V, D_t], the teacher's frozen head, in the dtype of ``teacher_hidden``.

    Footgun: this must be a class that FSDP2 does not look into. It casts every floating tensor that it finds in a
    module's inputs to its parameter dtype, also in tuples, lists, dicts and dataclasses; here that would round the
    scale and an fp32 teacher's hidden states to bf16.
    """

    def __init__(
        self,
        labels: Tensor,
        objective: Objective,
        scale: Tensor | float = 1.0,
        teacher_hidden: Tensor | None = None,
        teacher_head: Tensor | None = None,
    ) -> None:
        self.labels = labels
        self.objective = objective
        self.scale = scale
        self.teacher_hidden = teacher_hidden
        self.teacher_head = teacher_head


class DistillationHead(nn.Linear):
    """Language-modelling head without bias, weight [vocab_size, dim].

    Args:
        dim: D, the student's hidden size.
        vocab_size: V, the size that the checkpoint's config states, not the tokenizer's length.
    """

    def __init__(
        self, dim: int, vocab_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(dim, vocab_size, bias=False, device=device, dtype=dtype)

    @torch.compiler.disable(reason="the head's loss forms its own gradients and must run eagerly")
    def forward(self, hidden: Tensor, targets: LossTargets | None = None) -> Tensor | LossSums:
        """Logits, or with ``targets`` the loss.

        Args:
            hidden: [B, S, D], in the dtype of the weight.
            targets: None for logits, which may then have any leading dimensions.

        Returns:
            Logits [B, S, V], or ``LossSums`` over the valid positions.

        Raises:
            ValueError: labels, teacher's hidden states or teacher's head do not fit, or the objective needs a teacher.
        """
        if targets is None:
            return super().forward(hidden)
        if hidden.dim() != 3 or targets.labels.shape != hidden.shape[:2]:
            raise ValueError(
                f"labels are {list(targets.labels.shape)} and hidden states {list(hidden.shape)}: they must be "
                "[batch, sequence] and [batch, sequence, hidden size]"
            )
        labels = targets.labels.flatten()  # [B * S]
        positions = (labels != IGNORE_INDEX).nonzero().squeeze(1)  # [N]
        return chunked_distillation(
            hidden.flatten(0, 1).index_select(0, positions),  # [N, D]
            self.weight,
            labels.index_select(0, positions),
            targets.teacher_hidden,
            targets.teacher_head,
            targets.objective,
            targets.scale,
        )
