"""The integration tests: short versions of the shipped configs, killed, resumed and varied.

Every launch costs about 20 seconds, most of it imports, so one launch serves several checks. At most 15 launches.
"""

import os
import socket
from functools import partial
from pathlib import Path

from tests.integration_tests import OverrideDefinitions
from tests.integration_tests.reading import (
    check_same,
    check_steps,
    check_summary,
    console,
    last_validations,
    read_events,
    train_values,
)

SLURM = Path(__file__).parent / "slurm"  # srun and scontrol for one machine

SHORT = (
    "--training.seq_len", "64", "--validation.seq_len", "64", "--training.global_batch_size", "6",
    "--training.local_batch_size", "3", "--lr_scheduler.warmup_steps", "2", "--checkpoint.interval", "3",
    "--validation.freq", "1000", "--metrics.log_freq", "1",
)  # fmt: skip
GROW = (*SHORT, "--training.steps", "9", "--growth.phase_steps", "4", "3", "2")
JOINT = (*SHORT, "--training.steps", "7", "--growth.phase_steps", "7")


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def check_depths(dump: Path, layers: list[int]) -> None:
    """The active layers of each step."""
    found = train_values(dump, "active_layers")
    assert found == layers, f"active layers {found}, expected {layers}"


def check_loss_falls(dump: Path) -> None:
    """The last validation ce of the run is below the first, and below a uniform guess (ln 4096 = 8.3)."""
    lines = read_events(dump, "validation")
    assert lines[-1]["ce"] < min(lines[0]["ce"], 8.3), f"ce went from {lines[0]['ce']} to {lines[-1]['ce']}"


def check_distilled(dump: Path) -> None:
    """A teacher was there: kl and the teacher's wait are in every train line, and kd is at least kl."""
    for line in read_events(dump, "train"):
        assert line["kl"] > 0 and line["kd"] > line["kl"] and line["teacher_wait_s"] >= 0, line
        expected = 0.7 * line["kl"] + 0.3 * line["ce"]
        assert abs(line["loss"] - expected) < 1e-5 * expected, f"loss {line['loss']}, 0.7 kl + 0.3 ce {expected}"


def check_not_distilled(dump: Path) -> None:
    for line in read_events(dump, "train"):
        assert "kl" not in line and abs(line["loss"] - line["ce"]) < 1e-5 * line["ce"], line


def check_last_validation_same(dump: Path, other: str) -> None:
    """Bit for bit the same endpoint in every phase."""
    ours, theirs = last_validations(dump), last_validations(dump / other)
    for phase, line in ours.items():
        for field in ("ce", "kl", "kd"):
            assert line[field] == theirs[phase][field], (
                f"phase {phase}: {field} {line[field]!r} {theirs[phase][field]!r}"
            )


def check_resumed_once(dump: Path, steps: set[int]) -> None:
    """One resumption, from the checkpoint of one of ``steps``: how far a launch gets before the kill is the machine's."""
    found = [line["step"] for line in read_events(dump, "resume")]
    assert len(found) == 1 and found[0] in steps, f"resumed at steps {found}, expected one of {steps}"


def check_frozen_parameters(dump: Path) -> None:
    """The trainable parameters of a freezing run: one layer, the head and the boundary norm in every phase."""
    counts = [line["trainable_parameters"] for line in read_events(dump, "growth")]
    assert len(counts) == 2 and len(set(counts)) == 1, f"trainable parameters after each growth: {counts}"


def check_console(dump: Path, launch: int, text: str) -> None:
    assert text in console(dump, launch), f"launch {launch} did not print: {text}"


def check_untouched_by_second_launch(dump: Path) -> None:
    assert not read_events(dump, "resume"), "a finished run was resumed"


