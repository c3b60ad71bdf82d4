#!/usr/bin/env python3
"""Run the jobs of a recipe: what is not complete, one after the other; what was interrupted goes on.

    tools/run_recipe.py interaction --scale tiny --seeds 42,43,44
    tools/run_recipe.py recipes/joint_budget.toml --scale qwen3_8b --dry-run
    tools/run_recipe.py freeze --only freeze_post -- --metrics.log_freq 1

read the recipe (``tools/recipes.py``) -> state of every run's folder -> check every config -> launch, watch, next ->
report.

Each job goes through ``run_train.sh``, with NGPU from the environment, into a folder of its own that also holds its
console (``console.log``) and what it is (``run.json``). A folder that was written by another config is refused before
anything starts. A failed run does not stop the others. Ctrl-C ends the running job; the same command goes on.

At the end the tables and figures that the recipe yields are made of its runs (and of no other that may be there), those
that are not complete named in it: ``<out>/<scale>/reports/<recipe>``, with --only ``<recipe>-part``.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout's package, however the file is run
from tools.environment import enter  # noqa: E402

if __name__ == "__main__":
    enter(__file__)

import argparse  # noqa: E402
import copy  # noqa: E402
import logging  # noqa: E402
import shlex  # noqa: E402
import shutil  # noqa: E402
from collections.abc import Sequence  # noqa: E402

from blockgrow_titan.infra import device  # noqa: E402, F401  (before torchtitan: see there)

from torchtitan.tools.logging import logger  # noqa: E402  # isort: skip

from blockgrow_titan.checks import check_config  # noqa: E402
from blockgrow_titan.metrics import duration, plural  # noqa: E402
from blockgrow_titan.report.reading import is_run  # noqa: E402
from blockgrow_titan.report.write import check_output, make_report  # noqa: E402
from tools.launching import Console, Runner, State, Stop, measured_pace, state_of, work_left  # noqa: E402
from tools.recipe_runs import Run, build_runs  # noqa: E402
from tools.recipes import Recipe, Scale, check_seeds, read_recipe, read_scale, recipe_names  # noqa: E402

CONFIG_ERROR_STATUS = 2
FAILED_STATUS = 1
REPORTS = "reports"
REPORT_FILE = "report.html"
OWN_FIELDS = ("job.config_file", "job.dump_folder", "debug.seed")


class _Notes(logging.Handler):
    """Warnings of the checks, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if (text := record.getMessage()) not in self.seen:
            self.seen.add(text)
            print(f"note: {text}", file=sys.stderr)


def check_runs(runs: Sequence[Run], dry: bool) -> None:
    """Check the config of every run as its job will, so that a mistake shows before the first one starts.

    Args:
        runs: The runs to check.
        dry: Absent documents, teachers and tokenizers are notes.

    Raises:
        ValueError: Naming the run and what is wrong.
    """
    notes, handlers = _Notes(), logger.handlers
    logger.handlers = [notes]
    try:
        for run in runs:
            job_config = copy.deepcopy(run.job_config)
            if dry:
                job_config.comm.mode = "fake_backend"
            try:
                check_config(job_config, needs_tokenizer=not dry)
            except (ValueError, NotImplementedError) as error:
                raise ValueError(f"run {run.name} at scale {run.scale}: {error}") from None
    finally:
        logger.handlers = handlers


def parse_seeds(text: str) -> tuple[int, ...]:
    """``42,43`` -> (42, 43).

    Raises:
        ValueError: For what are no whole numbers.
    """
    parts = [part.strip() for part in text.split(",")]
    return check_seeds([int(part) if part.isdecimal() else part for part in parts], "--seeds")


def report_folder(folder: Path, recipe: Recipe, only: Sequence[str]) -> Path:
    """Where the report goes, in the scale's folder; one of some runs alone does not replace that of all."""
    return folder / REPORTS / (recipe.name + ("-part" if only else ""))


