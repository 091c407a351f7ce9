"""Which of the paper's claims the stages support, in the pages docs/evidence….md: `make results`."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from marked import write_between_marks
from rate_tables import best_rates_table, rates_section
from run_stage import read_stage
from stage_tables import COMPARISONS, clipped_share, compact_table, diverged, published_test, read_rows

HERE = Path(__file__).parent
SEEDS_APART = 2
"""A difference counts that is more than so many times the largest between two seeds of one row."""
NO_WORSE = 0.01
"""A row that should do no worse than another may be higher by this share at least."""

OFTEN_CLIPPED = 0.1
"""Rows whose gradient was clipped in more of their steps are said to be so: they would want another rate."""

Runs = list[dict[str, Any]]


def write_evidence_pages(folder: Path) -> None:
    """The measured parts of docs/evidence….md; ``folder`` has the results of the stages on one text."""
    docs = HERE.parent / "docs"
    short, rows, scale = (docs / f"{name}.md" for name in ("evidence", "evidence-rows", "evidence-scale"))
    write_between_marks(short, "answers", claims_table(folder, in_short=True))
    write_between_marks(short, "best", best_rates_table(folder))
    write_between_marks(rows, "rates", rates_section(folder))
    for stage in COMPARISONS:
        write_between_marks(rows, stage, compact_table(folder / stage))
    write_between_marks(rows, "claims", claims_table(folder))
    write_between_marks(scale, "choices", choices_table(folder))


def choices_table(folder: Path) -> str:
    """What was tried of the unit beside the baseline in the same schedule."""
    schedule = f"rate {read_stage('unit-choices')['common']['optim']['lr']}"  # that of the unit's tries
    baseline = finished_rows(folder / "tuning").get(schedule)
    reference = baseline[0]["valid_perplexity"] if baseline else math.nan
    lines = ["| row | valid | against the baseline |", "|---|---:|---:|"]
    lines.append(
        f"| *the scaled baseline, {schedule}* | " + (f"{reference:.1f} | +0.0% |" if baseline else "not run | – |")
    )
    rows = read_rows(folder / "unit-choices")
    for row in read_stage("unit-choices")["rows"]:
        runs = rows.get(row["name"])
        if runs is None or diverged(runs):
            cells = ["not run" if runs is None else "diverged", "–"]
        else:
            valid = runs[0]["valid_perplexity"]
            cells = [f"{valid:.1f}", f"{valid / reference - 1:+.1%}" if baseline else "–"]
        lines.append("| " + " | ".join([row["name"], *cells]) + " |")
    return "\n".join(lines)


def claims_table(folder: Path, in_short: bool = False) -> str:
    """Every claim beside the rows that speak of it, or beside those alone that are the answer in short."""
    claims = yaml.safe_load((HERE / "claims.yaml").read_text())
    stages = {pair["stage"] for claim in claims for pair in claim["pairs"]}
    rows = {stage: read_rows(folder / stage) for stage in stages}
    apart = largest_difference_of_seeds({stage: finished_rows(folder / stage) for stage in stages})
    header = ("claim", "stage", "row", "against", "valid", "test", "paper's test", "supported?")
    lines = ["| " + " | ".join(header) + " |", "|---|---|---|---|---:|---:|---:|---|"]
    untested = []
    for claim in claims:
        pairs = [pair for pair in claim["pairs"] if pair.get("in_short") or not in_short]
        ran = [pair for pair in pairs if {pair["row"], pair["against"]} <= rows[pair["stage"]].keys()]
        for place, pair in enumerate(ran):
            said = claim["says"] if place == 0 else ""
            cells = pair_cells(pair, rows[pair["stage"]], apart)
            names = (f"`{pair['stage']}`", pair["row"], pair["against"])
            lines.append("| " + " | ".join([said, *names, *cells]) + " |")
        if missing := len(pairs) - len(ran):
            untested.append(f"- {claim['says'].removesuffix('.')}: {missing} of {len(pairs)} pairs of rows.")
    if untested:
        lines += ["", "Not run yet:", "", *untested]
    return "\n".join(lines if in_short else [*lines, "", how_it_is_judged(apart)])


def finished_rows(folder: Path) -> dict[str, Runs]:
    """The runs of every row of which none diverged."""
    return {name: runs for name, runs in read_rows(folder).items() if not diverged(runs)}


def largest_difference_of_seeds(stages: dict[str, dict[str, Runs]]) -> float | None:
    """Of a row's test perplexities, as a share of the least; None where no row has run with two seeds."""
    by_seed = [[run["test_perplexity"] for run in runs] for rows in stages.values() for runs in rows.values()]
    return max((max(tests) / min(tests) - 1 for tests in by_seed if len(tests) > 1), default=None)


def pair_cells(pair: dict[str, Any], rows: dict[str, Runs], apart: float | None) -> list[str]:
    """How much lower or higher a row is than the one that it is set against, and what follows."""
    if diverged(rows[pair["row"]]) or diverged(rows[pair["against"]]):
        return ["diverged"] * 4
    one, other = rows[pair["row"]], rows[pair["against"]]
    valid, test = (difference(one, other, f"{split}_perplexity") for split in ("valid", "test"))
    published = published_test(one[0]), published_test(other[0])
    papers = "–" if None in published else f"{published[0] / published[1] - 1:+.1%}"
    if "not_judged" in pair:
        return [f"{valid:+.1%}", f"{test:+.1%}", papers, f"not judged: {pair['not_judged']}"]
    seen = verdict(test, pair.get("no_worse", False), apart)
    if seen == "yes" and "but" in pair:
        seen += f", but {pair['but']}"
    seen += held_back(pair["row"], one) + held_back(pair["against"], other)
    return [f"{valid:+.1%}", f"{test:+.1%}", papers, seen]


def held_back(name: str, runs: Runs) -> str:
    """The end of a verdict on a row whose gradient was cut down so often that it says little."""
    share = clipped_share(runs)
    return f"; *{name}* was clipped in {share:.0%} of its steps" if share is not None and share > OFTEN_CLIPPED else ""


def difference(one: Runs, other: Runs, name: str) -> float:
    """Between the means over seeds, as a share."""
    return mean(run[name] for run in one) / mean(run[name] for run in other) - 1


def verdict(test: float, no_worse: bool, apart: float | None) -> str:
    if apart is None:
        return "no row has two seeds to judge by"
    if no_worse:
        return "yes" if test <= no_worse_by(apart) else "no"
    if abs(test) <= SEEDS_APART * apart:
        return "within seed noise"
    return "yes" if test < 0 else "no, the opposite"


def no_worse_by(apart: float) -> float:
    """How much higher a row may be that should do no worse than another."""
    return max(NO_WORSE, SEEDS_APART * apart)


def how_it_is_judged(apart: float | None) -> str:
    known = "no row has run with two seeds yet" if apart is None else f"here {apart:.1%}"
    no_worse = "" if apart is None else f'"Yes" for "no worse" means at most {no_worse_by(apart):.1%} higher. '
    return (
        "Percentages compare perplexities, averaged over seeds. Below zero, the row is better. A difference counts if "
        f"it is more than {SEEDS_APART} times the largest difference between two seeds of one row ({known}). Few seeds "
        f"estimate this difference badly. {no_worse}A step is clipped if its gradient norm is above the limit. We "
        "count the logged steps after the first tenth; at rate 10 norms were not logged. Training is far shorter than "
        "the paper's. Longer training may show other differences, or remove these."
    )
