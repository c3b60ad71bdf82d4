"""Diagnostics in whole jobs: any number of ranks, any wrapping, no trace in the training, and continuous over resumes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from blockgrow_titan.checks import check_config
from blockgrow_titan.diagnostics.batch import fixed_batch
from blockgrow_titan.diagnostics.checkpoints import diagnose
from blockgrow_titan.diagnostics.probes import probe
from blockgrow_titan.diagnostics.recorder import record_of
from blockgrow_titan.events import DIAGNOSTICS_FILE, METRICS_FILE, read_events
from blockgrow_titan.parse import parse_config
from tests.unit_tests.jobs import arguments, open_trainer, run_job, train_events, without_teacher
from tests.unit_tests.models import small_model
from tests.unit_tests.rank_pool import RankPool
from tests.unit_tests.resuming import Case, assert_as_undisturbed, resumptions, undisturbed_runs

ON = {"diagnostics__enable": True}
TOKENS = 40
MADE = {"diagnostics__tokens": TOKENS, "block_stack__layers_per_block": 2, "growth__active_blocks": [2, 3]}


def lines(folder: Path) -> list[dict[str, Any]]:
    return read_events(str(folder / DIAGNOSTICS_FILE))


def measure(rank: int, world_size: int, store: dist.Store, args: list[str]) -> dict[str, Any]:
    """A pool function: what the validator's diagnostics say of the first phase's student as it starts."""
    trainer = open_trainer(rank, world_size, store, args)
    (model,) = trainer.model_parts
    model.eval()
    before = trainer.validator.diagnostics.measure(model, None)  # no forward has come before
    trainer.metrics_processor.start(trainer.schedule, trainer.phase, 0)
    trainer.validator.validate(trainer.model_parts, 0)
    record = trainer.validator.diagnostics.measure(model, None)
    assert record == before
    trainer.close()
    return record


def close(a: Any, b: Any) -> bool:
    """Equal but for rounding, through all levels of a record; what rounding decides aside."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a if k not in ("kurtosis", "histogram"))
    if isinstance(a, list):
        return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
    return a == (pytest.approx(b, rel=1e-5, abs=2e-6) if isinstance(b, float) else b)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_any_number_of_ranks_and_any_wrapping(
    rank_pool: RankPool, workspace: Path, tmp_path: Path, placement: str
) -> None:
    """Sharded over 1 and 2 ranks, with activation checkpointing, replicated: as the plain model, on every rank."""
    overrides = without_teacher(**ON, **MADE, block_stack__placement=placement)
    records = []
    for ranks, changes in (
        (1, {}),
        (2, {"validation__local_batch_size": 1}),
        (2, {"activation_checkpoint__mode": "full", "parallelism__fsdp_reshard_after_forward": "always"}),
        (2, {"parallelism__data_parallel_replicate_degree": 2, "parallelism__fsdp_reshard_after_forward": "never"}),
    ):
        folder = tmp_path / str(len(records))
        args = arguments(workspace, folder, **overrides, **changes)
        of_ranks = rank_pool.run(measure, ranks, args=args)
        assert all(record == of_ranks[0] for record in of_ranks)
        (line,) = lines(folder)
        assert line == {"step": 0, "phase": 0} | of_ranks[0]
        records.append(of_ranks[0])
    model = small_model(
        placement, 4, vocab_size=320, seed=7, layers_per_block=2, active_blocks=2, train_embedding=True
    ).eval()
    source = source_of_workspace(workspace)
    batch = fixed_batch(source, TOKENS, rows=4)
    plain = record_of(probe(model, batch, chunk_tokens=16, device=torch.device("cpu")), batch, model)
    for record in records:
        assert close(record, plain | {"gradient_norms": None})
    assert records[0] == records[2] == records[3]  # the same micro-batches: bit for bit


def source_of_workspace(workspace: Path) -> Any:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    from blockgrow_titan.documents.source import build_source

    tokenizer, path = HuggingFaceTokenizer(str(workspace / "tokenizer")), str(workspace / "validation.jsonl")
    return build_source("jsonl", path, tokenizer, text_column="text", end_of_document="<|endoftext|>", seq_len=24)


