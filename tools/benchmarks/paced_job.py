"""Imported by a benchmark's jobs (``experimental.custom_import``): the plugin's own train spec, with steps at a pace.

Registers the model ``paced_block_stack``, which differs from ``qwen3_block_stack`` in its metrics alone: they wait for
permission before each step and write down when it ended (``pace.py``). So what is measured is a job as a user starts it.
"""

from typing import Any

from torchtitan.protocols.train_spec import register_train_spec

from blockgrow_titan import get_train_spec
from blockgrow_titan.growth.schedule import GrowthSchedule, Phase
from blockgrow_titan.metrics import GrowthMetricsProcessor, StepReport
from blockgrow_titan.teacher.model import TeacherModel
from tools.benchmarks import workloads  # noqa: F401  (its flavor)
from tools.benchmarks.pace import Pace

MODEL_NAME = "paced_block_stack"

pace = Pace.of_environment("teacher")  # until this process turns out to be the student's


class PacedMetrics(GrowthMetricsProcessor):
    """The plugin's metrics, which let each step wait for its permission. For one student rank."""

    def start(self, schedule: GrowthSchedule, phase: Phase, step: int) -> None:
        super().start(schedule, phase, step)
        pace.role = "student"
        pace.appear()
        for model in self.model_parts:
            pace.add(*model.parameters(), *model.buffers())
        pace.wait(step + 1)

    def log_step(self, step: int, report: StepReport, student_ranks: int) -> None:
        super().log_step(step, report, student_ranks)
        pace.ended(
            step,
            loss=report.loss,
            valid_tokens=report.valid_tokens,
            processed_tokens=report.processed_tokens,
            step_s=report.step_s,
            teacher_wait_s=report.teacher_wait_s or 0.0,
        )
        assert self.schedule is not None
        if step < self.schedule.total_steps:
            pace.wait(step + 1)


_hidden_states = TeacherModel.hidden_states


def _counted_hidden_states(teacher: TeacherModel, *args: Any, **kwargs: Any) -> Any:
    """In a teacher's own process: bytes are counted as long as the student's are."""
    if pace.role == "teacher":
        pace.appear()
        if pace.is_warm:
            pace.stop_counting()
    return _hidden_states(teacher, *args, **kwargs)


TeacherModel.hidden_states = _counted_hidden_states  # type: ignore[method-assign, assignment]
spec = get_train_spec()
spec.build_metrics_processor_fn = PacedMetrics
register_train_spec(MODEL_NAME, spec)
