"""Recipes: those that are shipped say what the paper did, share their runs, and mistakes are told in one line."""

import json
from functools import cache
from pathlib import Path

import pytest

from blockgrow_titan.documents.batches import documents_of_offset
from blockgrow_titan.growth.manifest import trajectory_config
from blockgrow_titan.parse import parse_config
from blockgrow_titan.report.write import FIGURES, TABLES, make_report
from tests.unit_tests.report_runs import write_run
from tools.recipe_runs import Run, build_runs, options, trajectory_digest
from tools.recipes import RECIPES, YIELDS, read_recipe, read_scale, recipe_names
from tools.run_recipe import check_runs, parse_seeds

OUT = Path("/never_made")
SWEEP = ("interaction", "joint_budget", "freeze")  # the paper's
SCALES = ("tiny", "qwen3_8b")


@cache
def shipped(recipe: str, scale: str) -> dict[str, Run]:
    """The runs of a shipped recipe by name."""
    read = read_recipe(recipe)
    return {run.name: run for run in build_runs(read, read_scale(scale, read), read.seeds, OUT)}


def documents_of_phase(run: Run, index: int) -> list[int]:
    """Every document of a phase, in the order of its steps."""
    schedule, batch = run.schedule, run.job_config.training.global_batch_size
    phase, shard = schedule.phases[index], run.job_config.documents.shard_documents
    steps = range(phase.first_step, phase.last_step + 1)
    return [i for step in steps for i in documents_of_offset(schedule.data_offset(step), batch, shard)]


def test_what_is_shipped() -> None:
    assert recipe_names() == ["data_rewind", "freeze", "interaction", "joint_budget", "optimizer_and_lr"]
    assert sorted(path.stem for path in (RECIPES / "scales").glob("*.toml")) == sorted(SCALES)
    assert {item for name in SWEEP for item in read_recipe(name).yields} == set(YIELDS)  # all of them, by the three
    assert [make.__name__ for make in (*TABLES, *FIGURES)] == [*YIELDS]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_pass_the_checks(
    name: str, scale: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = read_recipe(name)
    text = recipe.path.read_text()
    assert text.startswith(f"# Run:  tools/run_recipe.py {name} --scale tiny\n")
    assert recipe.title and recipe.question and recipe.paper and recipe.seeds == (42,)
    runs = shipped(name, scale)
    assert tuple(runs) == recipe.runs and len({run.digest for run in runs.values()}) == len(runs)
    assert all(run.job_config.diagnostics.enable and run.job_config.checkpoint.enable for run in runs.values())
    monkeypatch.chdir(tmp_path)  # bundled files are found from anywhere
    check_runs(list(runs.values()), dry=scale != "tiny")
    notes = capsys.readouterr().err.splitlines()
    # absent files of the large scale are notes, one for each
    assert len(notes) == (2 if scale == "qwen3_8b" else 0) and all("A run would be refused" in note for note in notes)


@pytest.mark.parametrize(("scale", "phase", "layers", "batch"), [("tiny", 60, 1, 16), ("qwen3_8b", 50_000, 3, 64)])
def test_the_paper_s_design(scale: str, phase: int, layers: int, batch: int) -> None:
    """Table A2: layers, steps and unique documents of each kind of run."""
    kinds = {"joint": (1, [3], 1), "grow": (3, [1, 2, 3], 1), "freeze": (3, [1, 2, 3], 1)}
    kinds |= {"joint_post_100k": (2, [3, 3], 2), "joint_post_150k": (3, [3, 3, 3], 3)}
    for run in (run for name in SWEEP for run in shipped(name, scale).values()):
        kind, _, placement = run.name.partition("_")
        phases, blocks, shards = kinds.get(run.name, kinds[kind])
        config = run.job_config
        assert [p.steps for p in run.schedule.phases] == [phase] * phases
        assert [p.active_blocks for p in run.schedule.phases] == blocks
        assert config.block_stack.layers_per_block == layers and config.training.global_batch_size == batch
        assert config.documents.shard_documents == shards * phase * batch
        assert config.block_stack.placement == placement.partition("_")[0]
        assert config.growth.freeze == ("completed_blocks" if kind == "freeze" else "none")
        assert (config.growth.optimizer_at_growth, config.growth.lr_at_growth) == ("reset", "restart")
    budgets = {name: run.active_layer_steps() // layers for name, run in shipped("joint_budget", scale).items()}
    # proxy-matched: the 100k run has grow's active-layer tokens
    assert budgets == {
        "joint_post": 3 * phase, "joint_post_100k": 6 * phase, "joint_post_150k": 9 * phase, "grow_post": 6 * phase
    }  # fmt: skip


@pytest.mark.parametrize("name", recipe_names())
def test_a_report_takes_all_runs_of_a_recipe(name: str, tmp_path: Path) -> None:
    """None is refused or left out of all that the recipe yields, whatever policies and shards it varies."""
    recipe, seeds = read_recipe(name), (42, 43)
    for run in build_runs(recipe, read_scale("tiny", recipe), seeds, tmp_path / "out"):
        config, phases = run.job_config, run.schedule.phases
        active = [phase.active_blocks for phase in phases]
        write_run(
            run.folder,
            config.block_stack.placement,
            active,
            [5.0 - 0.1 * phase.index for phase in phases],
            steps=phases[0].steps,
            shard=config.documents.shard_documents,
            changed=trajectory_config(config),
        )
    assert make_report([tmp_path / "out"], tmp_path / "report", recipe.yields) == []
    tables = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "report" / "tables").glob("*.json")}
    figures = {path.stem for path in (tmp_path / "report" / "figures").glob("*.png")}
    variants = {"variants"} if recipe.variants else set()
    assert tables.keys() | figures == {*recipe.yields, "runs"} | variants
    assert len(tables["runs"]["rows"]) == len(recipe.runs) * len(seeds)
    for table in variants:
        assert all(row["delta_seeds"] == 2 for row in tables[table]["rows"])
        assert len(tables[table]["rows"]) == len(recipe.runs) // 2
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Missing" not in text


