"""The growth schedule: a pure map from a training step to its phase, its blocks and its documents.

A run is a list of phases. Phase p covers the steps ``first_step .. last_step`` (1-based, inclusive, as torchtitan counts
them), trains ``active_blocks`` blocks, the first ``frozen_blocks`` of which get no gradient. Joint training, growth,
freezing and the budget controls are the same code with other lists (design section 3; Algorithm 1 of the paper).

Nothing here imports torch, torchtitan or distributed, so that every other part can ask.
"""

from dataclasses import dataclass
from itertools import accumulate

FREEZE = ("none", "completed_blocks")
OPTIMIZER_AT_GROWTH = ("reset", "keep")
LR_AT_GROWTH = ("restart", "continue")
DATA_AT_GROWTH = ("continue", "rewind")
NEW_BLOCK_INIT = ("random",)


@dataclass(frozen=True)
class Phase:
    """One stretch of training at a fixed depth."""

    index: int
    first_step: int
    last_step: int
    active_blocks: int
    frozen_blocks: int

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step + 1


@dataclass(frozen=True)
class GrowthSchedule:
    """Phases in order, without gaps, from step 1 on."""

    phases: tuple[Phase, ...]
    rewind: bool = False

    @property
    def total_steps(self) -> int:
        return self.phases[-1].last_step

    def phase_of_step(self, step: int) -> Phase:
        """The phase that trains ``step`` (1-based); step 0, before training, belongs to the first phase."""
        if not 0 <= step <= self.total_steps:
            raise ValueError(f"step {step} is outside this run, which has {self.total_steps} steps")
        return next(phase for phase in self.phases if step <= phase.last_step)

    def ends_phase(self, step: int) -> bool:
        """Whether ``step`` is a phase's last."""
        return any(phase.last_step == step for phase in self.phases)

    def data_offset(self, step: int) -> int:
        """t of ``step``: how many global batches its documents lie after the first one (invariant 2)."""
        start = self.phase_of_step(step).first_step if self.rewind else 1
        return step - start


def build_schedule(
    *,
    phase_steps: list[int],
    active_blocks: list[int],
    num_blocks: int,
    total_steps: int,
    freeze: str = "none",
    data_at_growth: str = "continue",
) -> GrowthSchedule:
    """Build the schedule from the lists of ``[growth]``.

    Args:
        phase_steps: Steps of each phase; empty means one phase of ``total_steps``.
        active_blocks: Blocks of each phase; empty means all ``num_blocks`` in every phase.
        num_blocks: ``block_stack.num_blocks``.
        total_steps: ``training.steps``.
        freeze: One of ``FREEZE``.
        data_at_growth: One of ``DATA_AT_GROWTH``.

    Raises:
        ValueError: If the lists contradict each other or the other arguments; names the field and the right value.
    """
    phase_steps = list(phase_steps) or [total_steps]
    active_blocks = list(active_blocks) or [num_blocks] * len(phase_steps)
    if len(phase_steps) != len(active_blocks):
        raise ValueError(
            f"growth.phase_steps has {len(phase_steps)} entries {phase_steps} but growth.active_blocks has "
            f"{len(active_blocks)} {active_blocks}: give one of each for every phase"
        )
    for steps in phase_steps:
        if steps < 1:
            raise ValueError(f"growth.phase_steps is {phase_steps}: every phase must have at least 1 step")
    if sum(phase_steps) != total_steps:
        raise ValueError(
            f"growth.phase_steps {phase_steps} sum to {sum(phase_steps)} but training.steps is {total_steps}: "
            f"set training.steps = {sum(phase_steps)} or change the phases"
        )
    for blocks in active_blocks:
        if not 1 <= blocks <= num_blocks:
            raise ValueError(
                f"growth.active_blocks is {active_blocks}: every entry must be from 1 to block_stack.num_blocks = {num_blocks}"
            )
    if any(later < earlier for earlier, later in zip(active_blocks, active_blocks[1:], strict=False)):
        raise ValueError(f"growth.active_blocks is {active_blocks}: it may never fall, since blocks are only added")

    frozen_blocks = [0, *active_blocks[:-1]] if freeze == "completed_blocks" else [0] * len(active_blocks)
    for index, (active, frozen) in enumerate(zip(active_blocks, frozen_blocks, strict=True)):
        if frozen >= active:
            raise ValueError(
                f'growth.freeze = "completed_blocks" with growth.active_blocks {active_blocks} leaves no trainable block in '
                f'phase {index}: let active_blocks rise at every phase, or set growth.freeze = "none"'
            )

    last_steps = list(accumulate(phase_steps))
    phases = tuple(
        Phase(index, last - steps + 1, last, active, frozen)
        for index, (steps, last, active, frozen) in enumerate(
            zip(phase_steps, last_steps, active_blocks, frozen_blocks, strict=True)
        )
    )
    return GrowthSchedule(phases, rewind=data_at_growth == "rewind")


def schedule_of(job_config) -> GrowthSchedule:
    """The schedule of a job config (``[growth]``, ``[block_stack]``, ``training.steps``)."""
    growth = job_config.growth
    return build_schedule(
        phase_steps=growth.phase_steps,
        active_blocks=growth.active_blocks,
        num_blocks=job_config.block_stack.num_blocks,
        total_steps=job_config.training.steps,
        freeze=growth.freeze,
        data_at_growth=growth.data_at_growth,
    )
