"""The student's trainer: torchtitan's Trainer over a growth schedule, in the order of the data.

    __init__          phase of the checkpoint to resume -> model of that depth -> optimizer, loader, teacher, validator
    train             load; then for every step: grow if its phase is new -> train_step -> validate -> save
    batch_generator   micro-batches, with the teacher already working on the ones ahead
    train_step        all micro-batches of the step -> global valid tokens -> forward and backward -> clip -> update, or skip
    grow              phase hooks: rebuild model, optimizer, learning rate; rewire checkpointer and metrics

torchtitan's ``Trainer.__init__`` is used as it is, on a copy of the config (see ``_titan_view``). ``train`` and
``train_step`` are our own: validation must precede the save (a checkpoint then implies that what led to it has been
recorded), every step's losses are reduced over all ranks, a rank or a whole batch without a valid token must not
divide by zero, a step whose numbers are not finite must change no weight, and a run that is asked to stop must save first.
"""

import copy
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.tools import utils
from torchtitan.tools.logging import logger
from torchtitan.tools.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.train import Trainer

from blockgrow_titan import stopping
from blockgrow_titan.checkpoint import GrowthCheckpointManager
from blockgrow_titan.diagnostics.gradients import gradient_norms
from blockgrow_titan.distill.head import LossTargets
from blockgrow_titan.distill.objective import LossSums, Objective
from blockgrow_titan.documents.batches import Batch
from blockgrow_titan.documents.source import report_bad_documents
from blockgrow_titan.growth.hooks import load_hooks, run_hooks
from blockgrow_titan.growth.identity import agreed_identity
from blockgrow_titan.growth.manifest import build_manifest
from blockgrow_titan.growth.schedule import Phase, schedule_of
from blockgrow_titan.infra.parallelize import data_parallel_dims
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.metrics import GrowthMetricsProcessor, StepReport, closing_table, plural, write_summary
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.model.init import named_parameters, write_full
from blockgrow_titan.paths import resolve
from blockgrow_titan.spec import GrowthTrainSpec
from blockgrow_titan.step import SkippedSteps, StepSums
from blockgrow_titan.teacher.files import open_teacher
from blockgrow_titan.teacher.worlds import World