def test_every_phase_of_grow_sees_the_same_documents() -> None:
    for name in ("grow_pre", "freeze_post"):
        run = {**shipped("interaction", "tiny"), **shipped("freeze", "tiny")}[name]
        assert all(documents_of_phase(run, phase) == list(range(960)) for phase in range(3))
    long = shipped("joint_budget", "tiny")["joint_post_150k"]
    assert [documents_of_phase(long, phase)[0] for phase in range(3)] == [0, 960, 1920]  # fresh ones


def test_active_layer_steps_of_a_part() -> None:
    run = shipped("interaction", "tiny")["grow_pre"]
    by_step = [0]
    for step in range(1, 181):
        by_step.append(by_step[-1] + 1 + (step > 60) + (step > 120))
    assert [run.active_layer_steps(step) for step in range(181)] == by_step and run.active_layer_steps() == 360


def test_recipes_share_runs() -> None:
    tiny = [shipped(name, "tiny") for name in SWEEP]
    assert len({run.digest for runs in tiny for run in runs.values()}) == 8
    for name in ("joint_post", "grow_post"):
        assert tiny[0][name].folder == tiny[1][name].folder == OUT / "tiny" / f"{name}-s42-{tiny[0][name].digest}"
    assert shipped("optimizer_and_lr", "tiny")["grow_pre"].folder == tiny[0]["grow_pre"].folder
    recipe = read_recipe("freeze")
    seeds = build_runs(recipe, read_scale("tiny", recipe), (42, 43), OUT)
    assert [(run.name, run.seed) for run in seeds] == [(name, seed) for seed in (42, 43) for name in recipe.runs]
    assert len({run.digest for run in seeds}) == 8


@pytest.mark.parametrize("scale", SCALES)
def test_rewinding_changes_the_documents(scale: str) -> None:
    runs = shipped("data_rewind", scale)
    for placement in ("pre", "post"):
        on, back = runs[f"grow_{placement}_continue"], runs[f"grow_{placement}_rewind"]
        batch, shard = on.job_config.training.global_batch_size, on.job_config.documents.shard_documents
        assert back.job_config.documents.shard_documents == shard
        phase = on.schedule.phases[0].steps * batch
        assert shard < phase  # every phase sees the whole shard, rewound or not
        firsts = [[r.schedule.data_offset(p.first_step) * batch % shard for p in r.schedule.phases] for r in (on, back)]
        assert firsts[1] == [0, 0, 0] and 0 not in firsts[0][1:]


def test_all_four_treatments_of_optimizer_and_learning_rate() -> None:
    growth = [
        (r.job_config.block_stack.placement, r.job_config.growth) for r in shipped("optimizer_and_lr", "tiny").values()
    ]
    found = {(placement, g.optimizer_at_growth, g.lr_at_growth) for placement, g in growth}
    assert found == {(p, o, lr) for p in ("pre", "post") for o in ("reset", "keep") for lr in ("restart", "continue")}


