"""The overlap benchmark measures what it says: the same micro-batches in every turn, valid positions on the wire."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.jobs import arguments
from tests.unit_tests.rank_pool import RankPool
from tools.benchmarks import jobs, overlap


def run_bridge(rank: int, world_size: int, store: dist.Store, sizes: list[int], repeats: int) -> dict[str, Any]:
    with mock.patch.object(overlap, "rendezvous", lambda: (store, rank, world_size)):
        return overlap.bridge(rank, world_size, sizes, repeats)


def test_bridge_sends_headers_and_hidden_states_only(rank_pool: RankPool) -> None:
    sizes, repeats = [4096, 3 * 4096], 2
    asked, served = rank_pool.run(run_bridge, 2, sizes=sizes, repeats=repeats)
    assert served["sent"] == (1 + repeats) * sum(80 + size for size in sizes)  # a header is ten int64
    assert served["copied"] == 0  # sent from where the teacher left them
    for kind in ("pair", "raw"):
        assert [len(times) for times in asked[kind]] == [repeats, repeats]
        assert all(seconds > 0 for times in asked[kind] for seconds in times)


def run_turns(rank: int, world_size: int, store: dist.Store, args: list[str]) -> Any:
    """Turns of a toy job; with them, by step, what the teacher answered and how many labels there are."""
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(world_size)
    seen: dict[str, Any] = {}

    class Watched(overlap.Turns):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            seen["answers"] = [len(answer) for answer in self.answers]
            seen["labels"] = [int((labels >= 0).sum()) for _, labels in self.batches]
            seen["last_of_step"] = [inputs["last_of_step"] for inputs, _ in self.batches].count(True)
            seen["repeated"] = all(map(torch.equal, self.answers, self._ask(self.batches)))

    with (
        mock.patch.object(jobs, "rendezvous", lambda: (store, rank, world_size)),
        mock.patch.object(overlap, "Turns", Watched),
    ):
        times = overlap.turns(rank, world_size, args, steps=2, repeats=3)
    return times, seen


@pytest.mark.parametrize("teacher_ranks", [0, 1])
def test_turns(rank_pool: RankPool, workspace: Path, tmp_path: Path, teacher_ranks: int) -> None:
    args = arguments(
        workspace, tmp_path, validation__enable=False, checkpoint__enable=False, training__local_batch_size=2,
        teacher__ranks=teacher_ranks, growth__phase_steps=[20], growth__active_blocks=[1], training__steps=20,
    )  # fmt: skip
    times, seen = rank_pool.run(run_turns, 1 + teacher_ranks, args=args)[0]
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys(times, 3)
    assert set(times) == {"student", "teacher", "both", "wait"}
    assert all(0 <= share < 1 for share in times["wait"])
    assert seen["answers"] == seen["labels"] and sum(seen["answers"]) > 0
    assert seen["last_of_step"] == 4  # two that count, one before and one after
    assert seen["repeated"]


def test_replayed_answers_come_in_the_order_of_the_questions() -> None:
    client = mock.Mock(head_weight="head")
    answers = [torch.full((2, 3), float(i)) for i in range(3)]
    replayed = overlap.Replayed(client, answers)
    tickets = [replayed.submit("ids", "labels") for _ in answers]
    assert all(replayed.result(ticket) is answer for ticket, answer in zip(tickets, answers, strict=True))
    assert replayed.head_weight == "head" and replayed.pop_wait_seconds() == 0
    client.submit.assert_not_called()
    client.result.assert_not_called()
