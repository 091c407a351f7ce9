"""The table of docs/token-functions.md from the JSON that results/run_token_functions.py wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from marked import write_between_marks

HERE = Path(__file__).parent
FAMILIES = {
    "demo": "LSTM, tied output",
    "demo-untied": "LSTM, output with a table of its own",
    "txl-small": "Transformer-XL of two layers",
}
HEADER = "| row | parameters, M | seeds | valid | test | after rare words |\n|---|---:|---:|---:|---:|---:|"


def write_token_functions_page(folder: Path) -> None:
    described = {family["name"]: family for family in yaml.safe_load((HERE / "token_functions.yaml").read_text())}
    parts = [
        "\n".join(lines) for name, title in FAMILIES.items() for lines in [list(_group(folder, described[name], title))]
    ]
    write_between_marks(HERE.parent / "docs" / "token-functions.md", "token-functions", "\n\n".join(parts) + "\n")


def _group(folder: Path, family: dict[str, Any], title: str) -> Iterator[str]:
    runs = [json.loads(path.read_text()) for path in sorted((folder / family["name"]).glob("*.json"))]
    steps = family["common"]["train"]["steps"]
    yield f"### {title}: `{family['recipe']}`, {steps:,} steps\n"
    yield HEADER
    for row in family["rows"]:
        own = [run for run in runs if run["row"] == row["name"]]
        yield f"| {row['name']} | {_cells(own)} |" if own else f"| {row['name']} | – | not run | – | – | – |"


def _cells(runs: list[dict[str, Any]]) -> str:
    """Means over seeds, with each seed's number behind them where there are several."""
    rare = [run["after_rare_words"]["perplexity"] for run in runs if run["after_rare_words"]]
    numbers = [[run[f"{split}_perplexity"] for run in runs] for split in ("valid", "test")]
    return " | ".join(
        [
            f"{runs[0]['parameters']['total'] / 1e6:.3f}",
            ", ".join(str(run["seed"]) for run in runs),
            *map(_shown, [*numbers, rare]),
        ]
    )


def _shown(values: list[float]) -> str:
    if not values:
        return "–"
    each = f" ({', '.join(f'{value:.1f}' for value in values)})" if len(values) > 1 else ""
    return f"{mean(values):.1f}{each}"
