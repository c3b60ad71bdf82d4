"""What crosses the bridge: kinds of messages, their bounds, and the header that is checked before any allocation.

    REQUEST  student -> teacher   [B] lengths, then the [N] token ids of the valid positions, int32
    ANSWER   teacher -> student   [N, D] hidden states, bfloat16 or float32
    ERROR    either way           why the sender ends, UTF-8 text
    STOP     either way           the sender has no more to say; the receiver replies with STOP

A message is a header of ten int64 and a payload of the shape that the header says.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

from blockgrow_titan.teacher.heartbeats import JobError
from blockgrow_titan.teacher.worlds import TEACHER

MAGIC = 0x626C6B67
VERSION = 1
MAX_TEXT_BYTES = 1 << 16

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_CODES = {torch.bfloat16: 1, torch.float32: 2, torch.int32: 3, torch.uint8: 4}
_DTYPE_OF = {code: dtype for dtype, code in _CODES.items()}


class BridgeError(JobError):
    """Something on the other side of a pair ended this job."""


class PeerLost(BridgeError):
    """The connection to a peer broke."""


class PeerFailed(BridgeError):
    """A peer said why it ends."""


class MalformedMessage(BridgeError):
    """A peer sent what no message can be."""


class AnswerOverdue(BridgeError):
    """The student has waited ``teacher.timeout_seconds`` for an answer."""


class Kind(IntEnum):
    """What a message is."""

    REQUEST = 1
    ANSWER = 2
    ERROR = 3
    STOP = 4


@dataclass(frozen=True)
class Limits:
    """What a valid message can be at most; both ends derive it from the job's config and the teacher's."""

    max_rows: int
    """Documents of a micro-batch."""
    max_length: int
    """Tokens of a document."""
    max_tokens: int
    """Tokens of a micro-batch, padding not counted."""
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    """Of the hidden states."""

    @classmethod
    def of_job(cls, job_config: Any, args: Qwen3ModelArgs) -> "Limits":
        """The limits of a job whose teacher has the dimensions ``args``.

        A micro-batch has ``local_batch_size * seq_len`` tokens at most. Only under ``documents.micro_batching = "count"``
        does it have ``local_batch_size`` documents at most; else as many as there are tokens, since each has one.
        """
        training, validation = job_config.training, job_config.validation
        sections = (training, validation) if validation.enable else (training,)
        tokens = max(section.local_batch_size * section.seq_len for section in sections)
        by_count = job_config.documents.micro_batching == "count"
        rows = max(section.local_batch_size for section in sections) if by_count else tokens
        return cls(rows, training.seq_len, tokens, args.vocab_size, args.dim, teacher_dtype(job_config))


@dataclass(frozen=True)
class Header:
    """The first part of a message, as ten int64: magic, version, kind, request id, dtype, ndim, shape, rows, bytes."""

    kind: Kind
    request_id: int = 0
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = (0,)
    rows: int = 0
    """B of a REQUEST, whose payload is [B + N]."""

    SIZE = 10

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def pack(self) -> Tensor:
        """[10] int64."""
        dims = (*self.shape, 0)[:2]
        fields = (self.kind, self.request_id, _CODES[self.dtype], len(self.shape), *dims, self.rows, self.num_bytes)
        return torch.tensor((MAGIC, VERSION, *fields), dtype=torch.int64)

    @classmethod
    def parse(cls, packed: Tensor, limits: Limits, receiver: str) -> "Header":
        """Check a received header against all bounds, before anything is allocated for its payload.

        Args:
            packed: [10] int64.
            limits: The bounds.
            receiver: Role of the receiver: a REQUEST is valid at the teacher only, an ANSWER at the student only.

        Raises:
            MalformedMessage: The text names the field and its bound.
        """
        magic, version, kind, request_id, code, ndim, dim0, dim1, rows, num_bytes = packed.tolist()
        _require(magic == MAGIC, f"magic number {magic:#x} is not {MAGIC:#x}")
        _require(version == VERSION, f"version {version} is not {VERSION}: both ends must run the same release")
        own = Kind.REQUEST if receiver == TEACHER else Kind.ANSWER
        _require(kind in (own, Kind.ERROR, Kind.STOP), f"kind {kind} cannot come to a {receiver} rank")
        _require(request_id >= 0, f"request id {request_id} is negative")
        _require(kind == Kind.REQUEST or rows == 0, f"{rows} documents do not fit kind {kind}")
        if kind == Kind.REQUEST:
            _require(1 <= rows <= limits.max_rows, f"{rows} documents are not 1 to {limits.max_rows}")
            dtype, low, high, width = torch.int32, rows + 1, rows + limits.max_tokens, None
        elif kind == Kind.ANSWER:
            dtype, low, high, width = limits.dtype, 1, limits.max_tokens, limits.hidden_size
        else:
            dtype, low, high, width = torch.uint8, 0, MAX_TEXT_BYTES if kind == Kind.ERROR else 0, None
        _require(_DTYPE_OF.get(code) == dtype, f"dtype {_DTYPE_OF.get(code, code)} must be {dtype}")
        _require(ndim == (1 if width is None else 2), f"{ndim} dimensions do not fit a {Kind(kind).name}")
        _require(low <= dim0 <= high, f"size {dim0} is not {low} to {high}")
        _require(dim1 == (width or 0), f"hidden size {dim1} must be {width or 0}")
        header = cls(Kind(kind), request_id, dtype, (dim0,) if width is None else (dim0, dim1), rows)
        _require(num_bytes == header.num_bytes, f"{num_bytes} bytes do not fit {dtype} of shape {list(header.shape)}")
        return header


def teacher_dtype(job_config: Any) -> torch.dtype:
    """``teacher.dtype``: of the teacher's weights and of the hidden states on the wire."""
    if job_config.teacher.dtype not in DTYPES:
        raise ValueError(f'teacher.dtype = "{job_config.teacher.dtype}" must be one of {", ".join(DTYPES)}')
    return DTYPES[job_config.teacher.dtype]


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise MalformedMessage(text)


def check_request(ids: Tensor, lengths: Tensor, limits: Limits) -> None:
    """Raise ``MalformedMessage`` unless [N] ids and [B] lengths are within the limits and fit each other."""
    low, high = int(lengths.min()), int(lengths.max())
    _require(0 <= low and high <= limits.max_length, f"lengths {low} to {high} are not 0 to {limits.max_length}")
    _require(int(lengths.sum()) == len(ids), f"lengths sum to {int(lengths.sum())}, but there are {len(ids)} ids")
    low, high = int(ids.min()), int(ids.max())
    _require(0 <= low and high < limits.vocab_size, f"ids {low} to {high} are not below {limits.vocab_size}")
