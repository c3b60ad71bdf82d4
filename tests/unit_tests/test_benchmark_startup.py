"""Start-up: what the entry point loads, what stands in for what it does not, and the benchmark's arithmetic."""

from pathlib import Path

import pytest
import torch

from blockgrow_titan.infra.imports import TEXT_DATASETS, _compiled_later
from tools.benchmarks import startup

ENTRY_POINT = "import blockgrow_titan.train, blockgrow_titan.trainer"


def test_the_entry_point_loads_what_it_needs() -> None:
    """And what it does not load, torchtitan's own modules find when they are called."""
    found = startup.after(
        f"{ENTRY_POINT}\nimport sys, torch\n"
        f"needless = [name for name in {startup.NOT_NEEDED!r} if name in sys.modules]\n"
        f"import torchtitan.models.qwen3, torchtitan.components.validate\n"
        f"stand_ins = [torchtitan.models.qwen3.build_text_dataloader.__module__,"
        f" torchtitan.components.validate.build_text_validation_dataloader.__module__]\n"
        f"try: torchtitan.models.qwen3.build_text_dataloader()\n"
        f"except TypeError as error: called = str(error)\n"
        f"import {TEXT_DATASETS} as real",
        "[needless, stand_ins, called, 'datasets' in sys.modules, real.HuggingFaceTextDataset.__module__,"
        " real.build_text_dataloader.__module__, torch.compile.__module__]",
    )
    needless, stand_ins, called, loaded, *real = found
    assert needless == []
    assert stand_ins == ["blockgrow_titan.infra.imports"] * 2
    assert "missing" in called and loaded  # the real function complains of its arguments
    assert real == [TEXT_DATASETS, TEXT_DATASETS, "torch"]


def test_a_function_compiled_later() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.append(len(graph.graph.nodes))
        return graph

    def double(x: torch.Tensor) -> torch.Tensor:
        """Twice x."""
        return x + x

    later = _compiled_later(double, backend=backend)
    x = torch.arange(3.0)
    assert seen == [] and later.__doc__ == double.__doc__
    assert torch.equal(later(x), 2 * x) and torch.equal(later(x), 2 * x)
    assert len(seen) == 1

    # inside a compiled region it is part of that region's one graph, as what torch.compile returns is
    outer = torch.compile(lambda x: later(x) * 3, backend=backend, fullgraph=True)
    assert torch.equal(outer(x), 6 * x)
    assert len(seen) == 2
    assert torch.equal(_compiled_later(backend="eager")(double)(x), 2 * x)  # as a decorator


def test_phases_add_up() -> None:
    seconds = startup.phase_seconds(10.0, {"launcher": 11.0, "worlds": 14.5, "imports": 13.0})
    assert seconds == {"launcher": 1.0, "imports": 2.0, "worlds": 1.5, "whole time": 4.5}


def test_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        def work(self, x: int) -> int:
            return x + 1

    marks = startup.Marks()
    marks.after(Owner, "work", "first step")
    assert Owner().work(1) == 2
    first = marks.ends["first step"]
    assert Owner().work(2) == 3 and marks.ends["first step"] == first >= marks.ends["launcher"]
    monkeypatch.setenv(startup.MARKS_FOLDER, str(tmp_path))
    marks.write("student")
    assert (tmp_path / "student.marks.json").exists()
