"""The tables of the long runs, and what they say of the paper's claims: `make results`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from old_names import read_run
from provenance import short_commit
from run_long import LongRun, described, long_runs

from torchdefine.recipe import load_recipe

INTRODUCTION = """## Long runs

`results/run_long.py` trains the rows of `results/long_runs.yaml`, each group in about 25 minutes on one H200. "cached"
is the test perplexity with a neural cache, tuned on the validation text. "averaged" is the BLEU of the average of the
last checkpoints. A claim compares DeFINE with its fair baseline, by means over seeds.
"""
ROWS = ("row", "recipe", "M parameters", "M tokens", "seed", "valid", "test", "cached", "BLEU", "averaged")
CLAIMS = ("claim", "published", "ours", "fraction of the paper's tokens", "baseline", "against the baseline", "seeds")
PACKED = ("row", "vectors", "MB", "test", "against computed", "ms/batch", "look-up, ms", "seconds to make")


def long_section(folder: Path) -> str:
    """Rows, claims and packed tables; rows that have not run are named as such."""
    runs = {run.name: (run, read_run(folder / run.file)) for run in long_runs() if (folder / run.file).exists()}
    rows = [[run.name, f"`{run.recipe}`", *cells(runs.get(run.name))] for run in long_runs()]
    found = {name: result for name, (_, result) in runs.items()}
    parts = [INTRODUCTION, table(ROWS, rows, words=2), "", table(CLAIMS, claims(found), words=1)]
    if packed := list(packed_rows(found)):
        parts += ["", table(PACKED, packed, words=2)]
    return "\n".join([*parts, *([f"\n{origin(list(found.values()))}"] if found else []), ""])


def table(header: tuple[str, ...], rows: list[list[str]], words: int) -> str:
    """Markdown; the first columns are ``words``, the others numbers."""
    lines = ["| " + " | ".join(header) + " |", "|---" * words + "|---:" * (len(header) - words) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def cells(ran: tuple[LongRun, dict[str, Any]] | None) -> list[str]:
    """Everything behind a row's recipe."""
    if ran is None or "diverged" in ran[1]:
        return ["not run" if ran is None else "diverged"] * (len(ROWS) - 2)
    result, after = ran[1], ran[1].get("after", {})
    cached, averaged = after.get("neural-cache"), after.get("averaged")
    return [
        f"{result['parameters']['total'] / 1e6:.2f}",
        f"{result['tokens'] / 1e6:.0f}",
        str(result["seed"]),
        *(f"{result[f'{split}_perplexity']:.2f}" for split in ("valid", "test")),
        f"{cached['test']['perplexity']:.2f}" if cached else "–",
        f"{result['test_bleu']:.2f}" if "test_bleu" in result else "–",
        f"{averaged['test']['bleu']:.2f}" if averaged else "–",
    ]


def claims(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [[claim["says"], published(claim["paper"]), *claim_cells(claim, found)] for claim in described()["claims"]]


def published(recipe: str) -> str:
    numbers = load_recipe(recipe).published
    return f"{numbers.get('test_perplexity', numbers.get('bleu_newstest2014')):g}"


def claim_cells(claim: dict[str, Any], found: dict[str, dict[str, Any]]) -> list[str]:
    """What our run of it gave, and how far that is from the fair baseline; all seeds of a row count."""
    ours, others = ([r for r in seeds_of(claim[side], found) if "diverged" not in r] for side in ("row", "against"))
    if not ours or not others:
        return ["not run"] * (len(CLAIMS) - 2)
    one, other = (mean(score(result) for result in results) for results in (ours, others))
    return [
        f"{one:.2f}",
        f"{ours[0]['tokens'] / claim['tokens']:.0%}",
        f"{other:.2f}",
        f"{one - other:+.2f} BLEU" if "test_bleu" in ours[0] else f"{one / other - 1:+.1%}",
        f"{len(ours)} and {len(others)}",
    ]


def seeds_of(name: str, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [result for row, result in found.items() if row == name or row.startswith(f"{name} seed ")]


def score(result: dict[str, Any]) -> float:
    """BLEU of a translator, averaged where it was; else the test perplexity."""
    if "test_bleu" not in result:
        return float(result["test_perplexity"])
    averaged = result.get("after", {}).get("averaged")
    return float(averaged["test"]["bleu"] if averaged else result["test_bleu"])


def packed_rows(found: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    for name, result in found.items():
        rows = [row for row in result.get("after", {}).get("packed", []) if "perplexity" in row]
        for row in rows:
            yield [
                name,
                row["name"],
                f"{row['bytes'] / 1e6:.2f}",
                f"{row['perplexity']:.2f}",
                f"{row['perplexity'] / rows[0]['perplexity'] - 1:+.1%}",
                f"{row['ms_per_batch']:.2f}",
                f"{row['look_up_ms']:.3f}",
                f"{row['seconds_to_make']:.1f}",
            ]


def origin(runs: list[dict[str, Any]]) -> str:
    done = [run for run in runs if "diverged" not in run]
    facts = {
        "texts": {run["data"]["corpus"] for run in done},
        "hardware": {run["hardware"].get("gpu") or run["hardware"]["cpu"] for run in done},
        "torch": {run["versions"]["torch"] for run in done},
        "commit": {short_commit(run["commit"]) for run in done},
    }
    return "; ".join(f"{name} {', '.join(sorted(values))}" for name, values in facts.items()) + "."