def test_the_command_line_says_what_the_config_is() -> None:
    for name in ("joint_budget", "data_rewind"):
        for run in shipped(name, "tiny").values():
            parsed = parse_config(run.arguments)
            assert trajectory_config(parsed) == trajectory_config(run.job_config)
            assert parsed.job.dump_folder == str(run.folder)
            assert parsed.validation.freq == run.job_config.validation.freq == 20 and parsed.diagnostics.enable


def test_options() -> None:
    overrides = {
        "training": {"steps": 4, "dataloader": {"num_workers": 2}, "dataset_path": "a b"},
        "growth": {"phase_steps": [2, 3], "train_boundary": False},
        "validation": {"enable": True},
        "documents": {"shard_documents": -1},
        "optimizer": {"eps": 1e-8},
    }
    assert options(overrides) == [
        "--training.steps", "4", "--training.dataloader.num_workers", "2", "--training.dataset_path", "a b",
        "--growth.phase_steps", "2", "3", "--growth.no-train_boundary", "--validation.enable",
        "--documents.shard_documents=-1", "--optimizer.eps", "1e-08",
    ]  # fmt: skip


def test_digest(workspace: Path) -> None:
    base = ["--job.config_file", str(workspace / "base.toml")]
    digest = trajectory_digest(parse_config(base))
    assert digest == trajectory_digest(parse_config([*base, "--metrics.log_freq", "9", "--job.dump_folder", "x"]))
    assert digest != trajectory_digest(parse_config([*base, "--debug.seed", "8"]))
    assert digest != trajectory_digest(parse_config([*base, "--optimizer.lr", "1e-3"]))
    job_config = parse_config(base)
    job_config.training.max_norm = 1  # as TOML may have it, where the command line says 1.0
    assert digest == trajectory_digest(job_config)


# Recipes of one's own.

RECIPE = """
title = "One"
question = "What?"
runs = ["base", "slow"]
yields = ["table1"]
[variants.slow]
of = "base"
overrides.optimizer.lr = 1e-4
scales.toy.training.max_norm = 0.25
"""
SCALE = """
description = "toy"
[overrides]
training.max_norm = 0.75
optimizer.beta1 = 0.8
[runs.base]
config = "{base}"
overrides.optimizer.beta1 = 0.7
"""


def own(folder: Path, workspace: Path, recipe: str = RECIPE, scale: str = SCALE) -> str:
    (folder / "scales").mkdir(exist_ok=True)
    (folder / "one.toml").write_text(recipe)
    (folder / "scales" / "toy.toml").write_text(scale.replace("{base}", str(workspace / "base.toml")))
    return str(folder / "one.toml")


def own_runs(path: str, out: Path, **arguments) -> list[Run]:
    recipe = read_recipe(path)
    return build_runs(recipe, read_scale("toy", recipe), recipe.seeds, out, **arguments)


def test_later_overrides_win(workspace: Path, tmp_path: Path) -> None:
    path = own(tmp_path, workspace)
    base, slow = own_runs(path, tmp_path)
    values = [
        (r.job_config.training.max_norm, r.job_config.optimizer.beta1, r.job_config.optimizer.lr) for r in (base, slow)
    ]
    assert values == [(0.75, 0.7, 3e-3), (0.25, 0.7, 1e-4)]
    (further,) = own_runs(path, tmp_path, only=["slow"], further=["--training.max_norm", "9"])
    assert further.job_config.training.max_norm == 9.0 == parse_config(further.arguments).training.max_norm
    assert further.digest != slow.digest and further.job_config.debug.seed == 42


