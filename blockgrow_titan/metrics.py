"""What a run reports: console, TensorBoard, ``metrics.jsonl``, and ``summary.json`` with a closing table.

``metrics.jsonl`` has one JSON object a line, one ``train`` line for every step (``skipped`` for a step whose numbers were
not finite), and is the record that everything else reads: the summary is computed from it. Whether or not a run was
interrupted, both are the same, but for timings, a ``resume`` line, and the ``checkpoint`` line of a run that was asked to
stop. On resume, lines after the checkpoint's step are dropped (they will be written again) and TensorBoard purges the same steps.
``diagnostics.jsonl``, if enabled, has a line for every validation and is kept in the same way (``diagnostics/recorder.py``).
"""

import json
import math
import os
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import LoggerContainer, MetricsProcessor, TensorBoardLogger, WandBLogger
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from blockgrow_titan.diagnostics.recorder import histograms, scalars
from blockgrow_titan.events import DIAGNOSTICS_FILE, METRICS_FILE, EventFile, read_events
from blockgrow_titan.growth.schedule import GrowthSchedule, Phase
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import BlockStackArgs

SUMMARY_FILE = "summary.json"
STEP_EVENTS = ("train", "skipped")
_NOT_LOGGED = ("step", "phase", "active_blocks", "active_layers", "seconds")  # in events, not in TensorBoard


@dataclass(frozen=True)
class StepReport:
    """One training step, reduced over the student's world. Without a teacher kl and kd are None."""

    loss: float  # the objective (Eq. 5) per valid token
    ce: float
    kl: float | None
    kd: float | None
    lr: float
    grad_norm: float
    valid_tokens: int
    processed_tokens: int  # valid tokens and padding
    documents: tuple[int, int]  # [first, end) in the endlessly repeated shard
    teacher_wait_s: float | None  # mean over student ranks
    step_s: float


