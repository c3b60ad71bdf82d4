#!/usr/bin/env python3
"""Make a report of finished runs: the paper's tables and figures from them, beside the paper's values.

    tools/report.py outputs/recipes/tiny -o outputs/report

RUNS are folders of runs (job.dump_folder), or folders that hold such. What a run is (placement, joint, grow or freeze, its
budget and seed) is read from its manifest, whatever its folder is called. OUT gets report.html (one file, figures in it),
report.md, every table as CSV and JSON, every figure as PNG and SVG; an older report there is replaced, anything else
refused. The same runs give the same bytes.

Runs that are unfinished or broken are named and left out of the tables, and what a table lacks is shown as "-" with the
command that would run it. Runs that cannot be compared (another teacher, learning rate, sequence length ...) are refused.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout's package, however the file is run
from tools.environment import enter  # noqa: E402

if __name__ == "__main__":
    enter(__file__)

import argparse  # noqa: E402
from collections.abc import Sequence  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    """The command line; imports nothing large."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tools/report.py", description=__doc__, formatter_class=raw)
    parser.add_argument("runs", metavar="RUNS", nargs="+", help="folders of runs, or folders that hold such")
    parser.add_argument("-o", "--out", required=True, metavar="OUT", help="the report's folder")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the report; returns the exit status: 2 if there is nothing to report, or what there is cannot be compared."""
    options = make_parser().parse_args(arguments)
    try:
        from blockgrow_titan.report.write import make_report

        left_out = make_report(options.runs, options.out)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: nothing half-written remains", file=sys.stderr)
        return 130
    for line in left_out:
        print(f"note: {line}", file=sys.stderr)
    print(f"wrote {Path(options.out) / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
