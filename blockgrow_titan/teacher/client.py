"""What the student's trainer and validator see of the teacher: submit a micro-batch, later take its hidden states.

    ticket = client.submit(input_ids, labels, lengths)   # when the data iterator looks ahead; lengths of a packed row
    hidden = client.result(ticket)                       # [n_valid, D] when the micro-batch is trained on

``SeparateTeacher`` sends the valid tokens to the teacher's ranks and collects the answers, so that the teacher works on
the next micro-batches while the student trains on this one. ``ColocatedTeacher`` runs the teacher on the student's rank
when the result is taken. Both give the same numbers.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX

from blockgrow_titan.paths import resolve
from blockgrow_titan.teacher.bridge import Pair, connect, tell_failure
from blockgrow_titan.teacher.files import TeacherFiles, open_teacher
from blockgrow_titan.teacher.messages import AnswerOverdue, BridgeError, Limits, teacher_dtype
from blockgrow_titan.teacher.model import TeacherModel
from blockgrow_titan.teacher.server import load_teacher
from blockgrow_titan.teacher.worlds import TEACHER, World

WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class Documents:
    """The valid part of a micro-batch, on CPU."""

    ids: Tensor
    """[N] token ids up to each document's last label, one document after the other."""
    lengths: Tensor
    """[B] their number by document; sums to N."""
    keep: Tensor | None
    """[N] bool, which of these positions have a label; None if all have."""

    @classmethod
    def of_batch(cls, input_ids: Tensor, labels: Tensor) -> "Documents":
        """Cut a right-padded micro-batch to its valid positions.

        Args:
            input_ids: [B, S] integers.
            labels: [B, S] integers, ``IGNORE_INDEX`` where nothing is to be predicted.

        Raises:
            ValueError: If the shapes differ.
        """
        if input_ids.shape != labels.shape or labels.ndim != 2:
            raise ValueError(
                f"input_ids {list(input_ids.shape)} and labels {list(labels.shape)} must have one shape [B, S]"
            )
        input_ids, valid = input_ids.cpu(), (labels != IGNORE_INDEX).cpu()
        positions = torch.arange(1, valid.shape[1] + 1)  # [S]
        lengths = (valid * positions).max(dim=1).values if valid.numel() else torch.zeros(len(valid), dtype=torch.int64)
        inside = positions[None, :] <= lengths[:, None]  # [B, S]
        keep = valid[inside]  # [N]
        return cls(input_ids[inside], lengths, None if bool(keep.all()) else keep)

    @classmethod
    def of_row(cls, input_ids: Tensor, labels: Tensor, document_lengths: Sequence[int]) -> "Documents":
        """Cut a packed row to its documents.

        Args:
            input_ids: [1, N] integers, documents end to end, then padding.
            labels: [1, N] integers, ``IGNORE_INDEX`` where nothing is to be predicted, so in all of the padding.
            document_lengths: Of the documents.

        Raises:
            ValueError: If the shapes differ or are not those of a row, or the lengths do not fit.
        """
        if input_ids.shape != labels.shape or labels.ndim != 2 or len(labels) != 1:
            raise ValueError(
                f"input_ids {list(input_ids.shape)} and labels {list(labels.shape)} must have one shape [1, N], since "
                "document_lengths are given"
            )
        lengths = torch.tensor(document_lengths, dtype=torch.int64)
        end, valid = int(lengths.sum()), (labels[0] != IGNORE_INDEX).cpu()
        if end > len(valid) or bool((lengths < 1).any()) or bool(valid[end:].any()):
            raise ValueError(
                f"document_lengths {list(document_lengths)} do not fit a row of {len(valid)} tokens: each must be at least "
                f"1, and the labels after their sum of {end} all {IGNORE_INDEX}"
            )
        keep = valid[:end]  # [N]
        return cls(input_ids[0, :end].cpu(), lengths, None if bool(keep.all()) else keep)


