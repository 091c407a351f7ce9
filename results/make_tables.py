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

[minilm/](minilm/README.md) has the replacements of a trained sentence encoder's token table,
[benchmarks/](benchmarks/README.md) speed and memory.
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
        f"{result.get('test_unigram_perplexity', 0):.1f}",
    ]


def public_protocol(result: dict) -> str:
    """What the public Transformer-XL code's way to evaluate gives, where it was measured."""
    if "public_evaluation" not in result:
        return ""
    values = {split: result["public_evaluation"][split]["perplexity"] for split in ("valid", "test")}
    return f" Public protocol (10 streams, each from an empty memory): {values['valid']:.2f} / {values['test']:.2f}."


def section(folder: Path) -> str:
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if "test_bleu" in results[0]:
        return translation_section(folder)
    results.sort(key=lambda result: result["test_perplexity"])
    lines = [f"## {folder.name}", "", "| " + " | ".join(HEADER) + " |", "|---" + "|---:" * (len(HEADER) - 1) + "|"]
    lines += ["| " + " | ".join(row(result)) + " |" for result in results]
    lines.append("")
    lines += [origin(result) for result in results]
    lines += ["", f"![Validation perplexity]({draw_curves(folder, results)})"]
    return "\n".join(lines)


def draw_curves(folder: Path, results: list[dict]) -> str:
    """One picture of all validation curves of a folder; returns its path from here."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "torchdefine"  # the same file for the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for result in results:
        points = [(point["tokens"] / 1e6, point["perplexity"]) for point in result["curve"]]
        axes.plot(*zip(*points, strict=True), marker=".", markersize=3, linewidth=1, label=result["recipe"])
    axes.set(xlabel="million tokens", ylabel="validation perplexity", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    path = HERE / "figures" / f"{folder.name}.svg"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return str(path.relative_to(HERE))


def translation_section(folder: Path) -> str:
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    results.sort(key=lambda result: -result["test_bleu"])
    header = (*HEADER[:-1], "BLEU", "chrF", "sentences/s")
    lines = [f"## {folder.name}", "", "| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    for result in results:
        scores = [f"{result[key]:.2f}" for key in ("test_bleu", "test_chrf")]
        cells = [*row(result)[:-1], *scores, f"{result['decoded_sentences_per_second']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for result in results:
        test = result["evaluation"]["test"]
        signatures = f"BLEU {test['bleu_signature']}, chrF {test['chrf_signature']}"
        lines.append(f"{origin(result)} Scores on {result['data']['splits']['test']['pairs']:,} pairs: {signatures}.")
    best = results[0]
    lines += ["", f"### What `{best['recipe']}` makes of ten test sentences", "", *translation_table(best)]
    return "\n".join(lines)


def translation_table(result: dict) -> list[str]:
    rows = [f"| {t['source']} | {t['translation']} | {t['reference']} |" for t in result["translations"]]
    return ["| source | translation | reference |", "|---|---|---|", *rows]


def write_front_page(translator: dict) -> None:
    """The part of the project's README that speaks of a result, between its two marks."""
    path = HERE.parent / "README.md"
    before, rest = path.read_text().split("<!-- laptop -->\n")
    _, after = rest.split("<!-- /laptop -->\n")
    said = (
        f"After {translator['seconds'] / 60:.0f} minutes on two cores it has {translator['test_bleu']:.1f} BLEU on "
        "sentences of which neither side occurs in training. It is a small model, and it shows:\n\n"
    )
    table = "\n".join(translation_table(translator))
    path.write_text(f"{before}<!-- laptop -->\n{said}{table}\n<!-- /laptop -->\n{after}")


def origin(result: dict) -> str:
    """Where a result comes from, in one line."""
    hardware = result["hardware"].get("gpu") or result["hardware"]["cpu"]
    changed = [
        f"{section}.{name} {value}"
        for section, values in result["overrides"].items()
        for name, value in values.items()
        if section != "data"
    ]
    overrides = f" with {', '.join(changed)}" if changed else ""
    return (
        f"- `{result['recipe']}`{overrides}: text {result['data']['corpus']}, seed {result['seed']}, "
        f"{result['precision']} on {hardware}, torch {result['versions']['torch']}, "
        f"commit {(result['commit'] or 'unknown')[:12]}; "
        f"{result['evaluation']['test']['protocol']}.{public_protocol(result)}"
    )


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
    write_front_page(json.loads((HERE / "tatoeba" / "laptop.json").read_text()))


if __name__ == "__main__":
    main()