def heading(recipe: Recipe, scale: Scale, runs: Sequence[Run], states: Sequence[State], report: Path) -> list[str]:
    done = sum(state.complete for state in states)
    return [
        f"{recipe.title} ({recipe.name}), at scale {scale.name}: {scale.description}",
        f"{plural(len(runs), 'run')}, {done} complete; seeds: {', '.join(map(str, dict.fromkeys(r.seed for r in runs)))}; "
        f"for {', '.join(recipe.yields)}",
        f"report: {report / REPORT_FILE}",
    ]


def plan_lines(runs: Sequence[Run], states: Sequence[State], launcher: Sequence[str], pace: float | None) -> list[str]:
    """What ``--dry-run`` prints: state, budget, time and command of each run, and the time of all."""
    lines, total = [], 0.0
    ranks = f"NGPU={os.environ['NGPU']} " if os.environ.get("NGPU") else ""
    for run, state in zip(runs, states, strict=True):
        seconds = work_left(run, state) * (pace or 0.0)
        total += seconds
        training, shard = run.job_config.training, run.job_config.documents.shard_documents
        lines += [
            "",
            f"{run}: {state.words}",
            f"  {training.steps:,} steps, {training.steps * training.global_batch_size:,} documents"
            + (f" of a shard of {shard:,}" if shard > 0 else "")
            + f", {run.active_layer_steps():,} active-layer steps"
            + (f"; about {duration(seconds)} to go" if seconds else ""),
            f"  {ranks}{shlex.join([*launcher, *run.arguments])}",
        ]
    todo = sum(not state.complete for state in states)
    time = "no time to go by: no run of this scale is complete" if pace is None else f"about {duration(total)}"
    return [*lines, "", f"To do: {plural(todo, 'run')}" + (f", {time}" if todo else "")]


def closing_lines(runs: Sequence[Run], folder: Path) -> list[str]:
    """A table of the runs' cross-entropy in the validation at the last step, and where they are."""
    rows = [("run", "seed", "ce", "folder")]
    for run in runs:
        state = state_of(run)
        ce = "-" if state.ce is None else f"{state.ce:.4f}"
        rows.append((run.name, str(run.seed), ce if state.complete else state.words, run.folder.name))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [
        "",
        "Validation cross-entropy at the last step",
        *(f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c.rjust(widths[2])}  {d}" for a, b, c, d in rows),
        f"The folders are in {folder}.",
    ]


