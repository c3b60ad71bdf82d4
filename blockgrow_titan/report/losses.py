"""Tables 1, 2, 3, A2 and A3, and of variants: validation cross-entropy and budgets."""

from collections.abc import Sequence
from typing import Any

from blockgrow_titan.report import paper
from blockgrow_titan.report.experiment import PLACEMENTS, Experiment, Key, final_ce, kind_words
from blockgrow_titan.report.reading import Run
from blockgrow_titan.report.table import Column, Stat, Table, seeds_words

CE = "+.4f"
DELTA_ROW = "Δ = post - pre"


def table1(experiment: Experiment) -> Table:
    """Placement x training, with Delta of each training and their interaction (paper, Table 1 and Eq. 6)."""
    columns = (
        Column("placement", "placement"),
        Column("joint", "joint", ".4f", paper=True),
        Column("grow", "grow", ".4f", paper=True),
        Column("grow_minus_joint", "grow - joint", CE, paper=True),
    )
    rows: list[dict[str, Any]] = []
    for placement in PLACEMENTS:
        joint, grow = Key("joint1", placement), Key("grow", placement)
        published = paper.CE[joint[:2]], paper.CE[grow[:2]]
        rows.append(
            {
                "placement": f"{placement}-norm",
                "joint": experiment.ce(*joint),
                "joint_paper": published[0],
                "grow": experiment.ce(*grow),
                "grow_paper": published[1],
                "grow_minus_joint": experiment.over_seeds(lambda a, b: final_ce(b) - final_ce(a), joint, grow),
                "grow_minus_joint_paper": round(published[1] - published[0], 4),
            }
        )
    rows.append(
        {
            "placement": DELTA_ROW,
            "signed": True,
            "joint": experiment.delta("joint1"),
            "joint_paper": paper.DELTA["joint1"],
            "grow": experiment.delta("grow"),
            "grow_paper": paper.DELTA["grow"],
            "grow_minus_joint": experiment.interaction(),
            "grow_minus_joint_paper": paper.INTERACTION,
        }
    )
    interaction = experiment.interaction()
    notes = [
        "Interaction I = Δ_grow - Δ_joint, the last row of the last column: "
        + (f"{_signed(interaction)}, {seeds_words(interaction.seeds)}" if interaction else "a run is missing")
        + f"; in the paper {paper.INTERACTION:+.4f}. Negative favours post-norm under growth.",
        *_seed_notes(experiment, [(kind, p) for kind in ("joint1", "grow") for p in PLACEMENTS]),
    ]
    missing = experiment.missing([(kind, p) for kind in ("joint1", "grow") for p in PLACEMENTS])
    title = "Table 1. Validation cross-entropy at the last step, by placement and training"
    return Table("table1", title, columns, rows, notes, missing)


def table2(experiment: Experiment) -> Table:
    """The single block at the end of phase 0 of the growing runs (paper, Table 2)."""
    names = {"ce": "CE", "kd": "KD", "kl": "KL", "ppl": "PPL"}
    forms = {"ppl": ".2f"}
    rows: list[dict[str, Any]] = []
    for placement in PLACEMENTS:
        row: dict[str, Any] = {"placement": f"{placement}-norm"}
        for name in names:
            row[name] = experiment.over_seeds(lambda run, name=name: run.phases[0][name], Key("grow", placement))
            row[f"{name}_paper"] = paper.FIRST_PHASE[placement].get(name)
        rows.append(row)
    delta: dict[str, Any] = {"placement": DELTA_ROW, "signed": True}
    for name in names:
        pre, post = (paper.FIRST_PHASE[placement].get(name) for placement in PLACEMENTS)
        delta[name] = experiment.over_seeds(
            lambda a, b, name=name: _difference(b.phases[0][name], a.phases[0][name]),
            Key("grow", "pre"),
            Key("grow", "post"),
        )
        delta[f"{name}_paper"] = None if pre is None or post is None else round(post - pre, 4)
    columns = (
        Column("placement", "placement"),
        *(Column(name, heading, forms.get(name, ".4f"), paper=True) for name, heading in names.items()),
    )
    blocks = experiment.curriculum[0] if experiment.curriculum else 1
    needs = [("grow", placement) for placement in PLACEMENTS]
    notes = [
        "KD is the soft-target cross-entropy E_T[-log p_S], KL that minus the teacher's entropy; the paper's KD next to its CE "
        "can only be the former.",
        *_seed_notes(experiment, needs),
    ]
    title = f"Table 2. After phase 0 of growth, with {blocks} active block{'' if blocks == 1 else 's'}"
    return Table("table2", title, columns, [*rows, delta], notes, experiment.missing(needs))


