"""What weight scaling does for units and projections in small models: `make results`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

from old_names import read_run
from provenance import short_commit

from torchdefine.recipe import recipe_of

HEADER = ("model", "optimiser, rate, steps", "unit", "input", "weights", "seeds", "valid", "lowest and highest", "test")

Run = dict[str, Any]


def equalised_section(folder: Path) -> str:
    introduction = (
        "These small models were trained for minutes on a CPU on the shipped text. We introduced [weight "
        "scaling](../docs/evidence-scale.md#does-the-unit-learn-too-fast) because of them, so they are no test of it. "
        '"input" is the factor on the vectors that the unit reads.'
    )
    table = equalised_table(folder)
    return f"## Weight scaling in small models\n\n{introduction}\n\n{table}\n\n{commits(folder)}\n"


def commits(folder: Path) -> str:
    found = sorted({short_commit(read_run(path)["commit"]) for path in folder.glob("*.json")})
    changed = " A commit that ends in -changed had uncommitted changes." if "-changed" in "".join(found) else ""
    return f"Commits {', '.join(found)}.{changed}"


def equalised_table(folder: Path) -> str:
    """Runs that differ in seeds alone are one row; rows that may be compared stand together, the best first."""
    runs = [read_run(path) for path in folder.glob("*.json")]
    runs.sort(key=lambda run: (what_is_equal(run), what_differs(run)))
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * 5 + "|---:" * 4 + "|"]
    for equal, comparable in groupby(runs, key=what_is_equal):
        rows = [list(same) for _, same in groupby(comparable, key=what_differs)]
        for same in sorted(rows, key=lambda same: mean(valids(same))):
            lines.append("| " + " | ".join([*equal, *what_differs(same[0]), *numbers(same)]) + " |")
    return "\n".join(lines)


def what_is_equal(run: Run) -> tuple[str, str]:
    context, embedding, optim = (run["settings"][section] for section in ("context", "embedding", "optim"))
    finished = run["settings"]["unit"].get("embedding_dim") or embedding.get("output_dim") or embedding["map_dim"]
    kind = {"lstm": "LSTM", "transformer-xl": "Transformer-XL"}[context["kind"]]
    layers = "1 layer" if context["layers"] == 1 else f"{context['layers']} layers"
    width = f"n = {embedding['map_dim']}, m = {finished}"
    return f"{kind} of {layers}, {width}", f"{optim['kind']}, {optim['lr']:g}, {run['steps']:,}"


def what_differs(run: Run) -> tuple[str, str, str]:
    embedding, unit = run["settings"]["embedding"], run["settings"]["unit"]
    scale = recipe_of(run["settings"]).embedding.factor(embedding.get("output_dim") or embedding["map_dim"])
    weights = ("weight-scaled" if unit["weight_scaling"] else "plain") if unit["kind"] != "none" else "–"
    return unit["kind"], f"times {scale:.3g}", weights


def valids(runs: Iterable[Run]) -> list[float]:
    return [run["valid_perplexity"] for run in runs]


def numbers(runs: list[Run]) -> list[str]:
    found = valids(runs)
    lowest_and_highest = f"{min(found):.1f} – {max(found):.1f}" if len(runs) > 1 else "–"
    return [
        str(len(runs)),
        f"{mean(found):.1f}",
        lowest_and_highest,
        f"{mean(run['test_perplexity'] for run in runs):.1f}",
    ]
