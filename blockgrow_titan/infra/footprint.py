"""What a rank of a job holds in memory and computes, found by running one micro-batch on tensors without data.

The student of a phase is built, wrapped and sharded as in a run, over a fake process group, and one micro-batch goes
through it under ``FakeTensorMode``: every operation runs, none has data. ``TensorBytes`` counts the storages that are
alive in between. So activation checkpointing, FSDP2's gathered layers, the chunked loss and the optimizer's temporary
tensors are counted as they are, not by a formula; what is missing is what no tensor holds: the allocator's
fragmentation, workspaces of matrix products, the collectives' own buffers and the CUDA context.

A micro-batch here is as large as a micro-batch can be: ``local_batch_size`` documents of ``seq_len`` tokens, all valid,
in one packed row under ``documents.micro_batching = "packed"``.
FLOPs are counted the same way on the meta device, without recomputation (the convention of model FLOPs utilisation).
"""

import contextlib
import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils

from blockgrow_titan.distill import objective as objective_module
from blockgrow_titan.distill.head import LossTargets
from blockgrow_titan.job_config import JobConfig
from blockgrow_titan.model.args import BlockStackArgs
from blockgrow_titan.model.attention import packed_row
from blockgrow_titan.teacher.messages import teacher_dtype
from blockgrow_titan.teacher.model import meta_teacher
from blockgrow_titan.teacher.worlds import shard_mesh

aten = torch.ops.aten


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """A default process group of ``size`` ranks that sends nothing; this process is ``rank``."""
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class ValidTokens(TorchDispatchMode):
    """Which labels are valid is data, and there is none: ``nonzero`` finds the first ``count`` elements, or all."""

    def __init__(self, count: int | None = None) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.nonzero.default:
            count = args[0].numel() if self.count is None else self.count
            return torch.arange(count, device=args[0].device).unsqueeze(1)  # [N, 1]
        return func(*args, **(kwargs or {}))


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations return while the mode is on, and those given to ``add``.

    Attributes:
        live: Bytes of the storages that are alive now.
        peak: The most that ``live`` has been since the start or the last ``reset_peak``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._bytes: dict[int, int] = {}  # address of a storage -> its bytes

    def add(self, *tensors: Tensor) -> None:
        """Count the storages of tensors that were there before."""
        for tensor in tensors:
            self._see(tensor)

    def reset_peak(self) -> None:
        self.peak = self.live

    def _see(self, tensor: Tensor) -> None:
        while (inner := getattr(tensor, "_local_tensor", getattr(tensor, "elem", None))) is not None:
            tensor = inner  # DTensor, AsyncCollectiveTensor
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._bytes:
            weakref.finalize(storage, self._set, key, None)
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int | None) -> None:
        self.live += (size or 0) - self._bytes.pop(key, 0)
        if size is not None:
            self._bytes[key] = size
        self.peak = max(self.peak, self.live)

    def __enter__(self) -> "TensorBytes":
        # FSDP2 frees and takes back gathered parameters by resizing their storage, which is no operation
        self._resize = torch.UntypedStorage.resize_
        tracker, resize = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            if storage._cdata in tracker._bytes:
                tracker._set(storage._cdata, size)
            return storage

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self._see(value)
        return out


def shard_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that this rank holds."""
    return sum(_local(p).numel() * p.element_size() for p in model.parameters())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class StudentFootprint:
    """Bytes on one student rank in one phase."""

    weights: int
    """This rank's shard of the parameters, and the rotary table."""
    gradients: int
    optimizer: int
    teacher_head: int
    """The frozen copy of the teacher's head."""
    answer: int
    """The teacher's hidden states of the micro-batch that is trained on."""
    activations: int
    """What the layers keep for their backward, with gathered parameters."""
    loss: int
    """What the head's loss takes on top: two chunks of logits, and the gradients that it forms."""
    peak: int
    """The most that is alive at once, over forward, backward, optimizer and a micro-batch of the validation."""
    prefetch: int
    """Answers that wait in host memory, at most."""


def _student(job_config: JobConfig, args: BlockStackArgs) -> nn.Module:
    """A phase's student on the meta device, not yet parallelised."""
    spec = get_train_spec(job_config.model.name)
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        return spec.model_cls(args)


def student_on_meta(
    job_config: JobConfig, args: BlockStackArgs, parallel_dims: ParallelDims
) -> tuple[nn.Module, int, int]:
    """A phase's student on the meta device, parallelised as in a run, with its parameters: all and trainable ones."""
    model = _student(job_config, args)
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return get_train_spec(job_config.model.name).parallelize_fn(model, parallel_dims, job_config), total, trainable


