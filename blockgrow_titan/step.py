"""What a training step adds up to over the student's ranks, and whether it may change the weights."""

import math
from dataclasses import dataclass

from blockgrow_titan.metrics import GrowthMetricsProcessor, plural


@dataclass(frozen=True)
class StepSums:
    """One step's losses, reduced over the student's world."""

    loss: float
    """The objective (Eq. 5) per valid token."""
    ce: float
    """Sum over the valid tokens, as kl and kd."""
    kl: float
    kd: float
    teacher_wait_s: float
    """Mean over the ranks."""


class SkippedSteps:
    """Lets no step change a weight whose loss or gradient norm is not finite.

    Both are global, so all ranks decide alike. The data and the learning rate go on as if the step had been trained.

    Args:
        allowed: ``training.max_skipped_steps``.
        metrics: Where a skipped step is recorded.
    """

    def __init__(self, allowed: int, metrics: GrowthMetricsProcessor) -> None:
        self.allowed, self.metrics = allowed, metrics
        self.in_a_row = 0

    def may_update(self, step: int, loss: float, grad_norm: float, documents: tuple[int, int]) -> bool:
        """Whether the optimizer may take this step.

        Args:
            step: Its number.
            loss: Of the whole global batch.
            grad_norm: Before clipping.
            documents: [first, end) of the step's documents.

        Raises:
            RuntimeError: If it may not, and neither might the ``allowed`` steps before it.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        self.metrics.log_skipped(step, loss, grad_norm, documents, self.in_a_row)
        if self.in_a_row > self.allowed:
            raise RuntimeError(
                f"loss or gradient norm has not been finite for {plural(self.in_a_row, 'step')} in a row, and "
                f"training.max_skipped_steps allows {self.allowed}; at step {step}, documents {documents[0]} to "
                f"{documents[1] - 1}, the loss is {loss} and the gradient norm {grad_norm}. Lower optimizer.lr, look at these "
                "documents, or raise --training.max_skipped_steps; the same command goes on from the last checkpoint"
            )
        return False