@dataclass
class Ticket:
    """A submitted micro-batch, good for one ``result``."""

    request_id: int
    documents: Documents
    pair: Pair | None = None
    """Who answers; None if nobody was asked."""


class TeacherClient(ABC):
    """The teacher, as one student rank sees it.

    Attributes:
        hidden_size: D.
        head_weight: [V, D] copy of the teacher's language-modelling head, in ``teacher.dtype`` on the student's device;
            a plain tensor without gradient, outside of any module, so that no checkpoint or optimizer ever holds it.
    """

    def __init__(self, files: TeacherFiles, dtype: torch.dtype, device: torch.device) -> None:
        self.device, self.dtype = device, dtype
        self.hidden_size = files.args.dim
        self.head_weight = files.head().to(device, dtype)
        self._wait_seconds = 0.0
        self._next_id = 0

    def submit(self, input_ids: Tensor, labels: Tensor, document_lengths: Sequence[int] | None = None) -> Ticket:
        """Announce a micro-batch; returns at once.

        Args:
            input_ids: [B, S] integers, right-padded; with ``document_lengths`` a packed row [1, N].
            labels: [B, S] or [1, N] integers, ``IGNORE_INDEX`` where nothing is to be predicted.
            document_lengths: Of the documents of a packed row.

        Raises:
            ValueError: If the shapes differ, the lengths do not fit, or the micro-batch is larger than the job's config
                allows.
        """
        if document_lengths is None:
            documents = Documents.of_batch(input_ids, labels)
        else:
            documents = Documents.of_row(input_ids, labels, document_lengths)
        ticket = Ticket(self._next_id, documents)
        self._next_id += 1
        self._submit(ticket)
        return ticket

    def result(self, ticket: Ticket) -> Tensor:
        """[n_valid, D] hidden states in ``teacher.dtype`` where the labels are not ignored, rows one after the other.

        Raises:
            BridgeError: If the teacher is lost, has failed, or its answer is overdue.
        """
        began = time.perf_counter()
        try:
            hidden = self._hidden_states(ticket)
        finally:
            self._wait_seconds += time.perf_counter() - began
        keep = ticket.documents.keep
        return hidden if keep is None else hidden[keep.to(hidden.device)]

    def pop_wait_seconds(self) -> float:
        """Seconds spent in ``result`` since the last call."""
        seconds, self._wait_seconds = self._wait_seconds, 0.0
        return seconds

    @abstractmethod
    def _submit(self, ticket: Ticket) -> None: ...

    @abstractmethod
    def _hidden_states(self, ticket: Ticket) -> Tensor:
        """[N, D] on the student's device, for all positions of ``ticket.documents``."""

    @abstractmethod
    def close(self, error: str | None = None) -> None:
        """Let the teacher go; with ``error``, the reason why this rank ends. Safe to call again."""


class ColocatedTeacher(TeacherClient):
    """The teacher on the student's own rank. It runs when a result is taken, so one micro-batch is held at a time.

    With ``teacher.shard_degree`` above 1, the ranks of a shard group must take their results together; that of an empty
    micro-batch counts.
    """

    def __init__(self, files: TeacherFiles, teacher: TeacherModel) -> None:
        super().__init__(files, teacher.dtype, teacher.device)
        self.teacher: TeacherModel | None = teacher

    def _submit(self, ticket: Ticket) -> None:
        pass

    def _hidden_states(self, ticket: Ticket) -> Tensor:
        if self.teacher is None:
            raise BridgeError("this rank's teacher is closed")
        return self.teacher.hidden_states(ticket.documents.ids, ticket.documents.lengths)

    def close(self, error: str | None = None) -> None:
        self.teacher = None


