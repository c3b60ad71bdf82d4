"""Run benchmarks and print their figures beside what they are held against.

    python -m tools.benchmarks                          all subjects
    python -m tools.benchmarks objective --json FILE    one of them, also as JSON rows

Each subject is a module here whose ``run()`` yields ``rows.Row``. Figures are medians over at least five repeats of what
ran in turn in one process or job. A figure that misses its bar is printed with "no", and the exit status stays 0: that is
a measurement, not a failure. Let nothing else run at the same time.
"""

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import blockgrow_titan.infra.device  # noqa: F401  (before torchtitan: see there)
from tools.benchmarks.rows import Row

SUBJECTS = (
    "end_to_end",
    "objective",
    "micro_batches",
    "overlap",
    "overhead",
    "growth",
    "data",
    "startup",
    "scaling",
)
ON_REQUEST = ("gpu_step",)
"""Subjects that run only when they are named: they need a CUDA GPU."""


def machine() -> str:
    """The machine, in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        model += f", {torch.cuda.get_device_name()}"
    return (
        f"{model}; {len(os.sched_getaffinity(0))} cores; torch {torch.__version__}; Python {platform.python_version()}"
    )


def table(rows: Sequence[Row]) -> str:
    """Rows as Markdown."""
    lines = ["| subject | figure | value | bar | holds |", "|---|---|---:|---|---|"]
    for row in rows:
        value = f"{row.value:,.4g} {row.unit}".strip() + (f" ({row.note})" if row.note else "")
        holds = {True: "yes", False: "no", None: ""}[row.holds]
        lines.append(f"| {row.subject} | {row.name} | {value} | {row.bar} | {holds} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description=(__doc__ or "").split("\n\n")[0])
    known = (*SUBJECTS, *ON_REQUEST)
    parser.add_argument(
        "subjects",
        metavar="SUBJECT",
        nargs="*",
        help=f"of {', '.join(known)} (default: all but {', '.join(ON_REQUEST)})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.subjects if name not in known]:
        parser.error(f"there is no subject {', '.join(unknown)}; known: {', '.join(known)}")
    print(f"{machine()}\n", flush=True)
    rows: list[Row] = []
    for subject in options.subjects or SUBJECTS:
        measured = []
        for row in importlib.import_module(f"tools.benchmarks.{subject}").run():
            measured.append(row)
            print(f"  {subject}: {row.name}: {row.value:.4g} {row.unit} {row.bar}", file=sys.stderr, flush=True)
        rows += measured
        if options.json:
            options.json.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1))
    print(table(rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