def table3(experiment: Experiment) -> Table:
    """Joint controls of growth's budgets (paper, Table 3)."""
    columns = (
        Column("training", "training"),
        Column("matched", "has as much as grow in"),
        Column("steps", "steps", ",d"),
        Column("tokens", "tokens in all", ",d"),
        Column("unique_tokens", "unique tokens", ",d"),
        Column("active_layer_tokens", "active-layer tokens", ",d"),
        Column("ce", "CE", ".4f", paper=True),
        Column("minus_grow", "CE - CE of grow", CE, paper=True),
    )
    kinds = control_kinds(experiment)
    needs = [(kind, "post") for kind in (*kinds, "grow")]
    rows, about = [], False
    for placement in PLACEMENTS:
        there = [
            kind for kind in (*kinds, "grow") if (kind, placement) in needs or Key(kind, placement) in experiment.groups
        ]
        if placement == "pre" and not any(kind in there for kind in kinds if kind != "joint1"):
            continue
        for kind in there:
            budget = budget_of(experiment, Key(kind, placement))
            published, grown = paper.CE.get((kind, placement)), paper.CE["grow", placement]
            if not has_papers_counterpart(experiment, kind):
                published = None
            about |= bool(budget.get("about"))
            delta = experiment.over_seeds(
                lambda a, b: final_ce(b) - final_ce(a), Key("grow", placement), Key(kind, placement)
            )
            rows.append(
                {name: budget.get(name) for name in ("steps", "tokens", "unique_tokens", "active_layer_tokens")}
                | {
                    "training": Key(kind, placement).words,
                    "matched": kinds.get(kind, ""),
                    "ce": experiment.ce(kind, placement),
                    "ce_paper": published,
                    "minus_grow": None if kind == "grow" else delta,
                    "minus_grow_paper": None if kind == "grow" or published is None else round(published - grown, 4),
                }
            )
    notes = [*_about(about), *_seed_notes(experiment, needs)]
    if experiment.curriculum and "active-layer tokens" not in " ".join(kinds.values()):
        notes.append(
            f"No whole number of joint phases has as many active-layer tokens as growth over {list(experiment.curriculum)} blocks."
        )
    title = "Table 3. Joint training on growth's budgets: validation cross-entropy at the last step"
    return Table("table3", title, columns, rows, notes, experiment.missing(needs))


def has_papers_counterpart(experiment: Experiment, kind: str) -> bool:
    """Whether the paper's run of this kind is on the same budget: its longer joint runs match growth over 1, 2, 3 blocks."""
    return kind in ("joint1", "grow", "freeze") or experiment.curriculum in ((), (1, 2, 3))