class GrowthMetricsProcessor(MetricsProcessor):
    """torchtitan's MetricsProcessor with a line for every step and the phase in every line.

    ``start`` must be called, once the step that training starts from is known, before anything is logged.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims, model_args: BlockStackArgs) -> None:
        super().__init__(_without_loggers(job_config), parallel_dims)
        self.job_config = job_config
        self.writes = torch.distributed.get_rank() == 0
        self.events = EventFile(os.path.join(job_config.job.dump_folder, METRICS_FILE))
        self.diagnostics = EventFile(os.path.join(job_config.job.dump_folder, DIAGNOSTICS_FILE))
        self.schedule: GrowthSchedule | None = None
        self.phase: Phase | None = None
        self.active_layers = model_args.n_layers
        self.recent_step_s: deque[float] = deque(maxlen=50)

    def start(self, schedule: GrowthSchedule, phase: Phase, step: int) -> None:
        """Open the files where ``step`` left them: everything later is dropped."""
        self.schedule, self.phase = schedule, phase
        if not self.writes:
            return
        os.makedirs(self.job_config.job.dump_folder, exist_ok=True)
        events = self.events.take_up(step, phase.index)
        # The validations before and after growth share a step, but only the first is kept: purge that step too, and give
        # the loggers what was kept of it.
        self.logger = _build_loggers(self.job_config, purge_step=step)
        for event in events:
            kind = event["event"]
            if kind == "validation" or (kind == "train" and self.should_log(step)):
                values = {
                    f"{kind}/{k}": v for k, v in event.items() if isinstance(v, int | float) and k not in _NOT_LOGGED
                }
                self.logger.log(values, step)
        if self.job_config.diagnostics.enable or os.path.exists(self.diagnostics.path):
            for record in self.diagnostics.take_up(step, phase.index):
                self._show_diagnostics(step, record)
        if step > 0:
            if not any(event["event"] == "checkpoint" for event in events):
                self._write("checkpoint", step)  # the run was killed between the save and its line
            self._write("resume", step)

    def _write(self, event: str, step: int, **fields: Any) -> None:
        if self.events.file is None:
            return
        assert self.phase is not None
        record = {
            "event": event,
            "step": step,
            "phase": self.phase.index,
            "active_blocks": self.phase.active_blocks,
            "active_layers": self.active_layers,
        }
        record |= {name: value for name, value in fields.items() if value is not None}
        self.events.write(record)

    def log_step(self, step: int, report: StepReport, student_ranks: int) -> None:
        """Record one step; print it and send it to TensorBoard every ``metrics.log_freq`` steps."""
        self.recent_step_s.append(report.step_s)
        if not self.writes:
            return
        memory = self.device_memory_monitor.get_peak_stats()
        tokens_per_s = report.valid_tokens / report.step_s
        derived = {
            "ppl": perplexity(report.ce),
            "active_layer_tokens": report.valid_tokens * self.active_layers,
            "tokens_per_s": tokens_per_s,
            "padding_efficiency": report.valid_tokens / max(report.processed_tokens, 1),
            "memory_gib": memory.max_reserved_gib,
        }
        mfu = 100 * self.num_flops_per_token * tokens_per_s / student_ranks / self.gpu_peak_flops
        values = asdict(report) | derived | {"mfu_percent": None if math.isnan(mfu) else mfu}
        del values["processed_tokens"]
        self._write("train", step, **values)
        if self.should_log(step):
            self.logger.log({f"train/{k}": v for k, v in values.items() if isinstance(v, int | float)}, step)
            self._print_step(step, report, tokens_per_s, memory, mfu, student_ranks)
            self.device_memory_monitor.reset_peak_stats()

    def log_skipped(
        self, step: int, loss: float, grad_norm: float, documents: tuple[int, int], skipped_in_a_row: int
    ) -> None:
        """Record a step that changed no weight, since its loss or gradient norm was not finite."""
        numbers = {"loss": loss, "grad_norm": grad_norm}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}  # JSON has no other numbers
        self._write("skipped", step, **finite, documents=documents, skipped_in_a_row=skipped_in_a_row)
        if not self.writes:
            return
        self.logger.log({"train/skipped_in_a_row": skipped_in_a_row}, step)
        logger.warning(
            f"step: {step:2}  skipped, no weight is changed: loss {loss}, grad_norm {grad_norm} of documents "
            f"{documents[0]} to {documents[1] - 1}; {plural(skipped_in_a_row, 'step')} in a row, "
            f"training.max_skipped_steps = {self.job_config.training.max_skipped_steps}"
        )

    def _print_step(
        self, step: int, report: StepReport, tokens_per_s: float, memory: Any, mfu: float, student_ranks: int
    ) -> None:
        assert self.schedule is not None and self.phase is not None
        c, phase = self.color, self.phase
        pace = sum(self.recent_step_s) / len(self.recent_step_s)
        parts = [
            f"{c.red}step: {step:2}/{self.schedule.total_steps}",
            f"{c.white}phase: {phase.index} ({plural(self.active_layers, 'layer')})",
            f"{c.green}loss: {report.loss:7.4f}  ce: {report.ce:7.4f}",
            f"{c.green}kl: {report.kl:7.4f}" if report.kl is not None else "",
            f"{c.orange}grad_norm: {report.grad_norm:7.4f}",
            f"{c.orange}lr: {report.lr:.2e}",
            f"{c.turquoise}memory: {memory.max_reserved_gib:5.2f}GiB({memory.max_reserved_pct:.2f}%)",
            f"{c.blue}valid tokens/s: {round(tokens_per_s):,} over {plural(student_ranks, 'student rank')}",
            f"{c.magenta}mfu: {mfu:.2f}%" if not math.isnan(mfu) else "",
            f"{c.cyan}teacher wait: {report.teacher_wait_s:.3f}s" if report.teacher_wait_s is not None else "",
            f"{c.white}eta: phase {duration(pace * (phase.last_step - step))}, "
            f"run {duration(pace * (self.schedule.total_steps - step))}{c.reset}",
        ]
        logger.info("  ".join(part for part in parts if part))

    def log_validation(self, step: int, result: dict[str, Any], seconds: float) -> None:
        """Record a validation: ``result`` as ``validate.GrowthValidator.validate`` returns it."""
        self._write("validation", step, **result, seconds=seconds)
        if not self.writes:
            return
        assert self.phase is not None
        self.logger.log({f"validation/{k}": v for k, v in result.items() if v is not None}, step)
        c = self.color
        kl = f"kl: {result['kl']:7.4f}  kd: {result['kd']:7.4f}  " if result["kl"] is not None else ""
        logger.info(
            f"{c.yellow}validate step: {step:2}  phase: {self.phase.index} ({plural(self.active_layers, 'layer')})  "
            f"{c.green}ce: {result['ce']:7.4f}  ppl: {result['ppl']:8.2f}  {kl}"
            f"{c.blue}{result['documents']} documents, {result['valid_tokens']:,} tokens in {seconds:.1f}s{c.reset}"
        )

    def log_diagnostics(self, step: int, record: dict[str, Any], seconds: float) -> None:
        """Record what ``diagnostics.recorder.Diagnostics.measure`` returned at a validation."""
        if not self.writes:
            return
        assert self.phase is not None
        self.diagnostics.write({"step": step, "phase": self.phase.index} | record)
        self._show_diagnostics(step, record)
        rms = " ".join(_number(boundary["mean"], ".3g") for boundary in record["boundaries"])
        removal = " ".join(_number(removal["delta_ce"], "+.3f") for removal in record["removal"])
        c = self.color
        logger.info(
            f"{c.yellow}diagnose step: {step:2}  phase: {self.phase.index} ({plural(self.active_layers, 'layer')})  "
            f"{c.green}rms at each boundary: {rms}  ce without each block: {removal}  "
            f"{c.blue}{record['tokens']:,} tokens in {seconds:.2f}s{c.reset}"
        )

    def _show_diagnostics(self, step: int, record: dict[str, Any]) -> None:
        assert isinstance(self.logger, _Loggers)
        self.logger.log(scalars(record), step)
        self.logger.log_histograms(histograms(record), step)

    def log_growth(self, step: int, phase: Phase, active_layers: int, model: nn.Module) -> None:
        """Enter ``phase``, after ``step`` steps: every later line carries it."""
        self.phase, self.active_layers = phase, active_layers
        self.recent_step_s.clear()
        params = list(model.parameters())
        total = sum(p.numel() for p in params)
        trainable = sum(p.numel() for p in params if p.requires_grad)
        self._write("growth", step, frozen_blocks=phase.frozen_blocks, parameters=total, trainable_parameters=trainable)
        c = self.color
        logger.info(
            f"{c.yellow}grow after step {step}: phase {phase.index} trains {plural(phase.active_blocks, 'block')} "
            f"({plural(active_layers, 'layer')}, {plural(phase.frozen_blocks, 'block')} frozen) for {phase.steps} steps; {total:,} parameters, "
            f"{trainable:,} trainable{c.reset}"
        )

    def log_checkpoint(self, step: int, seconds: float) -> None:
        """Record that the checkpoint of ``step`` was saved (or staged, if saves are asynchronous)."""
        self._write("checkpoint", step, seconds=seconds)

    def flush(self) -> None:
        """Return once everything logged is on disk: a checkpoint must not outlive the record of what led to it."""
        if self.writes:
            self.events.flush()
            self.diagnostics.flush()
            assert isinstance(self.logger, _Loggers)
            self.logger.flush()

    def close(self) -> None:
        self.events.close()
        self.diagnostics.close()
        super().close()


def _without_loggers(job_config: JobConfig) -> JobConfig:
    """torchtitan would open a TensorBoard folder named after the clock; ours is one folder across resumes."""
    import copy

    job_config = copy.copy(job_config)
    job_config.metrics = copy.copy(job_config.metrics)
    job_config.metrics.enable_tensorboard = job_config.metrics.enable_wandb = False
    return job_config


class _ResumableTensorBoard(TensorBoardLogger):
    """TensorBoard in one folder; steps from ``purge_step`` on are replaced."""

    def __init__(self, log_dir: str, purge_step: int) -> None:
        self.tag = None
        self.writer = SummaryWriter(log_dir, max_queue=1000, purge_step=purge_step)


class _Loggers(LoggerContainer):
    """torchtitan's container, with histograms for those loggers that can take counts of bins."""

    def flush(self) -> None:
        """Return once TensorBoard's events are written: they wait in a queue."""
        for each in self._loggers:
            if isinstance(each, _ResumableTensorBoard):
                each.writer.flush()

    def log_histograms(self, values: dict[str, dict[str, Any]], step: int) -> None:
        for each in self._loggers:
            if isinstance(each, _ResumableTensorBoard):
                for tag, histogram in values.items():
                    each.writer.add_histogram_raw(tag, **histogram, global_step=step)