@contextlib.contextmanager
def _row_blocks_of(device_type: str) -> Iterator[None]:
    """Let the loss, which runs on the CPU here, cut its chunks as it would on another device."""
    saved = objective_module.CPU_ROW_BLOCK_ELEMENTS
    if device_type != "cpu":
        blocks = objective_module.DEVICE_ROW_BLOCK_ELEMENTS // torch.get_num_threads()
        objective_module.CPU_ROW_BLOCK_ELEMENTS = max(1, blocks)
    try:
        yield
    finally:
        objective_module.CPU_ROW_BLOCK_ELEMENTS = saved


def _allocate(
    config: JobConfig, args: BlockStackArgs, model: nn.Module, parallel_dims: ParallelDims, memory: TensorBytes
) -> tuple[list[int], Any, Tensor | None]:
    """What is there between steps: the bytes after weights, gradients, optimizer and teacher's head; the last two."""
    model.to_empty(device="cpu")
    model.init_buffers()  # type: ignore[operator]
    model.train()
    memory.add(*model.parameters(), *model.buffers())
    marks = [memory.live]
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param)
    marks.append(memory.live)
    optimizers = get_train_spec(config.model.name).build_optimizers_fn([model], config.optimizer, parallel_dims)
    optimizers.step()
    marks.append(memory.live)
    head = torch.empty(args.vocab_size, args.dim, dtype=teacher_dtype(config)) if config.teacher.path else None
    marks.append(memory.live)
    return marks, optimizers, head


def _watch_head(model: nn.Module, memory: TensorBytes) -> list[int]:
    """A list that every forward extends: bytes alive before the head, the peak until then, the peak in the head."""
    at_head: list[int] = []

    def before(*_: Any) -> None:
        at_head.extend((memory.live, memory.peak))
        memory.reset_peak()

    head = model.get_submodule("output")
    head.register_forward_pre_hook(before)
    head.register_forward_hook(lambda *_: at_head.append(memory.peak))
    return at_head


def _forward(config: JobConfig, model: nn.Module, head: Tensor | None, rows: int, length: int) -> tuple[Tensor, int]:
    """The loss of a micro-batch of valid tokens, and the bytes of the teacher's answer to it."""
    packed = config.documents.micro_batching == "packed"
    shape = (1, rows * length) if packed else (rows, length)
    inputs, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    answer = None if head is None else torch.empty(rows * length, head.shape[1], dtype=head.dtype)
    objective = get_train_spec(config.model.name).build_loss_fn(config)
    with ValidTokens():
        sums = model(inputs, LossTargets(labels, objective, 1.0, answer, head), (length,) * rows if packed else None)
    return sums.loss, 0 if answer is None else answer.untyped_storage().nbytes()


def student_footprint(
    job_config: JobConfig,
    args: BlockStackArgs,
    parallel_dims: ParallelDims,
    *,
    documents: int | None = None,
    device_type: str = "cuda",
) -> StudentFootprint:
    """Run one micro-batch and one optimizer step of a phase on fake tensors. Needs a ``fake_world`` of the student.

    Args:
        job_config: The job's config. ``torch.compile`` is left out: it can only lower the activations.
        args: The phase's model arguments.
        parallel_dims: The student's mesh.
        documents: Documents of the micro-batch, ``training.local_batch_size`` by default.
        device_type: The device whose block sizes the loss uses.

    Raises:
        NotImplementedError: If parameters are offloaded to the CPU.
    """
    config = copy.deepcopy(job_config)
    config.compile.enable = False
    if config.training.enable_cpu_offload:
        raise NotImplementedError("training.enable_cpu_offload is true, which a plan does not cover: set it to false")
    model, _, _ = student_on_meta(config, args, parallel_dims)
    with _row_blocks_of(device_type), FakeTensorMode(allow_non_fake_inputs=True), TensorBytes() as memory:
        marks, optimizers, head = _allocate(config, args, model, parallel_dims, memory)
        at_head = _watch_head(model, memory)
        memory.reset_peak()
        rows = documents or config.training.local_batch_size
        loss, answer_bytes = _forward(config, model, head, rows, config.training.seq_len)
        loss.backward()
        del loss
        dist_utils.clip_grad_norm_(list(model.parameters()), config.training.max_norm, foreach=True)
        optimizers.step()
        if config.validation.enable:
            with torch.no_grad():
                _forward(config, model, head, config.validation.local_batch_size, config.validation.seq_len)
        peak = max(memory.peak, *at_head)
    weights, gradients, optimizer, teacher_head = (b - a for a, b in zip([0, *marks], marks, strict=False))
    return StudentFootprint(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        teacher_head=teacher_head,
        answer=answer_bytes,
        activations=at_head[0] - marks[-1] - answer_bytes,
        loss=at_head[2] - at_head[0],
        peak=peak,
        prefetch=config.teacher.prefetch * answer_bytes if config.teacher.ranks else 0,
    )


