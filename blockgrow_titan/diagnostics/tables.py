"""Records of several students side by side, as lines for the console: one column each, one row a number."""

from collections.abc import Sequence
from typing import Any

from blockgrow_titan.metrics import plural

_QUANTILES = {"0.5": "median", "0.99": "99 %", "1": "largest"}


def describe(record: dict[str, Any]) -> str:
    """What a column holds."""
    step = f"step {record['step']}" if record["step"] is not None else "unknown step"
    placement, blocks = record["placement"], plural(record["blocks"], "block")
    return f"{record['checkpoint']}: {placement}, {blocks}, {step}, phase {record['phase']}"


def comparison(records: Sequence[dict[str, Any]]) -> list[str]:
    """The table. Students of fewer blocks have a dash where the others have numbers; so has what is not defined."""
    columns = [_groups(record) for record in records]
    names = [chr(ord("A") + i) if i < 26 else str(i) for i in range(len(records))]
    rows: list[list[str]] = [["", *names]]
    for group in columns[0]:
        longest = max((column[group] for column in columns), key=len)
        if len(longest) > 1 or "" not in longest:
            rows.append([group])
        for row in longest:
            label = f"  {row}" if row else group
            rows.append([label, *(column[group].get(row, "-") for column in columns)])
    labels = max(len(row[0]) for row in rows if len(row) > 1)
    width = max(len(cell) for row in rows for cell in row[1:])
    table = ["  ".join([row[0].ljust(labels), *(cell.rjust(width) for cell in row[1:])]).rstrip() for row in rows]
    batch = records[0]
    return [
        *(f"{name}  {describe(record)}" for name, record in zip(names, records, strict=True)),
        f"on {plural(batch['documents'], 'document')}, {batch['tokens']:,} tokens, {batch['predictions']:,} predictions",
        "",
        *table,
    ]


def _groups(record: dict[str, Any]) -> dict[str, dict[str, str]]:
    """group -> row -> number; a group of one row without a name is a row of its own."""
    boundaries, removal = record["boundaries"], record["removal"]
    places = ["after the entry", *(f"after block {k}" for k in range(record["blocks"]))]
    blocks = [f"block {k}" for k in range(record["blocks"])]

    def rows(labels: list[str], values: list[float | None], form: str) -> dict[str, str]:
        return {
            label: "-" if value is None else format(value, form) for label, value in zip(labels, values, strict=True)
        }

    groups = {"cross-entropy": rows([""], [record["ce"]], ".4f")}
    for name, title in (("mean", "mean"), ("std", "standard deviation"), ("kurtosis", "excess kurtosis")):
        groups[f"residual RMS, {title}"] = rows(places, [boundary[name] for boundary in boundaries], ".4g")
    for name, title in _QUANTILES.items():
        groups[f"residual RMS, {title}"] = rows(places, [b["quantiles"][name] for b in boundaries], ".4g")
    for name, kind in record["token_types"].items():
        title = plural(kind["tokens"], f"{name.replace('_', ' ')} token")
        groups[f"mean RMS of {title}"] = rows(places, kind["rms"], ".4g")
    groups["whole-block removal, change of cross-entropy"] = rows(blocks, [r["delta_ce"] for r in removal], "+.4f")
    groups["angular distance of a block's input and output"] = rows(
        blocks, [r["angular_distance"] for r in removal], ".4f"
    )
    groups["logit lens, cross-entropy"] = rows(places, record["logit_lens"], ".4f")
    return groups
