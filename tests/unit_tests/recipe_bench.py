"""A recipe of two toy runs and a stand-in for `run_train.sh` that writes a job's files at once, for `test_run_recipe.py`."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from blockgrow_titan.growth.manifest import trajectory_config
from tests.unit_tests.report_runs import manifest_of, phase_events
from tools.recipe_runs import Run, build_runs
from tools.recipes import read_recipe, read_scale
from tools.run_recipe import main

RECIPE = """
title = "Two placements"
question = "Which?"
runs = ["grow_pre", "grow_post"]
yields = ["table1"]
"""
SCALE = """
description = "toy"
[overrides]
block_stack.num_blocks = 2
[runs.grow_pre]
config = "{base}"
overrides.block_stack.placement = "pre"
[runs.grow_post]
config = "{base}"
"""  # base: phases of 3 steps with 1 and 2 blocks

# The job: resumes from its newest checkpoint, writes the lines that it is given with a checkpoint at every second step, does
# what `<run>.plan` says ("fail 3": exits at step 3; "stop 5 SIGINT": signals the runner at step 5 and waits for the answer;
# "nothing").
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
before = events.read_text().splitlines(True) if events.exists() and done else []
before = [line for line in before if json.loads(line)["step"] <= done]
(folder / "metrics.tmp").write_text("".join(before))
os.replace(folder / "metrics.tmp", events)
for line in given["lines"][len(before):]:
    step, trained = line["step"], line["event"] == "train"
    if plan[0] == "fail" and trained and step == int(plan[1]):
        print("[rank0]:ValueError: what went wrong: 3", flush=True)
        print("=" * 60, flush=True)
        sys.exit(1)
    with open(events, "a") as file:
        file.write(json.dumps(line) + "\\n")
    if trained and step % 2 == 0:
        (checkpoints / f"step-{step}").mkdir(parents=True)
        (checkpoints / f"step-{step}" / "manifest.json").write_text(json.dumps(given["summary"]["manifest"]))
        (checkpoints / f"step-{step}" / ".metadata").touch()
    if plan[0] == "stop" and trained and step == int(plan[1]):
        os.kill(os.getppid(), getattr(signal, plan[2]))
        time.sleep(60)
(folder / "summary.json").write_text(json.dumps(given["summary"]))
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
            config, schedule = run.job_config, run.schedule
            batch, layers = config.training.global_batch_size, config.block_stack.layers_per_block
            lines, rows = [], []
            for phase in schedule.phases:  # the ce tells seed and step
                ce = run.seed / 10 + phase.last_step / 100
                events, row = phase_events(phase, ce, lambda step: 3.0 + 4.0 / step, layers, batch)
                lines += events
                rows.append(row)
            manifest = manifest_of(trajectory_config(config), schedule.phases, schedule.total_steps * batch)
            given = {"lines": lines, "summary": {"phases": rows, "manifest": manifest}}
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
