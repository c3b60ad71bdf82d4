"""What a rank uses while it runs: memory, file handles and threads, and a hash of what all students must agree on.

``watch`` is a preparation of a rank (``ranks.run``): it writes a line of JSON every so many training steps, or answers of a
teacher, to a file of the rank's own.
"""

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any, TextIO

import psutil

from blockgrow_titan.teacher.model import TeacherModel
from blockgrow_titan.trainer import GrowthTrainer
from tests.unit_tests.jobs import full_parameters


def sample() -> dict[str, int]:
    """Resident bytes, open file handles and threads of this process."""
    process = psutil.Process()
    return {"memory": process.memory_info().rss, "handles": process.num_fds(), "threads": process.num_threads()}


def agreement(trainer: GrowthTrainer) -> str:
    """A hash of the gathered parameters, and of everything that each student rank holds for itself and must hold alike."""
    digest = hashlib.sha256()
    (model,) = trainer.model_parts
    for fqn, value in sorted(full_parameters(model).items()):
        digest.update(fqn.encode() + value.tobytes())
    for name, buffer in model.named_buffers():
        digest.update(name.encode() + buffer.numpy().tobytes())
    (optimizer,) = trainer.optimizers
    steps = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    rates = [group["lr"] for group in optimizer.param_groups]
    digest.update(repr((steps, rates, trainer.state_dict(), trainer.lr_schedulers.state_dict())).encode())
    return digest.hexdigest()


def watch(folder: str, every: int, hash_every: int) -> None:
    """Watch this rank.

    Args:
        folder: For the files, ``rank-N.jsonl``.
        every: Steps (of a student) or answers (of a teacher) between two samples.
        hash_every: Steps between two hashes, a multiple of ``every``.
    """
    file = open(Path(folder) / f"rank-{os.environ['RANK']}.jsonl", "w", buffering=1)
    _watch_steps(file, every, hash_every)
    _watch_answers(file, every)


def _watch_steps(file: TextIO, every: int, hash_every: int) -> None:
    train_step = GrowthTrainer.train_step

    @functools.wraps(train_step)
    def watched(self: GrowthTrainer, *args: Any) -> None:
        train_step(self, *args)
        if self.step % every == 0:
            line = {"at": self.step, "phase": self.phase.index} | sample()
            if self.step % hash_every == 0:
                line |= {"hash": agreement(self)}
            file.write(json.dumps(line) + "\n")

    GrowthTrainer.train_step = watched  # type: ignore[method-assign, assignment]


def _watch_answers(file: TextIO, every: int) -> None:
    hidden_states, answers = TeacherModel.hidden_states, 0

    @functools.wraps(hidden_states)
    def watched(self: TeacherModel, *args: Any) -> Any:
        nonlocal answers
        answers += 1
        if answers % every == 0:
            file.write(json.dumps({"at": answers} | sample()) + "\n")
        return hidden_states(self, *args)

    TeacherModel.hidden_states = watched  # type: ignore[method-assign, assignment]
