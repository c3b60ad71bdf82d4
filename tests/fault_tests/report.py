"""What the fault tests have tried and what was lost: rows that tests add, shown as tables at the end of the session.

A test takes the fixture ``fault_report`` and adds a row for every fault that it has tried:

    fault_report.fault("SIGKILL in a step", where="2 students, 1 teacher", lost=[], seconds=0.4)

and, for anything else that was measured, lines of named tables:

    fault_report.line("Determinism", what="2 students for 1", losses="4.8e-07", weights="1.9e-06")

The terminal summary has the tables as Markdown. With the environment variable ``BLOCKGROW_FAULT_REPORT``, the name of a
file without its ending, they are also written there: NAME.md and NAME.json.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "BLOCKGROW_FAULT_REPORT"


@dataclass
class FaultReport:
    """Faults that were tried, and further tables."""

    faults: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def fault(self, fault: str, *, where: str, lost: Sequence[str] = (), seconds: float | None = None) -> None:
        """A fault that was tried once.

        Args:
            fault: What was done, and when; the same text for the same fault.
            where: The job it was done to.
            lost: What the run had lost, doubled or left behind at its end; nothing if empty.
            seconds: From the fault to the end of the job's last process; None if that says nothing.
        """
        self.faults.append({"fault": fault, "where": where, "lost": list(lost), "seconds": seconds})

    def line(self, table: str, **cells: Any) -> None:
        """A line of a table of the given name; its columns are those of its first line."""
        self.tables.setdefault(table, []).append(cells)

    def extend(self, other: "FaultReport") -> None:
        """Add the rows of another report."""
        self.faults += other.faults
        for name, rows in other.tables.items():
            self.tables.setdefault(name, []).extend(rows)

    def summary(self) -> list[dict[str, Any]]:
        """One row for each fault: how many times it was tried, in how many jobs, what was lost, and the slowest end."""
        rows = []
        for fault in dict.fromkeys(row["fault"] for row in self.faults):
            tried = [row for row in self.faults if row["fault"] == fault]
            seconds = [row["seconds"] for row in tried if row["seconds"] is not None]
            lost = list(dict.fromkeys(text for row in tried for text in row["lost"]))
            rows.append(
                {
                    "fault": fault,
                    "times": len(tried),
                    "kinds of job": len({row["where"] for row in tried}),
                    "lost": "; ".join(lost) or "nothing",
                    "job ended after, at most": f"{max(seconds):.1f} s" if seconds else "-",
                }
            )
        return rows

    def markdown(self) -> str:
        """All tables."""
        tables = ({"Faults": self.summary()} if self.faults else {}) | self.tables
        return "\n\n".join(f"### {name}\n\n{_table(rows)}" for name, rows in tables.items())

    def write(self) -> None:
        """Write NAME.md and NAME.json if the environment names them."""
        if (name := os.environ.get(VARIABLE)) and (self.faults or self.tables):
            Path(f"{name}.md").write_text(f"{self.markdown()}\n")
            Path(f"{name}.json").write_text(json.dumps({"faults": self.faults, "tables": self.tables}, indent=1))


def _table(rows: Sequence[dict[str, Any]]) -> str:
    columns = list(rows[0])
    cells = [columns, *([str(row.get(column, "")).replace("|", "/") for column in columns] for row in rows)]
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([lines[0], f"|{'---|' * len(columns)}", *lines[1:]])
