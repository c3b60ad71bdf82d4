"""What runs at a phase change: hooks, in order, each with ``before_phase`` and ``after_phase``.

First every hook's ``before_phase`` sees the old phase whole; then every ``after_phase`` runs, and finds the work of the
hooks before it done. The train spec's own hooks are ``PHASE_HOOKS``; a user adds more with ``growth.hooks =
["my_module:MyHook"]``, and they run last. A hook that raises stops the job with its name.
"""

import gc
import importlib
from typing import TYPE_CHECKING

from torchtitan.tools.logging import logger

from blockgrow_titan.growth.rebuild import carry_optimizer_state, carry_parameters, set_schedule_position
from blockgrow_titan.growth.schedule import Phase

if TYPE_CHECKING:
    from blockgrow_titan.trainer import GrowthTrainer


class PhaseHook:
    """Base class: override either method, or both."""

    def before_phase(self, trainer: "GrowthTrainer", old: Phase, new: Phase) -> None:
        """Called before anything changes."""

    def after_phase(self, trainer: "GrowthTrainer", old: Phase, new: Phase) -> None:
        """Called in order once every hook's ``before_phase`` has run."""


class RebuildModel(PhaseHook):
    """Builds the deeper model around the carried shards. Without a change of depth the model object stays.

    Until ``Rewire`` lets it go, the old model is there too, but its parameters' memory is the new model's.
    """

    def after_phase(self, trainer: "GrowthTrainer", old: Phase, new: Phase) -> None:
        if (old.active_blocks, old.frozen_blocks) == (new.active_blocks, new.frozen_blocks):
            return
        trainer.optimizers.zero_grad()  # as the next step would; the new block may take the gradients' memory
        args = trainer.model_args.for_phase(new, trainer.job_config)
        model = trainer.build_model(args)
        carry_parameters(trainer.model_parts[0], model, args.seed, args.init_std)
        trainer.replaced_model = trainer.model_parts[0]  # the optimizer hook still needs it
        trainer.model_args, trainer.model_parts = args, [model]


class RebuildOptimizers(PhaseHook):
    """New optimizer and learning-rate schedule, from the train spec's builders; state as the policy says."""

    def after_phase(self, trainer: "GrowthTrainer", old: Phase, new: Phase) -> None:
        old_model = trainer.replaced_model or trainer.model_parts[0]
        old_optimizers = trainer.optimizers
        trainer.build_optimizers()
        if trainer.job_config.growth.optimizer_at_growth == "keep":
            carry_optimizer_state(old_model, old_optimizers, trainer.model_parts[0], trainer.optimizers)
        trainer.build_lr_schedulers(new)
        if trainer.job_config.growth.lr_at_growth == "continue":
            set_schedule_position(trainer.lr_schedulers, new.first_step - 1)


class Rewire(PhaseHook):
    """Points checkpointer and metrics at the new objects, and lets the old model go."""

    def before_phase(self, trainer: "GrowthTrainer", old: Phase, new: Phase) -> None:
        trainer.checkpointer.wait_for_saves()  # an asynchronous save still reads the old model

    def after_phase(self, trainer: "GrowthTrainer", old: Phase, new: Phase) -> None:
        trainer.checkpointer.rewire(trainer.model_parts, trainer.optimizers, trainer.lr_schedulers)
        trainer.point_metrics_at_model()
        trainer.replaced_model = None
        gc.collect()  # torchtitan switches Python's collector off


class LogGrowth(PhaseHook):
    """One line on the console and one event in ``metrics.jsonl``."""

    def after_phase(self, trainer: "GrowthTrainer", old: Phase, new: Phase) -> None:
        trainer.metrics_processor.log_growth(trainer.step - 1, new, trainer.model_args.n_layers, trainer.model_parts[0])


PHASE_HOOKS: tuple[type[PhaseHook], ...] = (RebuildModel, RebuildOptimizers, Rewire, LogGrowth)


def load_hooks(hook_classes: tuple[type[PhaseHook], ...], extra: list[str]) -> list[PhaseHook]:
    """Instantiate the spec's hooks and the user's.

    Raises:
        ValueError: If an entry of ``growth.hooks`` is not an importable ``module:Class`` with both methods.
    """
    hooks = [hook_cls() for hook_cls in hook_classes]
    for entry in extra:
        module, _, name = entry.partition(":")
        try:
            hook = getattr(importlib.import_module(module), name)()
        except Exception as error:  # a module of the user's may raise anything
            raise ValueError(
                f'growth.hooks has "{entry}", which must be "module:Class" of a phase hook: {type(error).__name__}: {error}'
            ) from error
        if not (callable(getattr(hook, "before_phase", None)) and callable(getattr(hook, "after_phase", None))):
            raise ValueError(f'growth.hooks has "{entry}", which lacks before_phase or after_phase (see PhaseHook)')
        hooks.append(hook)
    return hooks


def run_hooks(hooks: list[PhaseHook], trainer: "GrowthTrainer", old: Phase, new: Phase) -> None:
    """Run all ``before_phase``, then all ``after_phase``, in order."""
    for method in ("before_phase", "after_phase"):
        for hook in hooks:
            try:
                getattr(hook, method)(trainer, old, new)
            except Exception as error:
                name = f"{type(hook).__module__}:{type(hook).__qualname__}"
                text = f"Phase hook {name}.{method} failed at the change from phase {old.index} to {new.index}"
                logger.error(text)
                error.add_note(text)
                raise
