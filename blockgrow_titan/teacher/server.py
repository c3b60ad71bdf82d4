"""The teacher world's main: hidden states for whoever asks, until every student has said STOP.

A rank reads its copy (or its shard) of the teacher, connects with its students, and then answers requests in the order
of their arrival. Ranks that share one copy by FSDP run in lock-step: a round begins with a small sum over the group, of
who has a request; if anyone has, all run a forward, those without work an empty one.

If a rank ends by an error, it tells its students why before it ends, since the launcher's console shows the student's
output only.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools.logging import logger

from blockgrow_titan.paths import resolve
from blockgrow_titan.teacher.bridge import FOREVER, Inbox, Message, Pair, connect, tell_failure
from blockgrow_titan.teacher.files import TeacherFiles, open_teacher
from blockgrow_titan.teacher.heartbeats import RankLost, one_line
from blockgrow_titan.teacher.messages import Kind, Limits, teacher_dtype
from blockgrow_titan.teacher.model import TeacherModel, build_teacher
from blockgrow_titan.teacher.worlds import STUDENT, World, shard_mesh, shard_ranks

IDLE_ROUND_SECONDS = 0.003
IDLE_SECONDS = 1.0


@dataclass
class Served:
    """What a teacher rank has done."""

    requests: int = 0
    tokens: int = 0
    busy_seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        share = self.busy_seconds / max(time.monotonic() - self.began, 1e-9)
        return f"{self.requests} requests, {self.tokens} tokens, busy {share:.0%} of the time"


def serve(job_config: Any, world: World, device: torch.device) -> Served:
    """Answer the requests of this teacher rank's students until each has sent STOP.

    Args:
        job_config: The job's config.
        world: This rank's world, of role teacher.
        device: Where the teacher runs.

    Returns:
        What was done.

    Raises:
        BridgeError: If a student is lost, fails, or sends a malformed message. This and every other error is first told
            to all students of this rank.
    """
    pairs: list[Pair] = []
    try:
        files = open_teacher(resolve(job_config.teacher.path, "teacher.path"))
        teacher = load_teacher(files, job_config, world, device)
        students = [world.layout.global_rank(STUDENT, s) for s in world.layout.students_of(world.role_rank)]
        limits = Limits.of_job(job_config, files.args)
        seconds = job_config.teacher.timeout_seconds
        control = _control_group(world, job_config.teacher.shard_degree)
        connected, inbox = connect(world, students, limits, device, max(seconds, job_config.comm.init_timeout_seconds))
        pairs.extend(connected)
        logger.info(
            f"Teacher rank {world.role_rank} of {world.role_size} is ready: {teacher.num_parameters:,} parameters "
            f"without the head, {job_config.teacher.dtype}, shard degree {job_config.teacher.shard_degree}; serves "
            + ", ".join(str(pair.peer) for pair in pairs)
        )
        served = _Rounds(teacher, pairs, inbox, control).run()
    except Exception as error:
        text = world.explain(error)
        world.report_failure(text)  # for students that are not connected yet
        tell_failure(pairs, text)
        if text != one_line(error):
            raise RankLost(text) from error
        raise
    for pair in pairs:
        pair.join(seconds)
        pair.close()
    logger.info(f"Teacher rank {world.role_rank} is done: {served}")
    return served


def load_teacher(files: TeacherFiles, job_config: Any, world: World, device: torch.device) -> TeacherModel:
    """The teacher on this rank, one copy to ``teacher.shard_degree`` ranks; above 1, all ranks of the role must call."""
    return build_teacher(
        files,
        dtype=teacher_dtype(job_config),
        device=device,
        max_seq_len=job_config.training.seq_len,
        mesh=shard_mesh(world.role_size, job_config.teacher.shard_degree),
        packed=job_config.documents.micro_batching == "packed",
    )


def _control_group(world: World, shard_degree: int) -> dist.ProcessGroup | None:
    """A CPU group of the ranks that share this rank's copy; None if nothing is shared.

    Its time limit is none in practice: a rank waits there while another one's student takes its time to connect.
    """
    if shard_degree == 1:
        return None
    groups = [
        (ranks, dist.new_group(ranks, backend="gloo", timeout=FOREVER))
        for ranks in shard_ranks(world.role_size, shard_degree)
    ]
    return next(group for ranks, group in groups if world.role_rank in ranks)


class _Rounds:
    """The loop of one teacher rank."""

    def __init__(
        self, teacher: TeacherModel, pairs: list[Pair], inbox: Inbox, control: dist.ProcessGroup | None
    ) -> None:
        self.teacher, self.inbox, self.control = teacher, inbox, control
        self.active = list(pairs)
        self.served = Served()

    def run(self) -> Served:
        """Answer until all students have stopped."""
        if self.control is None:
            while self.active:
                if (request := self._next(IDLE_SECONDS)) is not None:
                    self._answer(request)
            return self.served
        worked = True
        while True:
            # Idle rounds wait for work a little; while there is work, no round waits.
            request = self._next(0.0 if worked else IDLE_ROUND_SECONDS)
            state = torch.tensor([request is not None, not self.active], dtype=torch.int32)
            dist.all_reduce(state, group=self.control)
            working, done = state.tolist()
            worked = working > 0
            if worked:
                self._answer(request)
            elif done == dist.get_world_size(self.control):
                return self.served

    def _next(self, timeout: float) -> Message | None:
        """The next request, or None; takes note of students that have stopped."""
        message = self.inbox.get(timeout)
        if message is None:
            return None
        if message.kind == Kind.STOP:
            self.active.remove(message.pair)
            return None
        return None if message.pair.ended else message  # a student that stops no longer wants what it asked ahead

    def _answer(self, request: Message | None) -> None:
        """One forward; an empty one for the sake of the other ranks of the shard group if there is no request."""
        if request is None:
            empty = torch.empty(0, dtype=torch.int32)
            self.teacher.hidden_states(empty, empty)
            return
        began = time.monotonic()
        hidden = self.teacher.hidden_states(request.tensor, request.lengths)
        request.pair.send_answer(request.request_id, hidden)
        self.served.requests += 1
        self.served.tokens += len(hidden)
        self.served.busy_seconds += time.monotonic() - began