def control_kinds(experiment: Experiment) -> dict[str, str]:
    """The joint runs that match growth's budgets, and in what, and any other that is there."""
    curriculum = experiment.curriculum or tuple(range(1, experiment.blocks + 1))
    matched: dict[int, list[str]] = {1: ["unique tokens"]}
    if sum(curriculum) % experiment.blocks == 0:
        matched.setdefault(sum(curriculum) // experiment.blocks, []).append("active-layer tokens")
    matched.setdefault(len(curriculum), []).append("tokens in all")
    for key in experiment.groups:
        if key.kind.startswith("joint") and not key.variant:
            matched.setdefault(int(key.kind[5:]), [])
    return {f"joint{phases}": ", ".join(what) for phases, what in sorted(matched.items())}


def tableA2(experiment: Experiment) -> Table:
    """What each training reads and computes (paper, Table A2)."""
    columns = (
        Column("training", "training"),
        Column("layers", "layers", "d", paper=True, exact=True),
        Column("steps", "steps", ",d"),
        Column("documents", "documents", ",d"),
        Column("tokens", "tokens in all", ",.0f", paper=True, exact=True),
        Column("unique_tokens", "unique tokens", ",.0f", paper=True, exact=True),
        Column("active_layer_tokens", "active-layer tokens", ",d"),
    )
    kinds = dict.fromkeys(["joint1", "grow", *control_kinds(experiment)])
    kinds |= dict.fromkeys(key.kind for key in experiment.groups if not key.variant)
    rows, about, missing = [], False, []
    for kind in kinds:
        keys = [key for key in experiment.groups if key.kind == kind and not key.variant]
        budgets = [budget_of(experiment, key) for key in keys]
        if any(budget != budgets[0] for budget in budgets):
            raise ValueError(f"mixed runs: {' and '.join(key.words for key in keys)} have not read the same: {budgets}")
        budget = budgets[0] if budgets else {}
        about |= bool(budget.get("about"))
        published = paper.BUDGETS.get(kind, {}) if has_papers_counterpart(experiment, kind) else {}
        rows.append(
            {"training": kind_words(kind)}
            | {c.key: budget.get(c.key) for c in columns[1:]}
            | {f"{c.key}_paper": published.get(c.key) for c in columns if c.paper}
        )
        if not keys:
            missing += experiment.missing([(kind, "post")])
    notes = [
        "Both placements read the same. Padding counts as no token. Active-layer tokens: tokens of each step times the layers "
        "that are active in it, the paper's proxy of compute.",
        *_about(about),
    ]
    return Table("tableA2", "Table A2. Budgets", columns, rows, notes, missing)


def tableA3(experiment: Experiment) -> Table:
    """Growth with completed blocks frozen (paper, Table A3)."""
    columns = (
        Column("placement", "placement"),
        Column("freeze", "freeze", ".4f", paper=True),
        Column("grow", "grow", ".4f", paper=True),
        Column("freeze_minus_grow", "freeze - grow", CE, paper=True),
    )
    rows: list[dict[str, Any]] = []
    for placement in PLACEMENTS:
        published = paper.CE["freeze", placement], paper.CE["grow", placement]
        difference = experiment.over_seeds(
            lambda a, b: final_ce(b) - final_ce(a), Key("grow", placement), Key("freeze", placement)
        )
        rows.append(
            {
                "placement": f"{placement}-norm",
                "freeze": experiment.ce("freeze", placement),
                "freeze_paper": published[0],
                "grow": experiment.ce("grow", placement),
                "grow_paper": published[1],
                "freeze_minus_grow": difference,
                "freeze_minus_grow_paper": round(published[0] - published[1], 4),
            }
        )
    last: dict[str, Any] = {"placement": DELTA_ROW, "signed": True}
    for kind in ("freeze", "grow"):
        last |= {kind: experiment.delta(kind), f"{kind}_paper": paper.DELTA[kind]}
    needs = [(kind, placement) for kind in ("freeze", "grow") for placement in PLACEMENTS]
    notes = [
        "Head and boundary norm keep training under freeze (growth.train_boundary); the paper does not say whether its do.",
        *_seed_notes(experiment, needs),
    ]
    title = "Table A3. Growth with completed blocks frozen: validation cross-entropy at the last step"
    return Table("tableA3", title, columns, [*rows, last], notes, experiment.missing(needs))


def variants(experiment: Experiment) -> Table:
    """What other policies at a phase change, and other shards, do to each placement and to Delta (the paper has no such table)."""
    columns = (
        Column("training", "training"),
        Column("pre", "pre-norm", ".4f", paper=True),
        Column("post", "post-norm", ".4f", paper=True),
        Column("delta", DELTA_ROW, CE, paper=True),
        Column("pre_change", "pre-norm, change", CE, paper=True),
        Column("post_change", "post-norm, change", CE, paper=True),
    )
    kinds = dict.fromkeys(key.kind for key in experiment.groups if key.variant)
    rows, needs = [], []
    for kind in kinds:
        for variant in sorted({"", *(key.variant for key in experiment.groups if key.kind == kind)}):
            pre, post = keys = [Key(kind, placement, variant) for placement in PLACEMENTS]
            needs += keys
            row: dict[str, Any] = {
                "training": pre.training,
                "delta": experiment.over_seeds(lambda a, b: final_ce(b) - final_ce(a), pre, post),
            }
            for key in keys:
                usual = Key(kind, key.placement)
                row[key.placement] = experiment.ce(*key)
                row[f"{key.placement}_change"] = (
                    experiment.over_seeds(lambda a, b: final_ce(b) - final_ce(a), usual, key) if variant else None
                )
            rows.append(row)
    notes = [
        "Change: against the first row of the same training, which resets the optimizer's moments, restarts the learning rate "
        "and goes on with the documents. The paper gives no numbers of these.",
        *_seed_notes(experiment, needs, paper_too=False),
    ]
    title = "Variants. Validation cross-entropy at the last step, by policies at a phase change and shard"
    return Table("variants", title, columns, rows, notes, experiment.missing(needs))


def budget_of(experiment: Experiment, key: Key) -> dict[str, Any]:
    """Steps, documents, tokens, unique tokens, active-layer tokens and layers of the runs of a key; {} without one.

    Raises:
        ValueError: If runs that differ in their seed alone have read different tokens.
    """
    budgets = {seed: run_budget(run) for seed, run in experiment.groups.get(key, {}).items()}
    first = next(iter(budgets.values()), {})
    for seed, budget in budgets.items():
        if budget != first:
            folder = experiment.groups[key][seed].folder
            raise ValueError(
                f"mixed runs: {folder} has not read as many tokens as the other {key.words} runs: {budget}, {first}"
            )
    return first


def run_budget(run: Run) -> dict[str, Any]:
    """What one run has read. "about" says that a step reached over the end of the shard, so that its tokens are shared out."""
    seen, unique, about = 0, 0.0, False
    for event in run.train:
        begin, end = event["documents"]  # in the endlessly repeated shard
        new = max(0, min(end, run.shard) - max(begin, seen))
        about |= 0 < new < end - begin
        unique += event["valid_tokens"] * new / (end - begin)
        seen = max(seen, end)
    return {
        "steps": len(run.train),
        "documents": sum(event["documents"][1] - event["documents"][0] for event in run.train),
        "tokens": sum(event["valid_tokens"] for event in run.train),
        "unique_tokens": round(unique),
        "active_layer_tokens": sum(event["active_layer_tokens"] for event in run.train),
        "layers": run.phases[-1]["active_layers"],
        "about": about,
    }


def _about(about: bool) -> list[str]:
    text = "Unique tokens are shared out by documents where a step reaches over the end of the shard."
    return [text] if about else []


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _signed(value: Stat) -> str:
    return f"{value.mean:+.4f}" + ("" if value.std is None else f" ± {value.std:.4f}")


def _seed_notes(experiment: Experiment, needs: Sequence[tuple[str, ...]], paper_too: bool = True) -> list[str]:
    """How many seeds the cells have; if not all have the same, which have which."""
    papers = " The paper: one seed." if paper_too else ""
    seeds = {Key(*need): tuple(experiment.groups[Key(*need)]) for need in needs if Key(*need) in experiment.groups}
    if not seeds:
        return []
    if len({*seeds.values()}) == 1:
        return [f"Here: {seeds_words(next(iter(seeds.values())))}.{papers}"]
    each = "; ".join(f"{key.words}: {', '.join(map(str, value))}" for key, value in seeds.items())
    return [
        f"Seeds differ ({each}). A cell is the mean over its own, ± their standard deviation if there are several; a difference "
        f"is over the seeds that its runs have in common, so it need not be the difference of the means.{papers}"
    ]