class GrowthTrainer(Trainer):
    """Trains the student on the ranks of its world.

    Args:
        job_config: The merged config, already checked (``checks.py``).
        world: This rank's place in the job; the default process group spans the student's ranks only.
        resume_step: Step of the checkpoint that ``train`` will load, 0 for a fresh start.
    """

    train_spec: GrowthTrainSpec
    model_args: BlockStackArgs
    metrics_processor: GrowthMetricsProcessor
    checkpointer: GrowthCheckpointManager

    def __init__(self, job_config: JobConfig, world: World, resume_step: int = 0) -> None:
        self.world = world
        self.resume_step = resume_step
        self.schedule = schedule_of(job_config)
        self.phase: Phase = self.schedule.phase_of_step(resume_step)
        self.active_layer_tokens = 0
        self.stopping = False  # all student ranks agree on it at the end of a step
        self.replaced_model: nn.Module | None = None  # during growth: the model that the new one replaces
        job_config.maybe_log()
        super().__init__(self._titan_view(job_config))
        self.job_config: JobConfig = job_config
        self.metrics_processor.job_config = job_config
        self.objective = cast(Objective, self.loss_fn)
        self.skipped = SkippedSteps(job_config.training.max_skipped_steps, self.metrics_processor)
        self.hooks = load_hooks(self.train_spec.phase_hooks, job_config.growth.hooks)
        self.build_lr_schedulers(self.phase)
        # torchtitan was shown the next multiple of the ranks; exactly the configured documents are dealt
        self.dataloader.global_batch_size = job_config.training.global_batch_size

        self.teacher = self.train_spec.build_teacher_client_fn(job_config, world, self.device)
        self._copy_from_teacher()
        self.validator = self._build_validator() if job_config.validation.enable else None
        self.checkpointer = self._build_checkpointer()
        logger.info(
            f"Student of {plural(world.role_size, 'rank')}: global batch of {job_config.training.global_batch_size} "
            f"documents in {self.dataloader.micro_batching}, "
            f"{plural(self.schedule.total_steps, 'step')} in {plural(len(self.schedule.phases), 'phase')}"
        )

    def _titan_view(self, job_config: JobConfig) -> JobConfig:
        """The config as torchtitan's constructor should see it.

        It builds the model of ``growth.start_phase``. It asserts that the global batch divides by ranks and local batch:
        it is shown the next multiple. It builds neither checkpointer nor validator: ours need the teacher and the
        schedule.
        """
        view = copy.deepcopy(job_config)
        view.growth.start_phase = self.phase.index
        training = view.training
        rows = self.world.role_size * training.local_batch_size
        training.global_batch_size = -(-training.global_batch_size // rows) * rows
        view.checkpoint.enable = False
        view.validation.enable = False
        view.job.print_config, view.job.save_config_file = False, None  # the real config has been logged
        return view

    def init_distributed(self) -> ParallelDims:
        """The student world's mesh; its default process group exists already (``teacher.worlds.join_world``)."""
        return data_parallel_dims(self.job_config, dist.get_world_size())

    # What a phase is made of: each is used at start and again at growth.

    def build_model(self, args: BlockStackArgs) -> nn.Module:
        """A model for ``args``, parallelised, buffers filled, parameters on the meta device (see ``growth/rebuild.py``)."""
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[self.job_config.training.dtype]):
            model = self.train_spec.model_cls(args)
        build_model_converters(self.job_config, self.parallel_dims).convert(model)
        model = self.train_spec.parallelize_fn(model, self.parallel_dims, self.job_config)
        model.init_buffers(self.device)
        return model.train()

    def build_optimizers(self) -> None:
        """A fresh optimizer over the current model's trainable parameters."""
        self.optimizers = self.train_spec.build_optimizers_fn(
            self.model_parts, self.job_config.optimizer, self.parallel_dims
        )
        converters = build_model_converters(self.job_config, self.parallel_dims)
        self.optimizers.register_step_post_hook(
            lambda *args, **kwargs: converters.post_optimizer_hook(self.model_parts)
        )

    def build_lr_schedulers(self, phase: Phase) -> None:
        """A learning-rate schedule from its start, over the phase's steps or the run's (``growth.lr_at_growth``)."""
        restart = self.job_config.growth.lr_at_growth == "restart"
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.job_config.optimizer.lr
                group.pop("initial_lr", None)  # of a schedule that torchtitan's constructor built for the whole run
        self.lr_schedulers = self.train_spec.build_lr_schedulers_fn(
            self.optimizers, self.job_config.lr_scheduler, phase.steps if restart else self.schedule.total_steps
        )

    def point_metrics_at_model(self) -> None:
        """FLOPs, optimizer and model of the current depth for the metrics (MFU follows the active depth)."""
        metrics = self.metrics_processor
        metrics.optimizers, metrics.model_parts = self.optimizers, self.model_parts
        _, metrics.num_flops_per_token = self.model_args.get_nparams_and_flops(
            self.model_parts[0], self.job_config.training.seq_len
        )

    def _copy_from_teacher(self) -> None:
        """Embedding, head and boundary norm start as the teacher's (the paper's Algorithm 1, line 1)."""
        if self.teacher is None or self.resume_step:
            return
        files = open_teacher(resolve(self.job_config.teacher.path, "teacher.path"))
        parameters = dict(named_parameters(self.model_parts[0]))
        for fqn, read in (
            ("tok_embeddings.weight", files.embedding),
            ("output.weight", files.head),
            ("norm.weight", files.final_norm),
        ):
            write_full(parameters[fqn], read().to(parameters[fqn].dtype))

    def _build_validator(self) -> Any:
        assert self.train_spec.build_validator_fn is not None
        return self.train_spec.build_validator_fn(
            self.job_config,
            dp_rank=self.world.role_rank,
            dp_world_size=self.world.role_size,
            tokenizer=self.tokenizer,
            objective=self.objective,
            schedule=self.schedule,
            teacher=self.teacher,
            metrics_processor=self.metrics_processor,
            device=self.device,
        )

    def _sources(self) -> dict[str, Any]:
        """The documents of each set; None for a loader or validator of somebody's own that has no ``source``."""
        owners = {"training": self.dataloader} | ({"validation": self.validator} if self.validator else {})
        return {name: getattr(owner, "source", None) for name, owner in owners.items()}

    def _build_checkpointer(self) -> GrowthCheckpointManager:
        assert self.train_spec.state_dict_adapter is not None
        config = self.job_config
        folder = os.path.join(config.job.dump_folder, config.checkpoint.folder, f"step-{self.resume_step}")
        data = agreed_identity(self._sources(), self.world, folder if self.resume_step else None)
        self.manifest = build_manifest(config, self.schedule, self.model_args, self.train_spec.model_cls, data)
        return GrowthCheckpointManager(
            schedule=self.schedule,
            manifest=self.manifest,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            checkpoint_config=self.job_config.checkpoint,
            sd_adapter=self.train_spec.state_dict_adapter(self.model_args, None),
            base_folder=self.job_config.job.dump_folder,
            keep_boundary_checkpoints=config.growth.keep_boundary_checkpoints,
        )

    @record
    def train(self) -> None:
        """Train every step after the checkpoint's, then write the summary.

        torchtitan lowers the collectives' time limit to ``comm.train_timeout_seconds`` after the first step. Here it
        stays: growth, a validation or a slow teacher may hold one rank while the others wait, and whether a peer is
        alive is told by heartbeats and broken connections.
        """
        config = self.job_config
        self.checkpointer.load(step=self.resume_step or -1)
        assert self.step == self.resume_step, f"loaded step {self.step}, expected {self.resume_step}"
        self.metrics_processor.start(self.schedule, self.phase, self.step)
        logger.info(f"Training starts at step {self.step + 1} of {self.schedule.total_steps}")
        if self.step == 0:
            self._validate()

        profile = {"global_step": self.step, "base_folder": config.job.dump_folder}
        with (
            maybe_enable_profiling(config.profiling, **profile) as torch_profiler,
            maybe_enable_memory_snapshot(config.profiling, **profile) as memory_profiler,
        ):
            assert self.dataloader is not None
            self.dataloader.first_step = self.step + 1
            data_iterator = self.batch_generator(self.dataloader)
            while self.should_continue_training() and not self.stopping:
                self.step += 1
                phase = self.schedule.phase_of_step(self.step)
                if phase != self.phase:
                    self.grow(phase)
                self.gc_handler.run(self.step)
                self.train_step(data_iterator)
                if self.validator is not None and self.validator.should_validate(self.step):
                    self._validate()
                self._save()
                for profiler in (torch_profiler, memory_profiler):
                    if profiler:
                        profiler.step()
        if self.should_continue_training():
            self._stop()
        else:
            self._finish()

    def grow(self, phase: Phase) -> None:
        """Enter a phase before its first step (``self.step``): run the hooks, then validate the student as it starts."""
        old, self.phase = self.phase, phase
        run_hooks(self.hooks, self, old, phase)
        self._validate(self.step - 1)

    def _validate(self, step: int | None = None) -> None:
        if self.validator is not None:
            self.validator.validate(self.model_parts, self.step if step is None else step)

    def _save(self) -> None:
        """Save if this step is due or the run stops here.

        While steps are skipped, saves are put off but for those that the schedule needs: whatever made the numbers bad
        may have been in the weights, and must not push out the last good checkpoint.
        """
        if self.skipped.in_a_row and not self.stopping and not self.schedule.ends_phase(self.step):
            return
        started = time.perf_counter()
        last_step = self.step == self.schedule.total_steps
        if self.checkpointer.save(self.step, last_step, self.stopping, before=self.metrics_processor.flush):
            self.metrics_processor.log_checkpoint(self.step, time.perf_counter() - started)

    def _stop(self) -> None:
        """End before the last step, as asked, once the checkpoint of this step is whole."""
        self.checkpointer.wait_for_saves()
        if self.teacher is not None:
            self.teacher.close()
        if self.checkpointer.saved_step == self.step:
            ending = f"Saved at step {self.step} of {self.schedule.total_steps}; resume with the same command"
        else:
            ending = f"Not saved, since this run saves no checkpoints: stopped after step {self.step}"
        logger.info(ending)
        stopping.note("ending", ending)

    def _finish(self) -> None:
        self.checkpointer.wait_for_saves()
        if self.teacher is not None:
            self.teacher.close()
        report_bad_documents(self._sources(), self.device)
        if dist.get_rank() == 0:
            folder = self.job_config.job.dump_folder
            for line in closing_table(write_summary(folder, self.manifest)):
                logger.info(line)
            logger.info(f"Training completed; everything is in {os.path.abspath(folder)}")
        dist.barrier()

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        """Micro-batches on CPU, in order, each with its teacher ticket under "ticket".

        ``teacher.prefetch`` micro-batches beyond the one that is handed out are already submitted, so the teacher works
        on them while the student trains. Raises ``DataloaderExhaustedError`` at the end.
        """
        batches = iter(data_iterable)
        ahead: deque[Batch] = deque()
        look_ahead = self.job_config.teacher.prefetch if self.teacher is not None else 0
        exhausted = False
        while True:
            while not exhausted and len(ahead) <= look_ahead:
                batch = next(batches, None)
                if batch is None:
                    exhausted = True
                    break
                input_dict, labels = batch
                ticket = None
                if self.teacher is not None:
                    ticket = self.teacher.submit(input_dict["input"], labels, input_dict.get("document_lengths"))
                ahead.append(({**input_dict, "ticket": ticket}, labels))
            if not ahead:
                raise DataloaderExhaustedError()
            yield ahead.popleft()

    def forward_backward_step(
        self, *, input_dict: dict[str, Any], labels: torch.Tensor, global_valid_tokens: torch.Tensor
    ) -> LossSums:
        """One micro-batch: gradients of its share of the global batch's loss are accumulated.

        Args:
            input_dict: "input" [B, S] int64, "document_lengths" if that is a packed row, and the teacher's "ticket" (None
                without a teacher).
            labels: [B, S] int64, ``IGNORE_INDEX`` where nothing is to be predicted.
            global_valid_tokens: Valid tokens of the whole global batch, 0-dim.

        Returns:
            ``loss`` already divided by the global valid tokens; ce, kl and kd as sums over this micro-batch.
        """
        (model,) = self.model_parts
        targets = LossTargets(
            labels=labels.to(self.device),
            objective=self.objective,
            scale=1.0 / global_valid_tokens.clamp(min=1).float(),
            teacher_hidden=self.teacher.result(input_dict["ticket"]) if self.teacher is not None else None,
            teacher_head=self.teacher.head_weight if self.teacher is not None else None,
        )
        with self.train_context():
            sums = model(input_dict["input"].to(self.device), targets, input_dict.get("document_lengths"))
            sums.loss.backward()
        return LossSums(*(value.detach() for value in sums))

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One optimizer step on one global batch, and its report."""
        started = time.perf_counter()
        self.optimizers.zero_grad()
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        micro_batches = [next(data_iterator)]
        while not micro_batches[-1][0]["last_of_step"]:
            micro_batches.append(next(data_iterator))
        valid = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in micro_batches)
        processed = sum(labels.numel() for _, labels in micro_batches)
        counts = torch.tensor([valid, processed], dtype=torch.int64, device=self.device)
        dist.all_reduce(counts)

        sums = torch.zeros(4, dtype=torch.float64, device=self.device)  # loss, ce, kl, kd
        for input_dict, labels in micro_batches:
            losses = self.forward_backward_step(input_dict=input_dict, labels=labels, global_valid_tokens=counts[0])
            sums += torch.stack([value.double() for value in losses])
        del micro_batches

        if self.validator is not None and self.job_config.diagnostics.enable:
            if self.validator.should_validate(self.step):
                self.validator.gradient_norms = gradient_norms(self.model_parts[0])
        grad_norm = dist_utils.clip_grad_norm_(
            [p for m in self.model_parts for p in m.parameters()], self.job_config.training.max_norm, foreach=True
        )
        reduced, norm = self._reduce(sums), float(grad_norm.item())
        if self.skipped.may_update(self.step, reduced.loss, norm, self._documents_of_step()):
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self._report(started, lr, norm, counts, reduced)
        self.lr_schedulers.step()

    def _reduce(self, sums: torch.Tensor) -> StepSums:
        """Sum a step's losses and the teacher's wait over the student's ranks, and learn whether any is asked to stop."""
        wait = self.teacher.pop_wait_seconds() if self.teacher is not None else 0.0
        totals = torch.cat([sums, sums.new_tensor([wait, float(self.world.stop_requested())])])
        dist.all_reduce(totals)
        loss, ce, kl, kd, wait, stop = totals.tolist()
        self.stopping = stop > 0
        return StepSums(loss, ce, kl, kd, wait / self.world.role_size)

    def _documents_of_step(self) -> tuple[int, int]:
        """[first, end) of the step's documents in the endlessly repeated shard."""
        first = self.schedule.data_offset(self.step) * self.job_config.training.global_batch_size
        return first, first + self.job_config.training.global_batch_size

    def _report(self, started: float, lr: float, grad_norm: float, counts: torch.Tensor, sums: StepSums) -> None:
        """Hand the step's figures to the metrics."""
        valid_tokens, processed_tokens = (int(count) for count in counts.tolist())
        per_token = max(valid_tokens, 1)
        self.ntokens_seen += valid_tokens
        self.active_layer_tokens += valid_tokens * self.model_args.n_layers
        distilled = self.teacher is not None
        report = StepReport(
            loss=sums.loss,
            ce=sums.ce / per_token,
            kl=sums.kl / per_token if distilled else None,
            kd=sums.kd / per_token if distilled else None,
            lr=lr,
            grad_norm=grad_norm,
            valid_tokens=valid_tokens,
            processed_tokens=processed_tokens,
            documents=self._documents_of_step(),
            teacher_wait_s=sums.teacher_wait_s if distilled else None,
            step_s=time.perf_counter() - started,
        )
        self.metrics_processor.log_step(self.step, report, self.world.role_size)

    def state_dict(self) -> dict[str, Any]:
        """Global counts, the same on every rank (a rank's own count would jump on another world size)."""
        return {
            "step": self.step,
            "ntokens_seen": self.ntokens_seen,
            "active_layer_tokens": self.active_layer_tokens,
            "skipped_in_a_row": self.skipped.in_a_row,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"]
        self.active_layer_tokens = state_dict["active_layer_tokens"]
        self.skipped.in_a_row = state_dict["skipped_in_a_row"]
