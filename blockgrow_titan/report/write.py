"""From run folders to a report's folder, which appears whole and replaces nothing but an older report.

OUT/report.html, report.md, tables/*.csv and *.json, figures/*.png and *.svg
"""

import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from blockgrow_titan.report import curves, internals, losses, states
from blockgrow_titan.report.experiment import Experiment, make_experiment
from blockgrow_titan.report.page import TITLE, folder_name, markdown, page, runs_table
from blockgrow_titan.report.reading import find_runs, read_run
from blockgrow_titan.report.style import Drawn, styled
from blockgrow_titan.report.table import Table

MARKER = ".blockgrow_report"
TABLES = (
    losses.table1,
    losses.table2,
    losses.table3,
    internals.table4,
    losses.tableA2,
    losses.tableA3,
    internals.tableA4,
)
FIGURES = (
    curves.figure3a,
    curves.figure3b,
    states.figure4,
    states.figure5a,
    curves.figure5b,
    states.figureA1,
    states.figureA2,
)


def make_report(
    runs: Sequence[str | Path],
    out: str | Path,
    ids: Collection[str] | None = None,
    title: str = TITLE,
    lines: Sequence[str] = (),
) -> list[str]:
    """Read runs and write their report.

    Args:
        runs: Folders of runs, or folders that hold such.
        out: The report's folder: absent, empty or an older report, which it replaces.
        ids: The tables and figures of the paper's to show, such as "table1"; all by default.
        title: Of the page.
        lines: What to say under the title.

    Returns:
        A line for each run that is not in the tables, and why.

    Raises:
        ValueError: If there is no run to report, some cannot be compared, or ``out`` is anything else.
    """
    folders = find_runs(runs)
    path = check_output(Path(out), folders)
    experiment = make_experiment([read_run(folder) for folder in folders])
    tables = [table(experiment) for table in TABLES if ids is None or table.__name__ in ids]
    if any(key.variant for key in experiment.groups):
        tables.append(losses.variants(experiment))
    tables.append(runs_table(experiment))
    with styled():
        figures = [figure(experiment) for figure in FIGURES if ids is None or figure.__name__ in ids]
    write_report(path, experiment, tables, figures, title, lines)
    left_out = [(run, why) for run, why in experiment.others] + [(run, run.problem) for run in experiment.unusable]
    return [f"{folder_name(experiment, run)} is not in the tables: {why}" for run, why in left_out]


def check_output(out: Path, runs: Sequence[Path]) -> Path:
    """The real path of a report's folder.

    Raises:
        ValueError: If something else is there, or runs are in it.
    """
    path = Path(os.path.realpath(out.expanduser()))
    if path.exists() and not path.is_dir():
        raise ValueError(f"the report's folder {out} is a file: give a folder")
    if path.is_dir() and any(path.iterdir()) and not (path / MARKER).is_file():
        raise ValueError(
            f"the report's folder {out} exists and is not a report that this tool wrote: give a new folder, or remove it"
        )
    inside = next((run for run in runs if path == run or path in run.parents), None)
    if inside:
        raise ValueError(
            f"the report's folder {out} holds the run {inside}, which it would replace: give a folder elsewhere"
        )
    if path == Path.cwd() or path in Path.cwd().parents:
        raise ValueError(f"the report's folder {out} is the current folder or above it: give a folder in it")
    return path


def write_report(
    out: Path,
    experiment: Experiment,
    tables: Sequence[Table],
    figures: Sequence[Drawn],
    title: str,
    lines: Sequence[str],
) -> None:
    """Write all files beside ``out``, then put them there."""
    files: dict[str, bytes] = {MARKER: b"A report of blockgrow_titan. The next one replaces this folder as a whole.\n"}
    files["report.md"] = markdown(experiment, tables, figures, title, lines).encode()
    files["report.html"] = page(experiment, tables, figures, title, lines).encode()
    for table in tables:
        files |= {f"tables/{table.id}.csv": table.csv().encode(), f"tables/{table.id}.json": table.json().encode()}
    for figure in figures:
        if figure.png:
            files |= {f"figures/{figure.id}.png": figure.png, f"figures/{figure.id}.svg": figure.svg}
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        new, old = work / "new", work / "old"
        for name, content in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(content)
        if out.exists():
            os.rename(out, old)
        try:
            os.rename(new, out)
        except BaseException:
            if old.exists() and not out.exists():
                os.rename(old, out)
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
