"""The benchmarks' frame, the objective's benchmark at toy size, and what runs on a GPU as far as a CPU can run it.

No figure is tested: only that equal work is compared, that rows say what they should, and that the parts run.
"""

import json
import math
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tools.benchmarks import __main__ as benchmarks
from tools.benchmarks import gpu_step, objective, rows
from tools.benchmarks.rows import Row

ROOT = Path(__file__).parents[2]
SIZES = objective.Sizes(tokens=40, dim=8, vocab=131)


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage between runs takes long where many tests have left some."""
    monkeypatch.setattr(rows.gc, "collect", lambda: 0)


def test_bars() -> None:
    assert rows.at_least("s", "n", 2.2, "x", 2.2).holds and not rows.at_least("s", "n", 2.1, "x", 2.2).holds
    assert rows.at_most("s", "n", 2.2, "x", 2.2).holds and not rows.at_most("s", "n", 2.3, "x", 2.2).holds
    assert not rows.at_most("s", "n", math.nan, "x", 2.2).holds
    assert rows.at_least("s", "n", 1, "x", 1 / 6).bar == ">= 0.166667"


def test_interleaved_takes_turns() -> None:
    called: list[str] = []
    runs = {name: (lambda name=name: called.append(name)) for name in "ab"}  # type: ignore[misc]
    seconds = rows.interleaved(runs, repeats=2, warmups=1)
    assert called == ["a", "b"] * 3
    assert [len(values) for values in seconds.values()] == [2, 2]
    assert rows.median_ratio([2.0, 9.0, 8.0], [1.0, 3.0, 4.0]) == 2.0


def test_tensor_peak_counts_what_is_alive_at_once() -> None:
    before = torch.zeros(10_000)

    def run() -> None:
        first = torch.zeros(1000) + before[:1000]
        del first
        torch.zeros(1500)

    assert rows.tensor_peak(run, before) == 8000


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> str:
    """A benchmark of two rows, in place of a real one."""
    module = types.ModuleType("tools.benchmarks.startup")
    module.run = lambda: iter([rows.at_most("startup", "slow", 2.0, "s", 1.0, "a note"), Row("startup", "n", 3, "")])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return "startup"


def test_a_missed_bar_is_printed_and_does_not_fail(
    subject: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmarks.main([subject, "--json", str(tmp_path / "rows.json")]) == 0
    printed = capsys.readouterr()
    assert "| startup | slow | 2 s (a note) | <= 1 | no |" in printed.out.splitlines()
    assert "| startup | n | 3 |  |  |" in printed.out.splitlines()
    assert "startup: slow: 2 s <= 1" in printed.err
    written = json.loads((tmp_path / "rows.json").read_text())
    assert f"torch {torch.__version__}" in written["machine"] and written["machine"] in printed.out
    expected = {"subject": "startup", "name": "slow", "value": 2.0, "unit": "s", "bar": "<= 1", "holds": False}
    assert written["rows"][0] == expected | {"note": "a note"}
    assert written["rows"][1]["holds"] is None


def test_an_unknown_subject_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        benchmarks.main(["objective", "speed"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "there is no subject speed; known: end_to_end, objective" in error and "gpu_step" in error


def test_every_way_computes_the_same() -> None:
    """Against float64, written out; TRL's and Liger-Kernel's where they are installed."""
    case = objective.make_case(SIZES, dtype=torch.float32, device="cpu")
    exact = case.to(torch.float64)
    log_p, log_q = (
        F.log_softmax(hidden @ head.T, -1)
        for hidden, head in ((exact.hidden, exact.weight), (exact.teacher_hidden, exact.teacher_head))
    )
    expected = {"ce": -log_p[torch.arange(40), exact.labels].sum(), "kl": (log_q.exp() * (log_q - log_p)).sum()}
    (0.7 * expected["kl"] + 0.3 * expected["ce"]).backward()
    for way in objective.ways().values():
        case.forget_gradients()
        losses = way(case)
        assert losses and all(value == pytest.approx(expected[term].item(), rel=1e-5) for term, value in losses.items())
        assert case.hidden.grad is not None and case.weight.grad is not None
        if "ce" in losses:
            torch.testing.assert_close(case.hidden.grad.double(), exact.hidden.grad, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(case.weight.grad.double(), exact.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [15, 40])
def test_products_are_taken_whole_and_in_chunks(chunk_tokens: int) -> None:
    case = objective.make_case(SIZES, dtype=torch.float32, device="cpu")
    hidden, weight = case.hidden.detach().double(), case.weight.detach().double()
    logits = hidden @ weight.T
    run = objective.products(case, chunk_tokens)
    for _ in range(2):  # no run adds to the one before
        grad_hidden, grad_weight = run()
    torch.testing.assert_close(grad_hidden.double(), logits @ weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grad_weight.double(), logits.T @ hidden, rtol=1e-4, atol=1e-4)


def test_objective_yields_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(objective, "run_ranks", lambda *_, way, **__: called.append(way) or [2**20])
    threads = torch.get_num_threads()
    found = {row.name: row for row in objective.run(SIZES, repeats=1)}
    assert torch.get_num_threads() == threads
    assert called[:2] == ["chunked", "full logits"]
    bars = {name: (row.bar, row.holds) for name, row in found.items() if row.bar}
    for name, bar in (
        ("time over its four matrix products", "<= 1.35"),
        ("times faster than full logits", ">= 1.4"),
        ("extra memory over that of full logits", "<= 0.166667"),
    ):
        assert bars[name][0] == bar
    for name in (
        "relative difference of the loss, chunked",
        "gradients, relative distance from float64 autograd",
        "largest difference between chunk sizes",
        "values that are not finite at a logit spread of 300",
        "peak of 8 micro-batches over that of 2",
    ):
        assert bars[name][1], (name, found[name])


def test_gpu_step_trains_the_last_phase(tmp_path: Path) -> None:
    """The step that ``gpu_step`` times on CUDA, at the tiny flavor on the CPU: nine layers, BF16."""
    command_line = ["--job.config_file", str(gpu_step.CONFIG), "--job.dump_folder", str(tmp_path)]
    command_line += ["--model.flavor", "tiny", "--training.seq_len", "32", "--optimizer.implementation", "foreach"]
    measured = gpu_step.measure(command_line, "cpu", repeats=2)
    assert len(measured.seconds) == 2 and len(measured.losses) == 4 and measured.tokens == 32
    assert measured.losses == sorted(measured.losses, reverse=True), "it learns its one batch"
    dim, heads, kv_heads, hidden, vocab = 256, 256, 128, 768, 4096  # of the tiny flavor, heads times their size
    weights = 9 * (2 * dim * heads + 2 * dim * kv_heads + 3 * dim * hidden) + dim * vocab
    attention = 9 * 2 * 32 * heads  # a token, scores and values, not halved for causality
    teacher_head = dim * vocab
    products = 2 * 32 * (3 * (weights + attention) + teacher_head)
    first_layer = 2 * 32 * (dim * heads + 2 * dim * kv_heads)  # no gradient is wanted of a frozen embedding
    assert measured.flops == pytest.approx(products - first_layer, rel=0.02)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_without_cuda_the_gpu_benchmarks_say_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        next(gpu_step.run())
    script = ROOT / "tools" / "benchmarks" / "gpu.sh"
    subprocess.run(["bash", "-n", script], check=True)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    done = subprocess.run([script, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "CUDA" in done.stderr and not any(tmp_path.iterdir())
