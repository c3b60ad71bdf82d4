"""tools/report.py on runs of known numbers: every table, over seeds, with variants, missing runs and the same bytes twice."""

import csv
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from blockgrow_titan.report import internals, losses, paper
from blockgrow_titan.report.experiment import Experiment, Key, make_experiment
from blockgrow_titan.report.reading import find_runs, read_run
from blockgrow_titan.report.table import Table
from blockgrow_titan.report.write import make_report
from tests.unit_tests.report_runs import STEPS, ces_of, removal_of, tokens_at, write_run, write_standard
from tools.report import main

SEEDS = (42, 43, 44)


def read(*folders: Path) -> Experiment:
    return make_experiment([read_run(folder) for folder in find_runs(folders)])


def rows_of(table: Table) -> list[dict[str, Any]]:
    return list(csv.DictReader(table.csv().splitlines()))


def close(text: str, value: float) -> bool:
    return float(text) == pytest.approx(value, abs=1e-12)


def last(kind: str, placement: str, seed: int = 42) -> float:
    return ces_of(kind, placement, seed, 1)[-1]


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_standard(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_standard(tmp_path_factory.mktemp("three"), SEEDS)


def test_table1_one_seed(one_seed: Path) -> None:
    """Delta -0.04 and -0.10, interaction -0.06, beside the paper's; no deviation, and the text says one seed."""
    table = losses.table1(read(one_seed))
    pre, post, delta = rows_of(table)
    assert (pre["joint"], pre["grow"], post["joint"], post["grow"]) == ("4.13", "4.2", "4.09", "4.1")
    assert close(delta["joint"], -0.04) and close(delta["grow"], -0.1) and close(delta["grow_minus_joint"], -0.06)
    assert pre["joint_std"] == "" and pre["joint_seeds"] == "1"
    assert [float(row["grow_paper"]) for row in (pre, post, delta)] == [2.7658, 2.7330, -0.0328]
    assert float(delta["grow_minus_joint_paper"]) == -0.0332
    assert table.cells()[-1] == ["Δ = post - pre", "-0.0400", "+0.0004", "-0.1000", "-0.0328", "-0.0600", "-0.0332"]
    assert "-0.0600, one seed (42)" in table.notes[0] and not table.missing


def test_table1_over_seeds(three_seeds: Path) -> None:
    """Means, Delta and interaction are over seeds, each with its sample standard deviation."""
    table = losses.table1(read(three_seeds))
    pre, post, delta = rows_of(table)
    joint = [last("joint1", "post", seed) - last("joint1", "pre", seed) for seed in SEEDS]
    grow = [last("grow", "post", seed) - last("grow", "pre", seed) for seed in SEEDS]
    both = [b - a for a, b in zip(joint, grow, strict=True)]
    for name, values in (("joint", joint), ("grow", grow), ("grow_minus_joint", both)):
        assert close(delta[name], statistics.mean(values)) and close(delta[f"{name}_std"], statistics.stdev(values))
    values = [last("grow", "post", seed) for seed in SEEDS]
    assert close(post["grow"], statistics.mean(values)) and close(post["grow_std"], statistics.stdev(values))
    assert pre["grow_seeds"] == "3" and "over 3 seeds (42, 43, 44)" in table.notes[0]
    assert table.cells()[2][3] == f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def test_table2(one_seed: Path) -> None:
    """What the growing runs had at the end of phase 0: ce two steps of 0.2 above the last."""
    pre, post, delta = rows_of(losses.table2(read(one_seed)))
    assert close(pre["ce"], 4.6) and close(post["ce"], 4.5) and close(pre["kd"], 4.61) and close(pre["kl"], 2.6)
    assert close(delta["ce"], -0.1) and float(pre["ppl"]) == pytest.approx(2.718281828459045**4.6)
    assert (pre["kd_paper"], pre["kl_paper"], delta["ce_paper"]) == ("3.0155", "", "0.0044")


def test_budgets(one_seed: Path) -> None:
    """Tables 3 and A2: tokens, unique tokens and active-layer tokens by a plain sum over the steps."""
    experiment = read(one_seed)
    tokens = [sum(tokens_at(step) for step in range(1, phases * STEPS + 1)) for phases in range(4)]
    layers = 2
    grown = sum(layers * (p + 1) * (tokens[p + 1] - tokens[p]) for p in range(3))
    expected = {
        "joint": (STEPS, tokens[1], tokens[1], 3 * layers * tokens[1]),
        "grow": (3 * STEPS, tokens[3], tokens[1], grown),
        "joint, 2 phases": (2 * STEPS, tokens[2], tokens[2], 3 * layers * tokens[2]),
        "joint, 3 phases": (3 * STEPS, tokens[3], tokens[3], 3 * layers * tokens[3]),
        "freeze": (3 * STEPS, tokens[3], tokens[1], grown),
    }
    names = ("steps", "tokens", "unique_tokens", "active_layer_tokens")
    table = losses.tableA2(experiment)
    assert {row["training"]: tuple(int(row[name]) for name in names) for row in rows_of(table)} == expected
    assert table.rows[0]["tokens_paper"] == 3.11e9 and table.rows[2]["unique_tokens_paper"] == 6.22e9
    rows = rows_of(losses.table3(experiment))
    assert [row["training"].removeprefix("post-norm ") for row in rows] == [*expected][:1] + [*expected][2:4] + ["grow"]
    assert [row["matched"] for row in rows] == ["unique tokens", "active-layer tokens", "tokens in all", ""]
    assert [row["ce"] for row in rows] == ["4.09", "4.0", "3.95", "4.1"]
    assert close(rows[2]["minus_grow"], -0.15) and [row["ce_paper"] for row in rows] == [
        "2.7607",
        "2.7518",
        "2.7428",
        "2.733",
    ]


def test_unique_tokens_of_a_shard_that_no_step_ends_on(tmp_path: Path) -> None:
    """A shard of 6 documents and steps of 4: the second step is half new, and the table says so."""
    write_run(tmp_path / "a", "post", [1, 2, 3], [4.0, 3.0, 2.0], shard=6)
    budget = losses.run_budget(read(tmp_path).any)
    assert budget["unique_tokens"] == round(tokens_at(1) + tokens_at(2) / 2) and budget["about"]
    assert any("shared out by documents" in note for note in losses.tableA2(read(tmp_path)).notes)


def test_rewound_documents_are_not_new(tmp_path: Path) -> None:
    """With data_at_growth = "rewind" the documents start at 0 again: only those beyond all earlier ones count."""
    folder = write_run(tmp_path / "a", "post", [1, 2, 3], [4.0, 3.0, 2.0], shard=1000)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["event"] == "train":
            first = (line["step"] - 1) % STEPS * 4
            line["documents"] = [first, first + 4]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert losses.run_budget(read(tmp_path).any)["unique_tokens"] == sum(tokens_at(t) for t in range(1, STEPS + 1))


def test_freeze(one_seed: Path) -> None:
    pre, post, delta = rows_of(losses.tableA3(read(one_seed)))
    assert (pre["freeze"], post["freeze"], pre["grow"]) == ("4.33", "4.31", "4.2")
    assert close(delta["freeze"], -0.02) and close(post["freeze_minus_grow"], 0.21)
    assert (pre["freeze_paper"], delta["freeze_paper"]) == ("2.9104", "-0.0332")


def test_removal(three_seeds: Path) -> None:
    rows = rows_of(internals.table4(read(three_seeds)))
    assert [(row["run"], row["block"]) for row in rows[3:5]] == [("post-norm grow", "0"), ("post-norm grow", "1")]
    values = [removal_of("post", 3, seed)[1] for seed in SEEDS]
    assert close(rows[4]["delta_ce"], statistics.mean(values)) and close(
        rows[4]["delta_ce_std"], statistics.stdev(values)
    )
    assert close(rows[4]["angular_distance"], 0.2) and (
        rows[4]["delta_ce_paper"],
        rows[4]["angular_distance_paper"],
    ) == ("3.74", "0.365")
    assert len(rows) == 12 and close(rows[2]["angular_distance"], 0.4 / 3 + 0.02)


def test_transitions(one_seed: Path) -> None:
    """The loss jumps by 0.5 or 1.0 and falls by 0.1 a step; windows of 5 steps at phases of 20."""
    rows = rows_of(internals.tableA4(read(one_seed)))
    assert [(row["run"], row["step"]) for row in rows[:4]] == [
        ("pre-norm grow", "20"), ("pre-norm grow", "40"), ("post-norm grow", "20"), ("post-norm grow", "40"),
    ]  # fmt: skip
    assert close(rows[0]["jump"], 0.5) and close(rows[0]["auc_short"], 0.3) and close(rows[2]["auc_long"], 0.8)
    # smoothed over steps 6..10 and 11..15 it is 2.0 again; each window is told by its middle
    assert (rows[0]["recovery"], rows[2]["recovery"], rows[2]["recovered"]) == ("8.0", "13.0", "1 of 1")
    assert [row["recovery_paper"] for row in rows[:4]] == ["101", "19054", "19914", "19426"]


def test_six_blocks_have_no_papers_blocks_beside_them(tmp_path: Path) -> None:
    experiment = read(write_standard(tmp_path, blocks=6))
    table = internals.table4(experiment)
    assert len(table.rows) == 24 and "ΔCE without it, paper" not in table.cells()[0]
    assert rows_of(internals.tableA4(experiment))[0]["jump_paper"] == ""
    table = losses.table3(experiment)
    assert any("No whole number" in note for note in table.notes)  # 21 blocks in 6 phases: 3.5 joint ones
    papers = {row["training"]: row["ce_paper"] for row in table.rows}
    assert papers["post-norm joint, 3 phases"] is None and papers["post-norm joint"] == 2.7607


def test_what_a_run_is_comes_from_its_manifest(tmp_path: Path) -> None:
    """Folders named for what they are not."""
    write_run(tmp_path / "joint_post", "pre", [1, 2, 3], [4.5, 4.4, 4.2])
    write_run(tmp_path / "freeze_pre", "post", [3], [4.1])
    write_run(tmp_path / "grow_post", "post", [1, 2, 3], [4.6, 4.5, 4.4], freeze=True)
    names = {key: run.folder.name for key, group in read(tmp_path).groups.items() for run in group.values()}
    expected = {
        ("grow", "pre", ""): "joint_post",
        ("joint1", "post", ""): "freeze_pre",
        ("freeze", "post", ""): "grow_post",
    }
    assert names == expected


def test_variants_stay_out_of_the_tables(tmp_path: Path) -> None:
    """Other policies and shards are shown by their names among the transitions and in no comparison."""
    write_standard(tmp_path, kinds=("joint1", "grow"))
    changes: list[tuple[str, dict[str, Any], int | None]] = [
        (
            "optimizer kept, LR continued",
            {"growth.optimizer_at_growth": "keep", "growth.lr_at_growth": "continue"},
            None,
        ),
        ("data rewound, shard of 60", {"growth.data_at_growth": "rewind"}, 60),
    ]
    for i, (_, changed, shard) in enumerate(changes):
        write_run(tmp_path / f"variant{i}", "post", [1, 2, 3], [9.0, 8.0, 7.0], changed=changed, shard=shard)
    experiment = read(tmp_path)
    assert {key.variant for key in experiment.groups if key.variant} == {name for name, _, _ in changes}
    assert rows_of(losses.table1(experiment))[1]["grow"] == "4.1"
    assert "post-norm grow (optimizer kept, LR continued)" in {row["run"] for row in internals.tableA4(experiment).rows}


def test_variants(tmp_path: Path) -> None:
    """Each policy's ce and Delta, and its change against the usual one, over the seeds in common; a missing one's command."""
    write_standard(tmp_path, (42, 43), kinds=("grow",))
    both = {"growth.optimizer_at_growth": "keep", "growth.lr_at_growth": "continue"}
    for i, (placement, seed, ce, changed) in enumerate(
        [
            ("pre", 42, 4.5, {"growth.optimizer_at_growth": "keep"}),
            ("pre", 43, 4.7, {"growth.optimizer_at_growth": "keep"}),
            ("post", 42, 4.0, {"growth.optimizer_at_growth": "keep"}),
            ("pre", 42, 4.1, both),
            ("pre", 43, 4.1, both),
        ]
    ):
        write_run(tmp_path / f"v{i}", placement, [1, 2, 3], [5.0, 4.9, ce], seed=seed, changed=changed)
    table = losses.variants(read(tmp_path))
    usual, kept, neither = rows_of(table)
    assert [row["training"] for row in (usual, kept, neither)] == [
        "grow", "grow (optimizer kept)", "grow (optimizer kept, LR continued)"
    ]  # fmt: skip
    assert close(usual["pre"], (4.20 + 4.22) / 2) and close(usual["delta"], statistics.mean([-0.1, 4.14 - 4.22]))
    assert close(kept["pre"], 4.6) and close(kept["pre_std"], statistics.stdev([4.5, 4.7])) and kept["post"] == "4.0"
    assert close(kept["delta"], -0.5) and kept["delta_seeds"] == "1" and close(kept["post_change"], -0.1)
    assert close(kept["pre_change"], statistics.mean([0.3, 0.48])) and close(neither["pre_change"], -0.11)
    assert (usual["pre_change"], neither["post"], neither["delta"], neither["post_change"]) == ("", "", "", "")
    assert table.missing == [
        "post-norm grow (optimizer kept), seed 43: tools/run_recipe.py optimizer_and_lr --scale tiny --only "
        "grow_post_keep_restart --seeds 43",
        "post-norm grow (optimizer kept, LR continued), seeds 42, 43: tools/run_recipe.py optimizer_and_lr --scale tiny --only "
        "grow_post_keep_continue --seeds 42,43",
    ]


def test_a_rewind_without_what_it_is_compared_with(tmp_path: Path) -> None:
    """Its shard is then the usual one; what lacks is named as the recipe has it."""
    changed = {"growth.data_at_growth": "rewind"}
    write_run(tmp_path / "a", "post", [1, 2, 3], [5.0, 4.9, 4.8], changed=changed, shard=60)
    table = losses.variants(read(tmp_path))
    assert table.cells()[1:] == [["grow"] + ["-"] * 5, ["grow (data rewound)", "-", "4.8000", "-", "-", "-"]]
    assert [line.partition("--only ")[2] for line in table.missing] == [
        "grow_pre_continue --seeds 42", "grow_post_continue --seeds 42", "grow_pre_rewind --seeds 42"
    ]  # fmt: skip


def test_a_shard_that_is_not_the_papers_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "post", [1, 2, 3], [4.0, 3.0, 2.0], shard=1000)
    assert any("shard of 1,000 documents" in note for note in read(tmp_path).notes)