@pytest.fixture(scope="module")
def case(workspace: Path, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """``case(name)`` with its undisturbed run, without diagnostics."""
    return undisturbed_runs(workspace, rank_pool, tmp_path_factory.mktemp("undisturbed"))


VALIDATED = [(0, 0), (2, 0), (3, 0), (3, 1), (4, 1), (6, 1), (7, 1)]  # step, phase


@pytest.mark.parametrize("name", ["colocated", "two students and a teacher"])
def test_training_does_not_notice_and_a_resumed_run_goes_on(
    case: Callable[[str], Case], tmp_path: Path, name: str
) -> None:
    """Losses, validations and checkpoints bit for bit those without diagnostics; the file that of one go, resumed too."""
    this, whole, resumed = case(name), tmp_path / "whole", tmp_path / "resumed"
    this.resume(whole, **ON)
    assert_as_undisturbed(whole, this.folder)
    for step, after in ((3, True), (4, False), (5, True)):  # resumed from 2, 3 (a phase's end) and 4
        this.interrupt(resumed, step, after, **ON)
    this.resume(resumed, **ON)
    assert resumptions(resumed) == [2, 3, 4]
    assert_as_undisturbed(resumed, this.folder)
    assert (resumed / DIAGNOSTICS_FILE).read_bytes() == (whole / DIAGNOSTICS_FILE).read_bytes()

    records = lines(whole)
    assert [(r["step"], r["phase"]) for r in records] == VALIDATED
    assert not (this.folder / DIAGNOSTICS_FILE).exists()
    norms = {e["step"]: e["grad_norm"] for e in train_events(read_events(str(whole / METRICS_FILE)))}
    for record in records:
        blocks = record["phase"] + 1
        assert record["placement"] == "post" and record["blocks"] == blocks == len(record["removal"])
        assert len(record["boundaries"]) == len(record["logit_lens"]) == blocks + 1
        assert record["tokens"] == 2 * 24
        gradients = record["gradient_norms"]
        if (record["step"], record["phase"]) in ((0, 0), (3, 1)):  # no step of this phase yet
            assert gradients is None
            continue
        parts = [*gradients.pop("blocks"), *gradients.values()]
        total = math.sqrt(sum(norm**2 for norm in parts if norm is not None))
        assert total == pytest.approx(norms[record["step"]], rel=1e-5)
        frozen = name != "colocated" and record["phase"] == 1
        assert (parts[0] is None) == frozen and gradients["embedding"] is None


def test_tensorboard_has_each_number_once(case: Callable[[str], Case], tmp_path: Path) -> None:
    """Also of the validation at the step that the run was resumed from, scalars and histograms."""
    from tensorboard.backend.event_processing.event_accumulator import HISTOGRAMS, EventAccumulator

    this = case("colocated")
    this.interrupt(tmp_path, 3, **ON)
    this.resume(tmp_path, **ON)
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    # TensorBoard reads files by name, which tells starts apart by the second; these may be closer together.
    for number, file in enumerate(sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)):
        file.rename(file.with_name(f"events.out.tfevents.{number}.done"))
    accumulator = EventAccumulator(str(folder), size_guidance={HISTOGRAMS: 0}).Reload()
    records = lines(tmp_path)
    expected = {}
    for record in records:
        expected[record["step"]] = record["boundaries"][1]["mean"]
    seen = [(e.step, e.value) for e in accumulator.Scalars("diagnostics/rms_mean/boundary_1")]
    assert dict(seen) == {step: pytest.approx(value, rel=1e-6) for step, value in expected.items()}
    assert [step for step, _ in seen] == [step for step, _ in VALIDATED]
    shown = accumulator.Histograms("diagnostics/rms/boundary_1")
    assert [h.step for h in shown] == [step for step, _ in VALIDATED]
    assert all(sum(h.histogram_value.bucket) == h.histogram_value.num == 48 for h in shown)


def test_switched_on_or_off_when_resumed(case: Callable[[str], Case], tmp_path: Path) -> None:
    """Off: the lines of steps that are trained again are dropped, the others stay. On again: it goes on from there."""
    this = case("colocated")
    whole = this.as_of(3, tmp_path / "run")
    this.interrupt(whole, 5, **ON)
    assert [(r["step"], r["phase"]) for r in lines(whole)] == [(3, 1), (4, 1)]
    this.interrupt(whole, 6)  # from 4
    this.resume(whole, **ON)
    assert [(r["step"], r["phase"]) for r in lines(whole)] == [(3, 1), (4, 1), (6, 1), (7, 1)]
    assert_as_undisturbed(whole, this.folder)


def test_a_checkpoint_has_the_numbers_that_its_run_wrote(case: Callable[[str], Case], tmp_path: Path) -> None:
    """The tool's records, of both depths, against ``diagnostics.jsonl``; ranks and sharding differ, fp32 does not."""
    this = case("two students")
    this.resume(tmp_path, **ON)
    written = {(r["step"], r["phase"]): r for r in lines(tmp_path)}
    folders = [tmp_path / "checkpoint" / f"step-{step}" for step in (3, 7)]
    for record, key in zip(diagnose(folders), [(3, 0), (7, 1)], strict=True):
        assert record.pop("checkpoint") == str(tmp_path / "checkpoint" / f"step-{key[0]}")
        assert close(record, written[key] | {"gradient_norms": None})


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ON | {"validation__enable": False},
            "diagnostics.enable is true but validation.enable false; .*set validation",
        ),
        ({"diagnostics__tokens": 0}, "diagnostics.tokens .*is 0; it must be at least 1"),
        ({"diagnostics__tokens": -2}, r"diagnostics.tokens is -2; it must be at least 1, or -1 for twice"),
    ],
)
def test_configs_that_are_refused(workspace: Path, overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_config(parse_config(arguments(workspace, workspace / "never_made", **overrides)))


def test_a_job_without_documents_to_look_at(rank_pool: RankPool, workspace: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n')
    args = arguments(workspace, tmp_path / "out", **ON, validation__dataset_path=empty)
    with pytest.raises(Exception, match="diagnostics.enable is true, but the validation documents are all empty"):
        rank_pool.run(run_job, 1, args=args)


def test_the_file_is_json_in_every_line(case: Callable[[str], Case], tmp_path: Path) -> None:
    """Strict JSON: no NaN, also where a statistic is not defined."""
    this = case("colocated")
    this.interrupt(tmp_path, 1, **ON)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    for line in (tmp_path / DIAGNOSTICS_FILE).read_text().splitlines():
        json.loads(line, parse_constant=refuse)
