"""The report that `tools/run_recipe.py` makes of a recipe's runs: complete, interrupted, failed, of a part, and none."""

import json
from pathlib import Path

import pytest

from tests.unit_tests.recipe_bench import Bench
from tools import launching


@pytest.fixture
def bench(
    tmp_path: Path, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Bench:
    monkeypatch.setattr(launching, "POLL_SECONDS", 0.01)
    return Bench(tmp_path, workspace, capsys)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_report(bench: Bench) -> None:
    """Of the recipe's runs alone, all seeds, what it yields alone; the same bytes again and after an interruption."""
    bench.recipe.write_text(bench.recipe.read_text().replace('["table1"]', '["table1", "figure3a"]'))
    bench.runs(42, 7)
    bench.runs(42, further=("--optimizer.lr", "1e-4"))
    assert bench("--only grow_post -- --optimizer.lr 1e-4")[0] == 0  # in the same folder, but of another config
    assert bench("--seeds", "42,7")[::2] == (0, "")
    report = bench.out / "toy" / "reports" / "two"
    files = files_of(report)
    assert sorted(name for name in files if name.startswith(("tables", "figures"))) == [
        "figures/figure3a.png", "figures/figure3a.svg", "tables/runs.csv", "tables/runs.json", "tables/table1.csv",
        "tables/table1.json",
    ]  # fmt: skip
    rows = json.loads(files["tables/table1.json"])["rows"]
    assert rows[0]["grow"] == pytest.approx((4.26 + 0.76) / 2) and rows[2]["grow"] == 0.0 and rows[2]["grow_seeds"] == 2
    assert len(json.loads(files["tables/runs.json"])["rows"]) == 4
    head = files["report.md"].decode().splitlines()[:5:2]
    assert head == ["# Two placements", "Which?", "Recipe two, scale toy: toy."]
    assert b"<h1>Two placements</h1>\n<p>Which?</p>" in files["report.html"]

    bench("--seeds", "42,7")
    assert files_of(report) == files
    other = bench.out / "other"
    for name, plan in (("grow_pre", "stop 3 SIGTERM"), ("grow_post", "fail 5"), ("grow_post", "stop 6 SIGINT")):
        bench.plan(name, plan)
        assert bench("--seeds", "42,7", "--out", str(other))[0] != 0
        bench.plan(name)
    assert bench("--seeds", "42,7", "--out", str(other))[::2] == (0, "")
    assert files_of(other / "toy" / "reports" / "two") == files


def test_report_of_what_there_is(bench: Bench) -> None:
    """A failed run is a dash, and named with what goes on; the report of all runs replaces that one, and no part does."""
    runs = bench.runs()
    bench.plan("grow_pre", "fail 5")
    status, out, _ = bench()
    report = bench.out / "toy" / "reports" / "two"
    assert status == 1 and out.endswith(f"Tables and figures: {report / 'report.html'}\n")
    rows = json.loads((report / "tables" / "table1.json").read_text())["rows"]
    assert rows[0]["grow"] is None and rows[1]["grow"] == pytest.approx(4.26) and rows[2]["grow"] is None
    text = (report / "report.md").read_text()
    assert "\nNot complete: grow_pre (seed 42) (resumes at step 4). To go on: `tools/run_recipe.py " in text
    assert "left out: unfinished: it has trained 4 of 6 steps" in text
    bench.plan("grow_pre")
    assert bench()[0] == 0
    files = files_of(report)
    assert b"Not complete" not in files["report.md"]
    status, out, _ = bench("--only", "grow_post")
    part = bench.out / "toy" / "reports" / "two-part"
    assert status == 0 and out.endswith(f"Tables and figures: {part / 'report.html'}\n") and files_of(report) == files
    assert [row["folder"] for row in json.loads((part / "tables" / "runs.json").read_text())["rows"]] == [
        runs[1].folder.name
    ]


def test_no_report(bench: Bench) -> None:
    """Without a run that is complete; where something else is; of runs that are of no table. The runs are not lost."""
    runs = bench.runs()
    for name in ("grow_pre", "grow_post"):
        bench.plan(name, "fail 3")
    status, out, err = bench()
    assert status == 1 and "Tables" not in out and not (bench.out / "toy" / "reports").exists()
    last = (
        f"No report: none of 2 runs can be reported: {runs[1].folder.name}: unfinished: it has trained 2 of 6 steps; "
    )
    assert err.splitlines()[-1].startswith(last)
    report = bench.out / "toy" / "reports" / "two"
    report.mkdir(parents=True)
    (report / "thesis.tex").touch()
    for arguments in ([], ["--dry-run"]):
        status, _, err = bench(*arguments)
        assert status == 2 and err.startswith(f"Config error: the report's folder {report} exists and is not a report")
    assert len(bench.launches) == 2
    (report / "thesis.tex").unlink()
    for name in ("grow_pre", "grow_post"):
        bench.plan(name)
    bench.runs(further=("--block_stack.num_blocks", "3"))
    status, out, err = bench(" -- --block_stack.num_blocks 3")
    assert status == 1 and err.startswith("No report: no run is of a kind that a table has: ") and err.count("\n") == 1
    assert out.count("complete in") == 2 and out.count("  4.2600  ") == 2