def test_missing_runs(tmp_path: Path) -> None:
    """A dash, and the command; a difference that needs the missing run is a dash as well."""
    write_standard(tmp_path, kinds=("joint1",))
    write_run(tmp_path / "z", "pre", [1, 2, 3], ces_of("grow", "pre", 43, 3), seed=43)
    experiment = read(tmp_path)
    table = losses.table1(experiment)
    assert [row[3] for row in table.cells()[1:]] == ["4.2200", "-", "-"]
    assert table.cells()[1][5] == "-"  # joint and grow have no seed in common
    assert table.missing == [
        "pre-norm joint, seed 43: tools/run_recipe.py interaction --scale tiny --only joint_pre --seeds 43",
        "post-norm joint, seed 43: tools/run_recipe.py interaction --scale tiny --only joint_post --seeds 43",
        "pre-norm grow, seed 42: tools/run_recipe.py interaction --scale tiny --only grow_pre --seeds 42",
        "post-norm grow, seeds 42, 43: tools/run_recipe.py interaction --scale tiny --only grow_post --seeds 42,43",
    ]
    assert "a run is missing" in table.notes[0] and any(note.startswith("Seeds differ") for note in table.notes)
    assert "--only joint_post_100k" in " ".join(losses.table3(experiment).missing)
    assert "freeze --scale tiny --only freeze_pre" in " ".join(losses.tableA3(experiment).missing)