@dataclass(frozen=True)
class TeacherFootprint:
    """Bytes on one rank that holds the teacher."""

    documents: int
    """Of the largest request of ``training`` or ``validation``, each of ``training.seq_len`` tokens."""
    weights: int
    peak: int


def teacher_footprint(
    job_config: JobConfig, args: Qwen3ModelArgs, role_size: int, *, documents: int | None = None
) -> TeacherFootprint:
    """Run the largest request, or one of ``documents``, on fake tensors.

    Needs a ``fake_world`` of ``role_size`` ranks that hold the teacher.
    """
    training, validation = job_config.training, job_config.validation
    validated = validation.local_batch_size * validation.seq_len if validation.enable else 0
    rows = documents or max(training.local_batch_size, -(-validated // training.seq_len))
    mesh = shard_mesh(role_size, job_config.teacher.shard_degree)
    packed = job_config.documents.micro_batching == "packed"
    model = meta_teacher(replace(args, max_seq_len=training.seq_len), teacher_dtype(job_config), mesh, packed)
    with FakeTensorMode(allow_non_fake_inputs=True), TensorBytes() as memory:
        model.to_empty(device="cpu")
        memory.add(*model.parameters(), *model.buffers())
        weights = memory.live
        memory.reset_peak()
        with torch.no_grad():
            if packed:
                row = torch.zeros(1, rows * training.seq_len, dtype=torch.int64)
                spans, positions = packed_row(row, (training.seq_len,) * rows, training.seq_len)
                model(row, spans, positions[None])
            else:
                model(torch.zeros(rows, training.seq_len, dtype=torch.int64))
        return TeacherFootprint(rows, weights, memory.peak)


def student_flops(
    job_config: JobConfig,
    args: BlockStackArgs,
    documents: int,
    length: int,
    *,
    valid_tokens: int | None = None,
    train: bool = True,
) -> int:
    """FLOPs of a phase's student for one micro-batch: forward, loss and, with ``train``, backward.

    Attention counts whole (not the causal half), the loss with both heads' products, recomputation not at all.

    Args:
        job_config: The job's config.
        args: The phase's model arguments.
        documents, length: Shape of the padded micro-batch; a packed row of as many documents of that length costs the same.
        valid_tokens: How many of its tokens the loss sees; None: all.
        train: False for a validation.
    """
    model = _student(job_config, args)
    ids = torch.zeros(documents, length, dtype=torch.int64, device="meta")
    valid = documents * length if valid_tokens is None else valid_tokens
    answer = head = None
    if job_config.teacher.path:
        dtype = TORCH_DTYPE_MAP[job_config.training.dtype]
        answer = torch.empty(valid, args.dim, dtype=dtype, device="meta")
        head = torch.empty(args.vocab_size, args.dim, dtype=dtype, device="meta")
    objective = get_train_spec(job_config.model.name).build_loss_fn(job_config)
    with _counter() as counter, ValidTokens(valid), torch.set_grad_enabled(train):
        sums = model(ids, LossTargets(ids, objective, 1.0, answer, head))
        if train:
            sums.loss.backward()
    return counter.get_total_flops()


def teacher_flops(args: Qwen3ModelArgs, documents: int, length: int) -> int:
    """FLOPs of the teacher's forward, without its head, for documents of one length."""
    model = meta_teacher(replace(args, max_seq_len=length), torch.float32)
    with _counter() as counter, torch.no_grad():
        model(torch.zeros(documents, length, dtype=torch.int64, device="meta"))
    return counter.get_total_flops()


def _in_place_product_flops(total: Any, a: Any, b: Any, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[1]  # of shapes


def _counter() -> FlopCounterMode:
    """torch's counter does not know the product that is added in place."""
    return FlopCounterMode(display=False, custom_mapping={aten.addmm_: _in_place_product_flops})
