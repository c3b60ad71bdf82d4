"""A table of a report and its forms: CSV and JSON in full precision, Markdown and HTML to read."""

import csv
import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any


@dataclass(frozen=True)
class Stat:
    """A value over seeds."""

    mean: float
    std: float | None
    """Sample standard deviation (over n - 1); None for one seed."""
    seeds: tuple[int, ...]


def stat(values: Mapping[int, float | None]) -> Stat | None:
    """Mean and standard deviation of values by seed; None if there is none, or one is not defined."""
    numbers = [value for value in values.values() if value is not None and math.isfinite(value)]
    if not numbers or len(numbers) < len(values):
        return None
    return Stat(fmean(numbers), stdev(numbers) if len(numbers) > 1 else None, tuple(values))


def seeds_words(seeds: Sequence[int]) -> str:
    """``one seed (42)``, or ``mean ± standard deviation over 2 seeds (42, 43)``."""
    if len(seeds) == 1:
        return f"one seed ({seeds[0]})"
    return f"mean ± standard deviation over {len(seeds)} seeds ({', '.join(map(str, seeds))})"


@dataclass(frozen=True)
class Column:
    """A column; with ``paper``, one of the paper's values stands beside it (in a row under the key ``<key>_paper``).

    Only such a column may hold a ``Stat``.
    """

    key: str
    heading: str
    form: str = ""
    """Format of its numbers; empty for text."""
    paper: bool = False
    exact: bool = False
    """Whether its numbers are the same for every seed."""


@dataclass(frozen=True)
class Table:
    """Rows of text, numbers, ``Stat`` or None (shown as a dash) by column key; a row with "signed" shows plus signs."""

    id: str
    title: str
    columns: tuple[Column, ...]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """A line for each run that would fill a dash."""

    def cells(self) -> list[list[str]]:
        """Heading and rows as they are read. A column of the paper's that is empty is left out."""
        shown = [(column, column.key, column.heading) for column in self.columns]
        for i, column in reversed([*enumerate(self.columns)]):
            key = f"{column.key}_paper"
            if column.paper and any(row.get(key) is not None for row in self.rows):
                shown.insert(i + 1, (column, key, f"{column.heading}, paper"))
        lines = [[heading for _, _, heading in shown]]
        for row in self.rows:
            sign = "+" if row.get("signed") else ""
            lines.append([_shown(row.get(key), column.form, sign) for column, key, _ in shown])
        return lines

    def _numeric(self) -> list[bool]:
        """Of each shown column, whether it has numbers."""
        forms = {column.heading: bool(column.form) for column in self.columns}
        return [forms.get(heading, True) for heading in self.cells()[0]]

    def plain(self) -> list[dict[str, Any]]:
        """The rows as numbers and texts: a ``Stat`` becomes ``<key>``, ``<key>_std`` and ``<key>_seeds``."""
        result = []
        for row in self.rows:
            flat: dict[str, Any] = {}
            for column in self.columns:
                value = row.get(column.key)
                flat[column.key] = value.mean if isinstance(value, Stat) else value
                if column.paper and not column.exact:
                    flat[f"{column.key}_std"] = value.std if isinstance(value, Stat) else None
                    flat[f"{column.key}_seeds"] = len(value.seeds) if isinstance(value, Stat) else None
                if column.paper:
                    flat[f"{column.key}_paper"] = row.get(f"{column.key}_paper")
            result.append(flat)
        return result

    def csv(self) -> str:
        rows = self.plain()
        stream = io.StringIO()
        writer = csv.DictWriter(stream, [*rows[0]] if rows else [c.key for c in self.columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return stream.getvalue()

    def json(self) -> str:
        columns = {column.key: column.heading for column in self.columns}
        values = {"id": self.id, "title": self.title, "columns": columns, "rows": self.plain()}
        return json.dumps(values | {"notes": self.notes, "missing": self.missing}, indent=1, ensure_ascii=False) + "\n"

    def markdown(self) -> str:
        lines = [[cell.replace("|", "\\|") for cell in line] for line in self.cells()]
        rule = ["---:" if number else "---" for number in self._numeric()]
        return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])

    def html(self) -> str:
        heading, *rows = self.cells()
        classes = [
            "" if number and not name.endswith(", paper") else " class=paper" if number else " class=text"
            for name, number in zip(heading, self._numeric(), strict=True)
        ]
        head = "".join(f"<th scope=col{of}>{html.escape(cell)}</th>" for cell, of in zip(heading, classes, strict=True))
        body = "\n".join(
            "<tr>"
            + "".join(f"<td{of}>{html.escape(cell)}</td>" for cell, of in zip(row, classes, strict=True))
            + "</tr>"
            for row in rows
        )
        return (
            f'<div class=scroll tabindex=0 role=region aria-label="{html.escape(self.title, quote=True)}">'
            f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
        )


def _shown(value: Any, form: str, sign: str) -> str:
    if value is None or value == "":
        return "-"
    if form and sign:
        form = sign + form.lstrip("+")
    if isinstance(value, Stat):
        spread = "" if value.std is None else f" ± {format(value.std, form.lstrip('+'))}"
        return format(value.mean, form) + spread
    return value if isinstance(value, str) else format(value, form)