def test_runs_without_diagnostics(tmp_path: Path) -> None:
    """Their losses count; the table of their insides says why it is empty."""
    for i, placement in enumerate(("pre", "post")):
        write_run(tmp_path / str(i), placement, [1, 2, 3], [4.0, 3.0, 2.0], diagnosed=False)
    experiment = read(tmp_path)
    assert experiment.ce("grow", "pre") is not None
    table = internals.table4(experiment)
    assert {row["delta_ce"] for row in table.rows} == {None}
    assert "pre-norm grow, seed 42: it was run without diagnostics.enable" in table.missing


def test_command(one_seed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All files are there; the same runs give the same bytes, also over an older report; nothing is left beside it."""
    out = tmp_path / "out"
    assert main([str(one_seed), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out / 'report.html'}\n"
    tables = ["runs", "table1", "table2", "table3", "table4", "tableA2", "tableA3", "tableA4"]
    figures = ["figure3a", "figure3b", "figure4", "figure5a", "figure5b", "figureA1", "figureA2"]
    expected = {"report.md", "report.html", ".blockgrow_report"}
    expected |= {f"tables/{name}.{kind}" for name in tables for kind in ("csv", "json")}
    expected |= {f"figures/{name}.{kind}" for name in figures for kind in ("png", "svg")}
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert files.keys() == expected
    assert all(files[f"figures/{name}.png"].startswith(b"\x89PNG") for name in figures)
    table = json.loads(files["tables/table1.json"])
    assert table["rows"][2]["grow_minus_joint_paper"] == paper.INTERACTION and table["rows"][2]["grow_seeds"] == 1
    text = files["report.md"].decode()
    assert "3 blocks x 2 layers, phases of 20 steps of 4 documents" in text and "; seed 42." in text
    assert all(f"](figures/{name}.png)" in text for name in figures)

    (out / "left").write_text("of the older one")
    assert main([str(path) for path in sorted(one_seed.iterdir(), reverse=True)] + ["-o", str(out)]) == 0
    assert files == {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_some_tables_and_figures_alone(one_seed: Path, tmp_path: Path) -> None:
    """Those that are asked for, and the runs; a title and lines of its own, which the page escapes."""
    write_run(tmp_path / "v", "post", [1, 2, 3], [5.0, 4.9, 4.8], changed={"growth.lr_at_growth": "continue"})
    out = tmp_path / "out"
    assert (
        make_report([one_seed, tmp_path / "v"], out, ["table2", "figure3a"], "A & B", ["<i>?", "tools/run_recipe.py x"])
        == []
    )
    found = sorted(path.stem for path in out.rglob("*.*") if path.suffix in (".csv", ".svg"))
    assert found == ["figure3a", "runs", "table2", "variants"]  # there are variants
    text = (out / "report.html").read_text()
    assert "<title>A &amp; B</title>" in text and "<h1>A &amp; B</h1>\n<p>&lt;i&gt;?</p>\n<p><code>tools/run_" in text
    assert (out / "report.md").read_text().startswith("# A & B\n\n<i>?\n\n`tools/run_recipe.py x`\n\nThese runs")


def test_keys_in_words() -> None:
    assert Key("joint1", "pre").words == "pre-norm joint" and Key("joint3", "post").words == "post-norm joint, 3 phases"
    assert Key("grow", "post", "LR continued").words == "post-norm grow (LR continued)"