class SeparateTeacher(TeacherClient):
    """The teacher on ranks of its own; micro-batches are dealt in turn to those that serve this rank.

    Answers are matched by request id, so they may be taken in any order. All methods are called from one thread.
    """

    def __init__(self, job_config: Any, world: World, files: TeacherFiles, device: torch.device) -> None:
        super().__init__(files, teacher_dtype(job_config), device)
        self.timeout = job_config.teacher.timeout_seconds
        self.limits = Limits.of_job(job_config, files.args)
        teachers = [world.layout.global_rank(TEACHER, t) for t in world.layout.teachers_of(world.role_rank)]
        timeout = max(self.timeout, job_config.comm.init_timeout_seconds)
        self.pairs, self.inbox = connect(world, teachers, self.limits, device, timeout)
        self._asked = 0
        self._answers: dict[int, Tensor] = {}  # request id -> [N, D] on CPU
        self._pending: dict[int, int] = {}  # request id -> N
        self._closed = False

    def _submit(self, ticket: Ticket) -> None:
        documents = ticket.documents
        if not len(documents.ids):
            return
        rows, longest, limits = len(documents.lengths), int(documents.lengths.max()), self.limits
        if rows > limits.max_rows or longest > limits.max_length or len(documents.ids) > limits.max_tokens:
            raise ValueError(
                f"a micro-batch of {rows} documents of up to {longest} tokens, {len(documents.ids)} together, is larger than "
                f"the teacher expects: training.local_batch_size * training.seq_len, and those of validation, allow "
                f"{limits.max_rows} documents and {limits.max_tokens} tokens together, training.seq_len "
                f"{limits.max_length} tokens in one"
            )
        ticket.pair = self.pairs[self._asked % len(self.pairs)]
        self._asked += 1
        self._pending[ticket.request_id] = len(documents.ids)
        ticket.pair.send_request(ticket.request_id, documents.ids, documents.lengths)

    def _hidden_states(self, ticket: Ticket) -> Tensor:
        if ticket.pair is None:
            return torch.empty(0, self.hidden_size, dtype=self.dtype, device=self.device)
        began = time.monotonic()
        while ticket.request_id not in self._answers:
            self._collect(WATCH_SECONDS)
            if ticket.request_id not in self._answers:
                self._check_overdue(ticket, time.monotonic() - began)
        return self._answers.pop(ticket.request_id).to(self.device, non_blocking=True)

    def _collect(self, timeout: float) -> None:
        """Wait for one answer, of any request."""
        message = self.inbox.get(timeout)
        if message is None:
            return
        expected = self._pending.pop(message.request_id, None)
        if expected != len(message.tensor):
            raise BridgeError(
                f"{message.pair.peer} answered request {message.request_id} with {len(message.tensor)} hidden states, "
                + ("which nobody asked for" if expected is None else f"but {expected} were asked for")
            )
        self._answers[message.request_id] = message.tensor

    def _check_overdue(self, ticket: Ticket, waited: float) -> None:
        assert ticket.pair is not None
        if waited > self.timeout:
            raise AnswerOverdue(
                f"no answer of {ticket.pair.peer} to request {ticket.request_id} after waiting {waited:.0f} s "
                f"(teacher.timeout_seconds = {self.timeout}), though its process gives signs of life"
            )

    def close(self, error: str | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        if error is not None:
            tell_failure(self.pairs, error)
            return
        for pair in self.pairs:
            pair.stop(self.timeout)


def build_teacher_client(job_config: Any, world: World, device: torch.device) -> TeacherClient | None:
    """The client of a student rank, None if ``teacher.path`` is empty. Collective over all ranks of both worlds.

    Args:
        job_config: The job's config.
        world: This rank's world, of role student.
        device: Where the student is.

    Raises:
        ValueError: If the teacher's folder cannot be used; see ``files.py``.
        BridgeError: If a teacher rank fails or is lost before it is connected.
    """
    if not job_config.teacher.path:
        return None
    files = open_teacher(resolve(job_config.teacher.path, "teacher.path"))
    if world.layout.num_teachers:
        return SeparateTeacher(job_config, world, files, device)
    return ColocatedTeacher(files, load_teacher(files, job_config, world, device))