def check_tensorboard(dump: Path, steps: int) -> None:
    """One folder, every step once, in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(dump / "tb"))
    events.Reload()
    found = [scalar.step for scalar in events.Scalars("train/loss")]
    assert found == list(range(1, steps + 1)), f"TensorBoard has steps {found}"


def build_features_test_list() -> list[OverrideDefinitions]:
    """All integration tests, in the order in which they run."""
    grown = [1] * 4 + [2] * 3 + [3] * 2
    return [
        OverrideDefinitions(
            override_args=(GROW, GROW, (*GROW, "--job.dump_folder", "{dump}/undisturbed")),
            test_descr="grow, post norm, one student and one teacher rank; killed after a growth and resumed",
            test_name="grow_post_resume",
            kill_at_step=5,
            checks=(
                partial(check_steps, steps=9),
                partial(check_depths, layers=grown),
                partial(check_summary, active_blocks=[1, 2, 3]),
                check_loss_falls,
                check_distilled,
                partial(check_resumed_once, steps={4, 6, 7}),
                partial(check_same, other="undisturbed", fields=("loss", "ce", "kl", "kd", "grad_norm", "documents")),
                partial(check_last_validation_same, other="undisturbed"),
                partial(check_tensorboard, steps=9),
                partial(check_console, launch=1, text="Training completed"),
            ),
        ),
        OverrideDefinitions(
            override_args=(GROW, GROW, (*GROW, "--optimizer.lr", "0.5")),
            test_descr="grow, pre norm, two students, one teacher; started again when finished, then with another config",
            test_name="grow_pre_finished",
            config="train_configs/grow_pre.toml",
            ngpu=3,
            expect_failure="optimizer.lr was 0.002 and is now 0.5",
            checks=(
                partial(check_steps, steps=9),
                partial(check_depths, layers=grown),
                partial(check_summary, active_blocks=[1, 2, 3]),
                check_loss_falls,
                check_distilled,
                check_untouched_by_second_launch,
                partial(check_console, launch=1, text="This run is complete"),
            ),
        ),
        OverrideDefinitions(
            override_args=(JOINT, JOINT),
            test_descr="joint, post norm; killed inside the phase on two ranks, resumed on three",
            test_name="joint_post_other_ranks",
            config="train_configs/joint_post.toml",
            ngpu=(2, 3),
            kill_at_step=4,
            checks=(
                partial(check_steps, steps=7),
                partial(check_depths, layers=[3] * 7),
                partial(check_summary, active_blocks=[3]),
                check_loss_falls,
                check_distilled,
                partial(check_resumed_once, steps={3, 6}),
            ),
        ),
        OverrideDefinitions(
            override_args=(
                (
                    *JOINT,
                    "--teacher.ranks",
                    "0",
                    "--activation_checkpoint.mode",
                    "selective",
                    "--activation_checkpoint.selective_ac_option",
                    "op",
                ),
            ),  # fmt: skip
            test_descr="joint, pre norm, one rank with the teacher on it, selective activation checkpointing by op",
            test_name="joint_pre_colocated",
            config="train_configs/joint_pre.toml",
            ngpu=1,
            checks=(
                partial(check_steps, steps=7),
                partial(check_summary, active_blocks=[3]),
                check_loss_falls,
                check_distilled,
            ),
        ),
        OverrideDefinitions(
            override_args=((*GROW, "--activation_checkpoint.mode", "full"),),
            test_descr="freeze, post norm, full activation checkpointing",
            test_name="freeze_post_full_ac",
            config="train_configs/freeze_post.toml",
            checks=(
                partial(check_steps, steps=9),
                partial(check_depths, layers=grown),
                check_loss_falls,
                check_distilled,
                check_frozen_parameters,
            ),
        ),
        OverrideDefinitions(
            override_args=((*GROW, "--compile.enable", "--compile.components", "model"),),
            test_descr="grow, post norm, torch.compile of each layer, across growth",
            test_name="grow_post_compile",
            checks=(
                partial(check_steps, steps=9),
                partial(check_depths, layers=grown),
                check_loss_falls,
                check_distilled,
            ),
        ),
        OverrideDefinitions(
            override_args=((*SHORT, "--training.steps", "4", "--growth.phase_steps", "4"),),
            test_descr="no teacher: plain pre-training on two ranks, embedding trained",
            test_name="no_teacher",
            config="train_configs/teacher.toml",
            checks=(partial(check_steps, steps=4), check_loss_falls, check_not_distilled),
        ),
        OverrideDefinitions(
            override_args=((*SHORT, "--training.steps", "4", "--growth.phase_steps", "2", "1", "1"),),
            test_descr="two nodes of one rank each, started as under Slurm: the student on one, the teacher on the other",
            test_name="two_nodes",
            launcher="multinode.slurm",
            ngpu=1,
            env={
                "PATH": f"{SLURM}{os.pathsep}{os.environ['PATH']}",
                "SLURM_JOB_NODELIST": "localhost,localhost",
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_JOB_ID": "7",
                "PORT": str(free_port()),
            },
            checks=(partial(check_steps, steps=4), partial(check_summary, active_blocks=[1, 2, 3]), check_distilled),
        ),
    ]
