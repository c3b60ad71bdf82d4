"""A recipe of two toy runs and a stand-in for `run_train.sh` that writes a job's files at once, for `test_run_recipe.py`."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from blockgrow_titan.growth.manifest import FORMAT, trajectory_config
from blockgrow_titan.growth.schedule import schedule_of
from tools.recipe_runs import Run, build_runs
from tools.recipes import read_recipe, read_scale
from tools.run_recipe import main

RECIPE = """
title = "Two placements"
question = "Which?"
runs = ["grow_pre", "grow_post"]
yields = ["table1", "figure3a"]
"""
SCALE = """
description = "toy"
[runs.grow_pre]
config = "{base}"
overrides.block_stack.placement = "pre"
[runs.grow_post]
config = "{base}"
"""  # base: phases of 3 steps with 1 and 2 blocks

# The job: resumes from its newest checkpoint, trains with a checkpoint at every second step, does what `<run>.plan` says
# ("fail 3": exits at step 3; "stop 5 SIGINT": signals the runner at step 5 and waits for the answer; "nothing").
JOB = """
import json, os, re, signal, sys, time
from pathlib import Path
plans = Path(__file__).parent
folder = Path(sys.argv[sys.argv.index("--job.dump_folder") + 1])
given = json.loads((plans / f"{folder.name}.json").read_text())
plan_file = plans / f"{re.sub('-.*', '', folder.name)}.plan"
plan = plan_file.read_text().split() if plan_file.exists() else ["train", "0"]
with open(plans / "launches", "a") as file:
    file.write(f"{folder.name} {' '.join(sys.argv[1:])}\\n")
print("+ the command", flush=True)
if plan == ["nothing"]:
    sys.exit(0)

def answer(number, frame):
    with open(plans / "signals", "a") as file:
        file.write(f"{signal.Signals(number).name}\\n")
    print("Stopped. The same command goes on", flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGINT, answer)
signal.signal(signal.SIGTERM, answer)

checkpoints = folder / "checkpoint"
done = max([int(path.name[5:]) for path in checkpoints.glob("step-*")], default=0)
events = folder / "metrics.jsonl"
lines = events.read_text().splitlines(True) if events.exists() else []
(folder / "metrics.tmp").write_text("".join(line for line in lines if json.loads(line)["step"] <= done))
os.replace(folder / "metrics.tmp", events)
ce = 0.0
for phase in given["phases"]:
    for step in range(max(phase["first_step"], done + 1), phase["last_step"] + 1):
        if plan[0] == "fail" and step == int(plan[1]):
            print("[rank0]:ValueError: what went wrong: 3", flush=True)
            print("=" * 60, flush=True)
            sys.exit(1)
        ce = given["seed"] / 10 + step / 100
        line = {"event": "train", "step": step, "phase": phase["index"], "active_layers": phase["active_blocks"], "ce": ce}
        with open(events, "a") as file:
            file.write(json.dumps(line) + "\\n")
        if step % 2 == 0:
            (checkpoints / f"step-{step}").mkdir(parents=True)
            (checkpoints / f"step-{step}" / "manifest.json").write_text(json.dumps(given["manifest"]))
            (checkpoints / f"step-{step}" / ".metadata").touch()
        if plan[0] == "stop" and step == int(plan[1]):
            os.kill(os.getppid(), getattr(signal, plan[2]))
            time.sleep(60)
rows = [{"steps": p["last_step"] - p["first_step"] + 1, "active_layers": p["active_blocks"], "ce": ce} for p in given["phases"]]
(folder / "summary.json").write_text(json.dumps({"phases": rows, "manifest": given["manifest"]}))
"""


class Bench:
    """A recipe of two runs in an empty folder, and the stand-in."""

    def __init__(self, folder: Path, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.recipe, self.out = folder / "two.toml", folder / "out"
        self.recipe.write_text(RECIPE)
        (folder / "scales").mkdir()
        (folder / "scales" / "toy.toml").write_text(SCALE.replace("{base}", str(workspace / "base.toml")))
        self.job = folder / "job.py"
        self.job.write_text(JOB)
        self.launcher = shlex.join([sys.executable, "-S", "-E", str(self.job)])

    def runs(self, *seeds: int, further: tuple[str, ...] = ()) -> list[Run]:
        """The runs of these seeds; the stand-in learns what it has to write."""
        recipe = read_recipe(str(self.recipe))
        runs = build_runs(recipe, read_scale("toy", recipe), seeds or (42,), self.out, further=further)
        for run in runs:
            phases = [vars(phase) for phase in schedule_of(run.job_config).phases]
            manifest = {"format": FORMAT, "config": trajectory_config(run.job_config), "phases": phases}
            given = {"phases": phases, "manifest": manifest, "seed": run.seed}
            (self.folder / f"{run.folder.name}.json").write_text(json.dumps(given))
        return runs

    def plan(self, run: str, text: str = "") -> None:
        path = self.folder / f"{run}.plan"
        path.write_text(text) if text else path.unlink()

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of the command."""
        before, _, after = " ".join(arguments).partition(" -- ")
        options = ["--scale", "toy", "--out", str(self.out), "--launcher", self.launcher, *before.split()]
        status = main([str(self.recipe), *options, *(["--", *after.split()] if after else [])])
        return status, *self.capsys.readouterr()

    @property
    def launches(self) -> list[str]:
        """Run and seed of each launch."""
        path = self.folder / "launches"
        names = [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []
        return [name.rpartition("-")[0] for name in names]