def report_runs(recipe: Recipe, scale: Scale, runs: Sequence[Run], report: Path, again: str) -> bool:
    """Make the report of these runs and say where it is; returns whether there is one."""
    lines = [recipe.question, f"Recipe {recipe.name}, scale {scale.name}: {scale.description}."]
    states = [(run, state_of(run)) for run in runs]
    if left := [f"{run} ({state.words})" for run, state in states if not state.complete]:
        lines.append(f"Not complete: {', '.join(left)}. To go on: {again}")
    try:
        folders = [run.folder for run in runs if is_run(run.folder)]
        left_out = make_report(folders, report, recipe.yields, recipe.title, lines)
    except (ValueError, OSError) as error:
        print(f"No report: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return False
    for line in left_out:
        print(f"note: {line}", file=sys.stderr)
    print(f"Tables and figures: {report / REPORT_FILE}", flush=True)
    return True


def run_all(runs: Sequence[Run], launcher: Sequence[str], folder: Path, again: str) -> int:
    """Launch what is not complete, then print the table; returns the exit status."""
    with Stop() as stop:
        runner = Runner(runs, launcher, folder, Console(sys.stdout), stop)
        failures = runner.run()
        if stop.signal:
            print(f"Stopped by {stop.signal.name}. To go on: {again}", file=sys.stderr, flush=True)
            return 128 + stop.signal
    print("\n".join(closing_lines(runs, folder)), flush=True)
    if failures:
        print(f"{plural(len(failures), 'run')} of {len(runs)} failed: {'; '.join(failures)}", file=sys.stderr)
        print(f"To try again: {again}", file=sys.stderr, flush=True)
    return FAILED_STATUS if failures else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/run_recipe.py",
        usage="%(prog)s RECIPE [--scale SCALE] [--only RUN ...] [--seeds 42,43] [--out DIR] [--dry-run] [-- OPTION ...]",
        description="Run the jobs of a recipe that are not complete, one after the other; resume what was interrupted; make "
        "its tables and figures.",
        epilog="What follows -- overrides fields of every run's config, for example -- --teacher.path DIR. NGPU is the number "
        "of ranks, as for run_train.sh.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help=f"a file, or one of {', '.join(recipe_names())}")
    parser.add_argument(
        "--scale", default="tiny", help="a file of recipes/scales, without .toml (default: %(default)s)"
    )
    parser.add_argument("--only", metavar="RUN", nargs="+", default=[], help="these runs of the recipe")
    parser.add_argument("--seeds", help="one or more, as 42,43 (default: the recipe's)")
    parser.add_argument("--out", type=Path, default=Path("outputs/recipes"), help="default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="check every config; print commands, budgets and times")
    parser.add_argument(
        "--launcher",
        default=shlex.quote(os.path.relpath(ROOT / "run_train.sh")),
        help="what starts a job: a command that takes run_train.sh's arguments, returns when the job has ended, and ends it "
        "on SIGINT (default: run_train.sh)",
    )
    return parser


def run_recipe(options: argparse.Namespace, further: Sequence[str], again: str) -> int:
    """Do what the command line asks; returns the exit status.

    Raises:
        ValueError: For a mistake in the command line, the recipe or a run's config.
    """
    launcher = shlex.split(options.launcher)
    if launcher and os.path.isfile(launcher[0]) and os.sep not in launcher[0]:
        launcher[0] = os.path.join(os.curdir, launcher[0])
    if not launcher or not shutil.which(launcher[0]):
        raise ValueError(f'--launcher is "{options.launcher}", which is no program that can be started')
    for argument in further:
        if (name := argument.partition("=")[0].removeprefix("--").replace("-", "_")) in OWN_FIELDS:
            raise ValueError(f"--{name} after -- cannot be set: each run has its own")
    recipe = read_recipe(options.recipe)
    scale = read_scale(options.scale, recipe)
    seeds = recipe.seeds if options.seeds is None else parse_seeds(options.seeds)
    runs = build_runs(recipe, scale, seeds, options.out, options.only, further)
    states = [state_of(run) for run in runs]
    folder = options.out / scale.name
    report = report_folder(folder, recipe, options.only)
    check_output(report, [])
    print("\n".join(heading(recipe, scale, runs, states, report)), flush=True)
    check_runs([run for run, state in zip(runs, states, strict=True) if not state.complete], options.dry_run)
    if options.dry_run:
        print("\n".join(plan_lines(runs, states, launcher, measured_pace(folder))), flush=True)
    if refused := [f"{run}: {state.refused}" for run, state in zip(runs, states, strict=True) if state.refused]:
        raise ValueError("mixed results: " + "; ".join(refused))
    if options.dry_run:
        return 0
    status = run_all(runs, launcher, folder, again)
    if status not in (0, FAILED_STATUS):  # stopped
        return status
    return status if report_runs(recipe, scale, runs, report, again) else FAILED_STATUS


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = make_parser().parse_args(arguments[:split])
    try:
        again = shlex.join(["tools/run_recipe.py", *arguments])
        return run_recipe(options, arguments[split + 1 :], again)
    except ValueError as error:
        print(f"Config error: {' '.join(str(error).split())}", file=sys.stderr)
        return CONFIG_ERROR_STATUS
    except KeyboardInterrupt:  # before the first job, or in the report
        return 130


if __name__ == "__main__":
    sys.exit(main())
