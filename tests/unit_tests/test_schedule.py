"""The growth schedule: steps to phases, blocks and documents, and every list it refuses."""

import pytest

from blockgrow_titan.growth.schedule import build_schedule

GROW = {"phase_steps": [2, 3, 4], "active_blocks": [1, 2, 3], "num_blocks": 3, "total_steps": 9}


def test_every_step_belongs_to_the_phase_that_a_plain_loop_gives() -> None:
    schedule = build_schedule(**GROW)
    step = 0
    for index, (steps, blocks) in enumerate(zip(GROW["phase_steps"], GROW["active_blocks"], strict=True)):
        for _ in range(steps):
            step += 1
            phase = schedule.phase_of_step(step)
            assert (phase.index, phase.active_blocks, phase.steps) == (index, blocks, steps)
            assert phase.first_step <= step <= phase.last_step
    assert schedule.total_steps == step == 9
    assert schedule.phase_of_step(0).index == 0
    with pytest.raises(ValueError, match="outside this run"):
        schedule.phase_of_step(10)


@pytest.mark.parametrize(
    ("policy", "offsets"),
    [("continue", [0, 1, 2, 3, 4, 5, 6, 7, 8]), ("rewind", [0, 1, 0, 1, 2, 0, 1, 2, 3])],
)
def test_data_offset(policy: str, offsets: list[int]) -> None:
    schedule = build_schedule(**GROW, data_at_growth=policy)
    assert [schedule.data_offset(step) for step in range(1, 10)] == offsets


def test_joint_restarts_and_single_block_are_other_lists() -> None:
    joint = build_schedule(phase_steps=[], active_blocks=[], num_blocks=3, total_steps=7)
    assert [(p.steps, p.active_blocks, p.frozen_blocks) for p in joint.phases] == [(7, 3, 0)]
    restarts = build_schedule(phase_steps=[3, 3, 3], active_blocks=[3, 3, 3], num_blocks=3, total_steps=9)
    assert [p.active_blocks for p in restarts.phases] == [3, 3, 3]
    single = build_schedule(phase_steps=[5], active_blocks=[1], num_blocks=3, total_steps=5)
    assert single.phases[0].active_blocks == 1


def test_freeze_freezes_what_was_active_before() -> None:
    schedule = build_schedule(**GROW, freeze="completed_blocks")
    assert [p.frozen_blocks for p in schedule.phases] == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase_steps": [2, 3]}, r"phase_steps has 2 entries .* growth.active_blocks has 3"),
        ({"active_blocks": [1, 2]}, r"phase_steps has 3 entries .* growth.active_blocks has 2"),
        ({"total_steps": 10}, r"sum to 9 but training.steps is 10: set training.steps = 9"),
        ({"phase_steps": [2, 0, 7]}, r"every phase must have at least 1 step"),
        ({"active_blocks": [2, 1, 3]}, r"may never fall"),
        ({"active_blocks": [0, 1, 3]}, r"from 1 to block_stack.num_blocks = 3"),
        ({"active_blocks": [1, 2, 4]}, r"from 1 to block_stack.num_blocks = 3"),
        ({"active_blocks": [1, 2, 2], "freeze": "completed_blocks"}, r"no trainable block in phase 2"),
    ],
)
def test_refusals(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_schedule(**(GROW | change))
