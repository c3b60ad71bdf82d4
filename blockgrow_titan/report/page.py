"""report.md and report.html: the same text, tables and figures; the page needs no other file and no network."""

import base64
import html
from collections.abc import Sequence
from typing import Any

from blockgrow_titan.metrics import plural
from blockgrow_titan.report import paper
from blockgrow_titan.report.experiment import Experiment, Key, kind_of
from blockgrow_titan.report.reading import Run
from blockgrow_titan.report.style import Drawn
from blockgrow_titan.report.table import Column, Table

TITLE = "Norm placement under depth growing"
STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #ffffff; --faint: #5c5c5c; --line: #d0d0d0; --band: #f4f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --page: #16181c; --faint: #a6a6a6; --line: #3c4047; --band: #20242a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 68rem; color: var(--text); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; line-height: 1.3; margin: 2rem 0 .5rem; }
p, li { margin: .4rem 0; } .note, .missing { font-size: .875rem; color: var(--faint); }
.scroll { overflow-x: auto; max-width: 100%; border: 1px solid var(--line); border-radius: 4px; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th.text, td.text { text-align: left; } td.text { white-space: normal; min-width: 7rem; } td:first-child { white-space: nowrap; }
thead th { background: var(--band); } tbody tr:last-child td { border-bottom: 0; } .paper { color: var(--faint); }
figure { margin: 0; } figure .scroll { background: #ffffff; } img { display: block; width: 100%; min-width: 34rem; height: auto; }
code { font-size: .85em; } a { color: inherit; } nav { font-size: .875rem; line-height: 1.9; }
"""


def scale_lines(experiment: Experiment) -> list[str]:
    """What the runs are, beside what the paper's are."""
    config, run = experiment.any.config, experiment.any
    model, layers, batch = run.manifest["model"], experiment.layers_per_block, config["training.global_batch_size"]
    tokens = {
        kind: sum(event["valid_tokens"] for event in next(iter(runs.values())).train[: experiment.phase_steps])
        for (kind, _, variant), runs in experiment.groups.items()
        if not variant
    }
    first = sorted(set(tokens.values()))
    per_phase = " or ".join(f"{value:,}" for value in first) or "unknown"
    validation = run.validations[-1]
    seeds = sorted({each.seed for each in experiment.runs})
    commits = sorted({str(each.manifest.get("commit", "unknown")) for each in experiment.runs})
    lines = [
        f"These runs: flavor {config['model.flavor']} (hidden size {model['dim']:,}, vocabulary {model['vocab_size']:,}), "
        f"{plural(experiment.blocks, 'block')} x {plural(layers, 'layer')}, phases of {plural(experiment.phase_steps, 'step')} "
        f"of {batch} documents ({per_phase} tokens in the first), at most {config['training.seq_len']:,} tokens each; "
        + (f"growth over {list(experiment.curriculum)} blocks; " if experiment.curriculum else "no run grows; ")
        + f"teacher {config['teacher.path'] or 'none'}; {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}.",
        f"The paper: {paper.SCALE} ({paper.SOURCE}). Its values stand beside these for their direction; at another scale they "
        "are other numbers.",
        f"Validation: {validation['valid_tokens']:,} tokens of {validation['documents']:,} held-out documents, at the scheduled "
        "last step of a phase, never the best one.",
        f"Code: commit {', '.join(commits)}." + (" The runs are of several commits." if len(commits) > 1 else ""),
        *experiment.notes,
    ]
    return lines


def runs_table(experiment: Experiment) -> Table:
    """Every run that was given: what it is, its size and its state."""
    columns = (
        Column("folder", "run"),
        Column("what", "what it is"),
        Column("seed", "seed", "d"),
        Column("phases", "phases"),
        Column("steps", "steps", ",d"),
        Column("documents", "documents", ",d"),
        Column("tokens", "tokens", ",d"),
        Column("ce", "CE", ".4f"),
        Column("state", "state"),
    )
    rows = []
    for key, runs in experiment.groups.items():
        for run in runs.values():
            rows.append(_run_row(experiment, run, key.words, "in the tables" if not key.variant else "variant"))
    for run, why in experiment.others:
        rows.append(_run_row(experiment, run, f"{run.placement}-norm", f"another run: {why}"))
    for run in experiment.unusable:
        rows.append(_run_row(experiment, run, _words_of(run), f"left out: {run.problem}"))
    return Table("runs", "Runs", columns, rows)


def _words_of(run: Run) -> str:
    if not run.manifest:
        return "unknown"
    try:
        kind = kind_of(run.config)[0]
    except ValueError:
        kind = ""
    return Key(kind, run.placement).words if kind else f"{run.placement}-norm"


def _run_row(experiment: Experiment, run: Run, what: str, state: str) -> dict[str, Any]:
    row: dict[str, Any] = {"folder": folder_name(experiment, run), "what": what, "state": state}
    if run.manifest:
        row["seed"] = run.seed
    if not run.problem:
        phases = [f"{p.steps:,} x {p.active_blocks}" for p in run.schedule.phases]
        row |= {
            "phases": " + ".join(phases),
            "steps": len(run.train),
            "documents": sum(event["documents"][1] - event["documents"][0] for event in run.train),
            "tokens": sum(event["valid_tokens"] for event in run.train),
            "ce": run.phases[-1]["ce"],
        }
    return row


def folder_name(experiment: Experiment, run: Run) -> str:
    """The folder's name, with its parent's where two runs share it."""
    every = [*experiment.runs, *(other for other, _ in experiment.others), *experiment.unusable]
    alone = sum(other.folder.name == run.folder.name for other in every) == 1
    return run.folder.name if alone else f"{run.folder.parent.name}/{run.folder.name}"


def _all(tables: Sequence[Table], figures: Sequence[Drawn]) -> list[Table | Drawn]:
    return [*tables, *figures]


def markdown(
    experiment: Experiment,
    tables: Sequence[Table],
    figures: Sequence[Drawn],
    title: str,
    lines: Sequence[str],
) -> str:
    """The text of report.md, which lies beside the folder ``figures``; ``lines`` stand under the title."""
    parts = [f"# {title}", *(_code(line, "`", "`") for line in lines), *scale_lines(experiment)]
    for part in _all(tables, figures):
        parts.append(f"## {part.title}")
        if isinstance(part, Table):
            parts.append(part.markdown())
        elif part.png:
            parts.append(f"![{part.alt}](figures/{part.id}.png)")
        else:
            parts.append("Missing: no run has what it shows.")
        parts += part.notes
        if part.missing:
            parts.append("\n".join(["Missing:", "", *(f"- {_code(line, '`', '`')}" for line in part.missing)]))
    return "\n\n".join(parts) + "\n"


def _code(line: str, before: str, after: str) -> str:
    """A line with the command in it marked as one."""
    words, found, command = line.partition("tools/run_recipe.py")
    return f"{words}{before}{found}{command}{after}" if found else line


def page(
    experiment: Experiment,
    tables: Sequence[Table],
    figures: Sequence[Drawn],
    title: str,
    lines: Sequence[str],
) -> str:
    """The text of report.html; figures are in it, ``lines`` stand under the title."""
    title = html.escape(title)
    parts = [f"<h1>{title}</h1>", *(f"<p>{_code(html.escape(line), '<code>', '</code>')}</p>" for line in lines)]
    parts += [f"<p>{html.escape(line)}</p>" for line in scale_lines(experiment)]
    links = [f'<a href="#{part.id}">{html.escape(part.title.split(". ")[0])}</a>' for part in _all(tables, figures)]
    parts.append(f"<nav>{' · '.join(links)}</nav>")
    for part in _all(tables, figures):
        parts.append(f'<section id="{part.id}"><h2>{html.escape(part.title)}</h2>')
        if isinstance(part, Table):
            parts.append(part.html())
        elif part.svg:
            source = f"data:image/svg+xml;base64,{base64.b64encode(part.svg).decode()}"
            alt = html.escape(part.alt, quote=True)
            parts.append(
                f'<figure><div class=scroll tabindex=0 role=region aria-label="{alt}"><img src="{source}" alt="{alt}"></div></figure>'
            )
        else:
            parts.append("<p>Missing: no run has what it shows.</p>")
        parts += [f"<p class=note>{html.escape(note)}</p>" for note in part.notes]
        if part.missing:
            items = "".join(f"<li>{_code(html.escape(line), '<code>', '</code>')}</li>" for line in part.missing)
            parts.append(f"<div class=missing>Missing:<ul>{items}</ul></div>")
        parts.append("</section>")
    head = (
        '<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width, '
        f'initial-scale=1"><link rel=icon href="data:,"><title>{title}</title><style>{STYLE}</style></head><body>'
    )
    return "\n".join([head, *parts, "</body></html>"]) + "\n"