def test_one_trajectory_has_one_folder(workspace: Path, tmp_path: Path) -> None:
    """Whatever a recipe calls it."""
    twin = RECIPE.replace("optimizer.lr = 1e-4", "metrics.log_freq = 7").replace("max_norm = 0.25", "max_norm = 0.75")
    path = own(tmp_path, workspace, twin)
    (base,) = own_runs(path, tmp_path)
    assert base.name == "base" and base.folder == tmp_path / "toy" / f"base-s42-{base.digest}"
    other = tmp_path / "toy" / f"another-s42-{base.digest}"
    other.mkdir(parents=True)
    (again,) = own_runs(path, tmp_path)
    assert again.folder == other and again.job_config.job.dump_folder == str(other)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("title =", "tilte =", ('has "tilte"', 'did you mean "title"?')),
        ('title = "One"', "", ("one.toml lacks title",)),
        ('title = "One"', "title = 1", ("title in", "is 1; it must be a text")),
        ('runs = ["base", "slow"]', 'runs = "base"', ("runs in", "'base'", "a list of names")),
        ('runs = ["base", "slow"]', "runs = []", ("runs in", "a list of names")),
        ('"slow"]', '"base"]', ("names something twice",)),
        ('"slow"]', '"slwo"]', ('runs has "slwo"', "toy.toml does not have", 'did you mean "slow"?')),
        ('"table1"', '"tabel1"', ('yields in', '"tabel1"', 'did you mean "table1"?')),
        ('of = "base"', 'of = "bass"', ('variant "slow" is of "bass"', 'did you mean "base"?')),
        ('of = "base"', "", ("variants.slow in", "lacks of")),
        ("overrides.optimizer", "override.optimizer", ("variants.slow in", 'did you mean "overrides"?')),
        ("[variants.slow]\nof", "[variants]\nslow = 3\n[x]\nof", ('"x"',)),
        ("scales.toy", "scales.toi", ('has scale "toi"', 'did you mean "toy"?')),
        ("overrides.optimizer.lr", "overrides.optimizer.lrr", ("run slow at scale toy", 'has optimizer.lrr', 'did you mean optimizer.lr?')),
        ("overrides.optimizer.lr", "overrides.optimiser.lr", ("run slow", "has optimiser", "did you mean optimizer?")),
        ("overrides.optimizer.lr = 1e-4", "overrides.debug = 3", ("run slow", "debug = 3", "must be a section")),
        ("overrides.optimizer.lr = 1e-4", 'overrides.optimizer.lr = "x"', ("run slow", "optimizer.lr is 'x'", "float")),
        ("overrides.optimizer.lr = 1e-4", "overrides.training.global_batch_size = -1", ("run slow", "global_batch_size is -1")),
        ("[variants.slow]", "[variants.slow", ("one.toml is not valid TOML",)),
        ('question = "What?"', 'question = "What?"\nseeds = ["x"]', ("seeds in", "whole numbers")),
        ('question = "What?"', 'question = "What?"\nseeds = []', ("seeds in", "whole numbers")),
        ('slow"', 'sl-ow"', ('runs has "sl-ow"',)),
    ],
)  # fmt: skip
def test_bad_recipes(workspace: Path, tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    assert old in RECIPE
    path = own(tmp_path, workspace, RECIPE.replace(old, new))
    with pytest.raises(ValueError) as error:
        own_runs(path, tmp_path)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value), error.value


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("description", "descripton", ('has "descripton"', 'did you mean "description"?')),
        ('config = "{base}"', "", ("runs.base in", "lacks config")),
        ('config = "{base}"', 'config = "no.toml"', ("run base at scale toy", "no.toml", "cannot be read")),
        ("[runs.base]", '[runs."a-b"]', ('"a-b"', "letters, digits and underscores")),
        ("training.max_norm", "trainng.max_norm", ("run base at scale toy", "has trainng", "did you mean training?")),
        ("[overrides]", "overrides = 3\n[a]", ('has "a"',)),
        ("[runs.base]", "[runs.base", ("toy.toml is not valid TOML",)),
    ],
)
def test_bad_scales(workspace: Path, tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    assert old in SCALE
    path = own(tmp_path, workspace, scale=SCALE.replace(old, new))
    with pytest.raises(ValueError) as error:
        own_runs(path, tmp_path)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value), error.value


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='no recipe "interacton"; give a file or one of data_rewind, freeze, inter'):
        read_recipe("interacton")
    recipe = read_recipe("interaction")
    assert read_recipe(str(RECIPES / "interaction.toml")) == recipe
    with pytest.raises(ValueError, match='no scale "qwen3_8" in .*; did you mean "qwen3_8b"'):
        read_scale("qwen3_8", recipe)
    with pytest.raises(ValueError, match='recipe interaction has no run "grow"; did you mean "grow_pre"'):
        build_runs(recipe, read_scale("tiny", recipe), (42,), tmp_path, only=["grow"])


def test_seeds() -> None:
    assert parse_seeds("42, 43,42") == (42, 43)
    for text in ("", "x", "42,", "1.5", "-3", "42;43"):
        with pytest.raises(ValueError, match="--seeds is .* whole numbers from 0 on, such as 42,43"):
            parse_seeds(text)