def _build_loggers(job_config: JobConfig, purge_step: int) -> _Loggers:
    loggers = _Loggers()
    folder = os.path.join(job_config.job.dump_folder, job_config.metrics.save_tb_folder)
    if job_config.metrics.enable_wandb:
        loggers.add_logger(WandBLogger(folder, job_config))
    if job_config.metrics.enable_tensorboard:
        loggers.add_logger(_ResumableTensorBoard(folder, purge_step))
        logger.info(f"TensorBoard logs are in {folder}")
    return loggers


def build_growth_metrics_processor(
    job_config: JobConfig, parallel_dims: ParallelDims, model_args: BlockStackArgs
) -> GrowthMetricsProcessor:
    """The train spec's ``build_metrics_processor_fn``."""
    return GrowthMetricsProcessor(job_config, parallel_dims, model_args)


def perplexity(ce: float) -> float:
    """exp(ce), infinite where that overflows."""
    return math.inf if ce >= 700 else math.exp(ce)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def plural(count: int, noun: str) -> str:
    """1 layer, 2 layers."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds as 1h02m, 3m04s or 5s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def summarize(events: list[dict[str, Any]], manifest: dict[str, Any]) -> dict[str, Any]:
    """The run's summary from its events: one row for each phase that has trained.

    ce, ppl, kl and kd are those of the validation at the phase's last step (the scheduled endpoint, never the best).
    """
    rows = []
    for phase in manifest["phases"]:
        index, last_step = phase["index"], phase["last_step"]
        trained, skipped = ([e for e in events if (e["event"], e["phase"]) == (kind, index)] for kind in STEP_EVENTS)
        final = [e for e in events if e["event"] == "validation" and (e["phase"], e["step"]) == (index, last_step)]
        if steps := trained + skipped:
            row = {name: steps[-1][name] for name in ("phase", "active_blocks", "active_layers")}
            row |= {"steps": len(steps), "skipped_steps": len(skipped)}
            row |= {name: sum(e[name] for e in trained) for name in ("valid_tokens", "active_layer_tokens")}
            row |= {name: final[-1].get(name) if final else None for name in ("ce", "ppl", "kl", "kd")}
            row["seconds"] = round(sum(e["step_s"] for e in trained), 3)
            rows.append(row)
    return {"phases": rows, "manifest": manifest}


def write_summary(dump_folder: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """Compute the summary from ``metrics.jsonl``, write ``summary.json`` whole, and return it."""
    summary = summarize(read_events(os.path.join(dump_folder, METRICS_FILE)), manifest)
    path = os.path.join(dump_folder, SUMMARY_FILE)
    with open(f"{path}.tmp", "w") as file:
        json.dump(summary, file, indent=1)
    os.replace(f"{path}.tmp", path)
    return summary


def closing_table(summary: dict[str, Any]) -> list[str]:
    """The summary as lines of a table, one row a phase."""
    columns = {
        "phase": "d",
        "active_blocks": "d",
        "active_layers": "d",
        "steps": ",d",
        "skipped_steps": ",d",
        "valid_tokens": ",d",
        "active_layer_tokens": ",d",
        "ce": ".4f",
        "ppl": ".2f",
        "kl": ".4f",
        "kd": ".4f",
        "seconds": ".1f",
    }
    rows = summary["phases"]
    hidden = () if any(row["skipped_steps"] for row in rows) else ("skipped_steps",)
    shown = [name for name in columns if name not in hidden and any(row[name] is not None for row in rows)]
    cells = [[name.replace("_", " ") for name in shown]]
    for row in summary["phases"]:
        cells.append([format(row[name], columns[name]) if row[name] is not None else "-" for name in shown])
    widths = [max(len(line[i]) for line in cells) for i in range(len(shown))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
