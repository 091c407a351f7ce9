"""What the scale of the vectors and the plan of the unit decide in small models: `make results`."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from old_names import read_run
from provenance import short_commit
from run_scales import SmallRun, small_runs

from torchdefine.embedding.unit_plan import PLANS
from torchdefine.recipe import load_recipe

INTRODUCTION = """## Scale in small models

`results/run_scales.py` trained three families of small models on the shipped texts. The rows of a family are equal in
data, steps and schedule. "rate" is the learning rate. "plan" and "norm" are those of the unit. The output is tied to
the table, or to the finished vectors. "unit's input" and "model's input" are the root mean squares of the vectors
that the unit and the context model read before training. "valid" is the mean perplexity over seeds, "range" the
highest minus the lowest.
"""
HEADER = (
    *("row", "plan", "norm", "tied to", "`embedding.scale`", "rate", "unit's input", "model's input"),
    *("M", "seeds", "valid", "range", "against the first"),
)


def scales_section(folder: Path) -> str:
    """All families; empty where none has run."""
    rows = rows_of(folder)
    runs = [run for of_row in rows.values() for run in of_row]
    if not runs:
        return ""
    parts = [INTRODUCTION]
    for family in dict.fromkeys(family for family, _ in rows):
        parts += [family_table(family, {row: found for (of, row), found in rows.items() if of == family}), ""]
    return "\n".join([*parts, origin(runs), ""])


DEMO_INTRODUCTION = """## Scale in the demo's recipes

The `demo` models at their own 750 steps, with and without scale: the mean validation perplexity over two seeds.
"""


def demo_section(folder: Path) -> str:
    """What scale does in runs as short as the demo's; empty where none has run."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        run = read_run(path)
        found.setdefault((run["recipe"], run["settings"]["embedding"]["scale"]), []).append(run)
    if not found:
        return ""
    lines = ["| recipe | `embedding.scale` | seeds | valid | range | against none |", "|---|---" + "|---:" * 4 + "|"]
    for (recipe, scale), runs in found.items():
        *_, seeds, valid, apart, against = cells(runs, found[recipe, "none"], sizes=False)
        lines.append(f"| `{recipe}` | {scale} | {seeds} | {valid} | {apart} | {against} |")
    return "\n".join([DEMO_INTRODUCTION, *lines, "", origin([run for runs in found.values() for run in runs]), ""])


def rows_of(folder: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The runs of every row of every family, all seeds together; none for a row that has not run."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in small_runs():
        found = rows.setdefault((run.family, " | ".join(described(run))), [])
        if (folder / run.file).exists():
            found.append(read_run(folder / run.file))
    return rows


def described(run: SmallRun) -> tuple[str, ...]:
    """A row's first cells."""
    row = run.row
    plan = row.get("plan")
    norm = row.get("norm") or (PLANS[plan]["norm"] if plan else "–")
    rate = f"{load_recipe(run.recipe, run.changes).optim.lr:g}"
    return row["name"], plan or "–", norm, row.get("tied", "table"), row["scale"], rate


def family_table(family: str, rows: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        f"### {family[0].upper()}{family[1:]}",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|---" * 5 + "|---:" * 8 + "|",
    ]
    first = next(iter(rows.values()))
    for row, runs in rows.items():
        lines.append(f"| {row} | " + " | ".join(cells(runs, first) if runs else ["not run"] * 7) + " |")
    return "\n".join(lines)


def cells(runs: list[dict[str, Any]], first: list[dict[str, Any]], sizes: bool = True) -> list[str]:
    valid = [run["valid_perplexity"] for run in runs]
    against = mean(valid) / mean(run["valid_perplexity"] for run in first) - 1 if first else None
    return [
        *(reads(runs, what) for what in ("unit", "model") if sizes),
        f"{runs[0]['parameters']['total'] / 1e6:.2f}",
        str(len(runs)),
        f"{mean(valid):.1f}",
        f"{max(valid) - min(valid):.1f}" if len(valid) > 1 else "–",
        "–" if against is None else f"{against:+.1%}",
    ]


def reads(runs: list[dict[str, Any]], what: str) -> str:
    """The root mean square at the start: of both sides of a translator, should they differ."""
    sizes = [side[what] for side in runs[0]["initial_rms"].values()]
    return " / ".join("–" if size is None else f"{size:.2f}" for size in sizes)


def origin(runs: list[dict[str, Any]]) -> str:
    facts = {
        "texts": {run["data"]["corpus"] for run in runs},
        "hardware": {run["hardware"].get("gpu") or run["hardware"]["cpu"] for run in runs},
        "torch": {run["versions"]["torch"] for run in runs},
        "commit": {short_commit(run["commit"]) for run in runs},
    }
    return "; ".join(f"{name} {', '.join(sorted(found))}" for name, found in facts.items()) + "."
