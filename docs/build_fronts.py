"""The page on which one drags a budget: docs/fronts.html with the rows of results/leaderboard in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "leaderboard"
TABLES = ("minilm", "language-model", "energetic", "ja_ginza", "demo", "compared-lstm")
LOWER = ("KL", "perplexity", "test perplexity")
"""Measures of which less is better."""
NEAR_ONE = ("cosine", "correlation", "neighbours", "agreement")
"""Parts of the names of measures whose distance from 1 tells more than their value; a picture shows it."""
CLOSEST = 1e-5
OWN = ("bits", "define")
"""Methods of torchdefine that nobody else had before; the page stresses them."""
DIGITS = 6

Data = dict[str, Any]


def fronts_page() -> str:
    """One HTML page that asks nothing of any server."""
    data = json.dumps(
        [data for name in TABLES if (data := table_data(name))], separators=(",", ":"), ensure_ascii=False
    )
    return (ROOT / "docs" / "fronts.html").read_text().replace("/* DATA */", data.replace("<", "\\u003c"))


def table_data(name: str) -> Data | None:
    """What the page knows of a table; None where nothing was measured."""
    results = [json.loads(path.read_text()) for path in sorted((RESULTS / name).glob("*.json"))]
    if not results:
        return None
    facts = results[0]["table"]
    rows = [row for one in results for row in one["rows"] if row["bytes"]]
    names, (count, width) = list(rows[0]["measures"]), facts["shape"]
    methods = [method_data(name, one, names) for one in results if one["method"]["name"] != "full"]
    methods.sort(key=lambda one: (not one["own"], one["title"]))
    return {
        "name": name,
        "title": facts["title"],
        "rows": count,
        "width": width,
        "full": 4 * count * width,
        "start": sorted(row["budget"] for row in rows)[len(rows) // 2],
        "measures": [measure_data(one, rows) for one in names],
        "methods": methods,
        "origin": origin(rows),
    }


def measure_data(name: str, rows: list[Data]) -> Data:
    near = any(part in name for part in NEAR_ONE)
    before = next((row["measures"][name]["before"] for row in rows), None)
    best = 1 if near else 0 if name == "KL" else None
    known = before if before is None else rounded(before)
    return {"name": name, "lower": name in LOWER, "best": best, "floor": CLOSEST, "before": known}


def method_data(table: str, result: Data, measures: list[str]) -> Data:
    own = result["method"]["settings"].get("torchdefine method")
    points = []
    for row in result["rows"]:
        if row["bytes"]:
            found = [row["measures"][one] for one in measures]
            point = {
                "budget": row["budget"],
                "bytes": row["bytes"],
                "label": "" if row["label"] == result["method"]["title"] else row["label"],
                "values": [[rounded(one["value"]), rounded((one["high"] - one["low"]) / 2)] for one in found],
            }
            if command := own and command_for(table, result["method"]["name"], own, row["budget"]):
                point["command"] = command
            points.append(point)
    return {"title": result["method"]["title"], "own": own in OWN, "points": points}


def command_for(table: str, name: str, own: str, budget: int) -> str | None:
    """What makes such a table of a reader's own; None where it takes more than a line."""
    size = f"{budget / 1e6:g}MB" if budget % 10_000 == 0 and budget >= 1e6 else str(budget)
    if table in ("minilm", "language-model"):
        if name not in ("bits", "distilled"):
            return None  # adapt would take what is best
        thorough = "" if name == "bits" else " --thorough"
        return f"torchdefine adapt MODEL_DIR --budget {size}{thorough} --text corpus.txt --out smaller/"
    if table in ("demo", "compared-lstm"):
        return f"torchdefine compress RUN --method {own} --budget {size}"
    if name == "bits":
        return (
            "from torchdefine.tables import transform_table\n"
            f'transform_table(vectors, {budget}, counts=counts).save("table.safetensors")'
        )
    return None


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def origin(rows: list[Data]) -> str:
    commits = ", ".join(sorted({(row["commit"] or "unknown")[:12] for row in rows}))
    machines = ", ".join(sorted({row["hardware"]["cpu"] for row in rows}))
    return (
        f"Measured on {machines}, at commit {commits}. Sizes are those of the packed tables, without a file's header."
    )
