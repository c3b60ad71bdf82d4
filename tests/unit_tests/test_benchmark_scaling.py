"""The scaling benchmark: exponents of known growth, and that each thing it times is what it says."""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from blockgrow_titan.parse import parse_config
from tools.benchmarks import scaling


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything runs once, and its size is taken for its time."""

    def once(runs: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        return {name: [float(name)] for name, run in runs.items() if run() or True}

    monkeypatch.setattr(scaling, "interleaved", once)


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_exponent(power: float) -> None:
    sizes = [2, 4, 8, 64]
    assert scaling.exponent(sizes, [3e-4 * size**power for size in sizes]) == pytest.approx(power)


def test_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # takes its time in a test session
    proportional = scaling.growth_of("x", {8: [1e-4, 8e-4, 9e-3], 16: [1.6e-3] * 3})
    assert proportional.value == pytest.approx(1.0) and proportional.holds
    assert proportional.note == "8: 800 us, 16: 1.6 ms"
    quadratic = scaling.growth_of("x", {2: [1.0], 4: [4.0]}, note="why")
    assert quadratic.value == pytest.approx(2.0) and not quadratic.holds
    assert quadratic.note == "2: 1.00 s, 4: 4.00 s; why"

    calls: list[int] = []
    row = scaling.growth("x", {1: lambda: calls.append(1), 2: lambda: calls.append(2)})
    assert calls[:4] == [1, 2, 1, 2] and row.bar == "<= 1.15"


def test_lengths_are_like_the_papers() -> None:
    lengths = scaling.lengths(4096)
    assert min(lengths) >= 1 and max(lengths) < scaling.SEQ_LEN
    assert sum(lengths) / len(lengths) == pytest.approx(scaling.MEAN_TOKENS, rel=0.05)


def test_command_lines(tmp_path: Path) -> None:
    deep = parse_config(scaling._command_line(tmp_path, "layers 8", 5, layers=8))
    assert (deep.growth.active_blocks, deep.block_stack.layers_per_block) == ([8], 1)
    assert scaling.FLAVORS[deep.model.flavor].vocab_size == 4096
    wide = parse_config(scaling._command_line(tmp_path, "vocabulary 8192", 5, vocabulary=8192))
    assert scaling.FLAVORS[wide.model.flavor].vocab_size == 8192
    assert wide.job.dump_folder != deep.job.dump_folder and not wide.teacher.path


def test_resume_and_documents_rows(tmp_path: Path, untimed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "STEPS", (20, 40))
    monkeypatch.setattr(scaling, "DOCUMENTS", (16, 32))
    names = [row.name for row in [*scaling.resume_rows(tmp_path), *scaling.document_rows(tmp_path)]]
    assert names == [
        "resume over steps: metrics.jsonl",
        "index over documents: jsonl",
        "identity over documents: jsonl",
    ]
    assert (
        len((tmp_path / "metrics_40.jsonl").read_text().splitlines()) == 40
    )  # taken up at its end: nothing is dropped


def test_dealing_rows(untimed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "BATCHES", (8, 16))
    monkeypatch.setattr(scaling, "RANKS", (2, 4))
    rows = list(scaling.dealing_rows())
    assert len(rows) == 7 and all(row.value == pytest.approx(1.0) for row in rows)


def test_rank_rows(untimed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "RANKS", (2, 4, 8, 16, 32))
    monkeypatch.setattr(scaling, "PAPER_CONFIG", "train_configs/grow_post.toml")
    rows = list(scaling.rank_rows())
    assert [row.name.partition(" over ranks")[0] for row in rows] == [
        "world and student of 9 layers (meta)",
        "world and student of 9 layers (meta)",
        "routes of the two worlds",
        "the plan's best division",
    ]
    assert all(row.value == pytest.approx(1.0) for row in rows)
