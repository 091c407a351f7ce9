"""Writes results/README.md from the JSON of the runs beside it: `make results`."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
HEADER = ("recipe", "unit", "context", "tables", "total M", "steps", "M tokens", "minutes", "valid", "test", "unigram")

INTRODUCTION = """# Measured results

Written by `make results` from the JSON files in this folder; nothing here is typed. Each file is the `result.json` of
one run: recipe, overrides, seed, commit, hardware, versions, hashes of the text, and the curve. Parameters in millions.
"unigram" is the test perplexity of a model that only counts words. Recipes that are not listed have not been run.
"""


def row(result: dict) -> list[str]:
    parameters = result["parameters"]
    return [
        f"`{result['recipe']}`",
        *(f"{parameters[part] / 1e6:.3f}" for part in ("define", "context", "input_output", "total")),
        f"{result['steps']:,}",
        f"{result['tokens'] / 1e6:.1f}",
        f"{result['seconds'] / 60:.1f}",
        f"{result['valid_perplexity']:.2f}",
        f"{result['test_perplexity']:.2f}",
        f"{result['test_unigram_perplexity']:.1f}",
    ]


def section(folder: Path) -> str:
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    results.sort(key=lambda result: result["test_perplexity"])
    lines = [f"## {folder.name}", "", "| " + " | ".join(HEADER) + " |", "|---" + "|---:" * (len(HEADER) - 1) + "|"]
    lines += ["| " + " | ".join(row(result)) + " |" for result in results]
    lines.append("")
    for result in results:
        hardware = result["hardware"].get("gpu") or result["hardware"]["cpu"]
        lines.append(
            f"- `{result['recipe']}`: text {result['data']['corpus']}, seed {result['seed']}, {result['precision']} on "
            f"{hardware}, torch {result['versions']['torch']}, commit {(result['commit'] or 'unknown')[:12]}; "
            f"{result['evaluation']['test']['protocol']}."
        )
    return "\n".join(lines)


def correlation_section(folder: Path) -> str:
    """What the maps of docs/maps.md show, in numbers: of the finished vectors, and along the unit."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    looked_at = [result for result in results if "correlation" in result]
    if not looked_at:
        return ""
    header = (
        "recipe",
        "state",
        "stage",
        "dimensions",
        "mean abs. cosine",
        "above 0.25",
        "effective rank",
        "distance to standard",
    )
    lines = ["", "### Correlation of dimensions", "", "| " + " | ".join(header) + " |"]
    lines.append("|---|---|---|" + "---:|" * (len(header) - 3))
    for result in looked_at:
        for state, stages in result["correlation"].items():
            for stage, numbers in stages.items():
                if state.startswith("untrained") and stage != "finished":
                    continue
                distance = numbers.get("distance_to_standard")
                cells = [
                    f"`{result['recipe']}`",
                    state,
                    stage,
                    str(numbers["dimensions"]),
                    f"{numbers['mean_off_diagonal']:.4f}",
                    f"{numbers['share_above_0.25']:.1%}",
                    f"{numbers['effective_rank']:.1f}",
                    f"{distance:.4f}" if distance is not None else "–",
                ]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    folders = sorted(
        p for p in HERE.iterdir() if p.is_dir() and p.name not in ("benchmarks", "minilm") and any(p.glob("*.json"))
    )
    page = "\n".join([INTRODUCTION, *(section(folder) + "\n" + correlation_section(folder) for folder in folders)])
    (HERE / "README.md").write_text(page)


if __name__ == "__main__":
    main()
