"""Writes results/README.md from the JSON of the runs beside it: `make results`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from claims import claims_section
from curves import draw_curves
from marked import write_between_marks
from speed import training_speed
from stage_tables import all_stages

HERE = Path(__file__).parent
HEADER = (
    *("recipe", "unit", "context", "tables", "total M", "steps", "M tokens", "minutes", "valid", "test", "unigram"),
    "published test",
)

INTRODUCTION = """# Measured results

Written by `make results` from the JSON files in this folder; nothing here is typed. A file of a recipe is the
`result.json` of one run: recipe, overrides, seed, commit, hardware, versions, hashes of the text, and the curve. The
files in `inference/` were written by `results/inference_table.py`.

"unit", "context", "tables" and "total" are millions of parameters; "valid" and "test" are perplexities. "unigram" is
the test perplexity of a model that only counts words. "published test" is what the paper behind a recipe reports for
its whole training on its own text. Recipes that are not listed have no result here.

[minilm/](minilm/README.md) has the replacements of a trained sentence encoder's token table,
[benchmarks/](benchmarks/README.md) speed and memory.
"""


def row(result: dict, label: str) -> list[str]:
    parameters = result["parameters"]
    published = (result["settings"].get("published") or {}).get("test_perplexity")
    return [
        label,
        *(f"{parameters[part] / 1e6:.3f}" for part in ("define", "context", "input_output", "total")),
        f"{result['steps']:,}",
        f"{result['tokens'] / 1e6:.1f}",
        f"{result['seconds'] / 60:.1f}",
        f"{result['valid_perplexity']:.2f}",
        f"{result['test_perplexity']:.2f}",
        f"{result.get('test_unigram_perplexity', 0):.1f}",
        "–" if published is None else f"{published}",
    ]


def labels(results: list[dict]) -> list[str]:
    """The recipes' names, and for those that were run more than once what is different between their runs."""
    found = []
    for result in results:
        twins = [other for other in results if other["recipe"] == result["recipe"]]
        differs = [
            f"{section}.{name} {value}"
            for section, values in result["settings"].items()
            if isinstance(values, dict) and section not in ("published", "data")
            for name, value in values.items()
            if any(twin["settings"].get(section, values).get(name, value) != value for twin in twins)
        ]
        found.append(", ".join([f"`{result['recipe']}`", *differs]))
    return found


def full_length(result: dict) -> str:
    """What the recipe's own number of epochs would take at the speed of this run, where it was cut short."""
    from torchdefine.recipe import load_recipe

    epochs, whole = result["settings"]["train"].get("epochs"), load_recipe(result["recipe"]).train.epochs
    if not epochs or not whole or epochs >= whole:
        return ""
    minutes = result["seconds"] / 60 * whole / epochs
    return f" The recipe's {whole:g} epochs would take {minutes:.0f} minutes at this speed."


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
    named = labels(results)
    lines += ["| " + " | ".join(row(*pair)) + " |" for pair in zip(results, named, strict=True)]
    lines.append("")
    lines += [origin(result) for result in results]
    labels_in_picture = [name.replace("`", "").replace(", ", "\n   ") for name in named]
    picture = draw_curves(folder.name, dict(zip(labels_in_picture, results, strict=True)))
    lines += ["", f"![Validation perplexity]({picture})"]
    return "\n".join(lines)


def translation_section(folder: Path) -> str:
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    results.sort(key=lambda result: -result["test_bleu"])
    others = sorted({name for result in results for name in result.get("also", {})})
    elsewhere = [f"{name}, {score}" for name in others for score in ("BLEU", "chrF")]
    header = (*HEADER[:-2], "tokens/s", "BLEU", "chrF", *elsewhere, "sentences/s")
    lines = [f"## {folder.name}", "", "| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    for result in results:
        scores = [f"{result[key]:.2f}" for key in ("test_bleu", "test_chrf")]
        for name in others:
            found = result.get("also", {}).get(name)
            scores += ["not run"] * 2 if found is None else [f"{found[key]:.2f}" for key in ("bleu", "chrf")]
        speeds = f"{training_speed(result):,.0f}", f"{result['decoded_sentences_per_second']:.1f}"
        cells = [*row(result, f"`{result['recipe']}`")[:-2], speeds[0], *scores, speeds[1]]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for result in results:
        test = result["evaluation"]["test"]
        signatures = f"BLEU {test['bleu_signature']}, chrF {test['chrf_signature']}"
        lines.append(f"{origin(result)} Scores on {result['data']['splits']['test']['pairs']:,} pairs: {signatures}.")
    lines += [
        "",
        "tokens/s are those of training, the median over the stretches between two log lines; sentences/s those of the "
        "search on the test set, with the units computed.",
    ]
    picture = draw_curves(folder.name, {result["recipe"]: result for result in results})
    lines += ["", f"![Validation perplexity]({picture})"]
    best = results[0]
    lines += ["", f"### What `{best['recipe']}` makes of ten test sentences", "", *translation_table(best)]
    return "\n".join(lines)


def translation_table(result: dict) -> list[str]:
    rows = [f"| {t['source']} | {t['translation']} | {t['reference']} |" for t in result["translations"]]
    return ["| source | translation | reference |", "|---|---|---|", *rows]


def write_front_page(translator: dict) -> None:
    """The part of the project's README that speaks of a result."""
    said = (
        f"After {translator['seconds'] / 60:.0f} minutes on two cores it has {translator['test_bleu']:.1f} BLEU on "
        "sentences of which neither side occurs in training. It is a small model, and it shows:\n\n"
    )
    write_between_marks(HERE.parent / "README.md", "laptop", said + "\n".join(translation_table(translator)))


def write_translation_page(folder: Path) -> None:
    """The part of docs/translation.md that compares a translator with and without DeFINE."""
    names = ("transformer", "transformer-define")
    results = [json.loads((folder / f"{name}.json").read_text()) for name in names]
    steps = {result["steps"] for result in results}
    assert len(steps) == 1, "The two were not trained equally long."
    minutes = " and ".join(f"{result['seconds'] / 60:.1f}" for result in results)
    lines = [
        f"Each was trained for {steps.pop():,} steps, {results[0]['tokens'] / 1e6:.0f} M target tokens, in "
        f"{minutes} minutes of one {results[0]['hardware']['gpu']}, and averages no checkpoints:",
        "",
        "| recipe | parameters | Europarl, BLEU | chrF | newstest2014, BLEU | chrF |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        news = result["also"]["newstest2014"]
        scores = (result["test_bleu"], result["test_chrf"], news["bleu"], news["chrf"])
        cells = [f"`{result['recipe']}`", f"{result['parameters']['total'] / 1e6:.1f} M", *(f"{s:.2f}" for s in scores)]
        lines.append("| " + " | ".join(cells) + " |")
    write_between_marks(HERE.parent / "docs" / "translation.md", "europarl", "\n".join(lines))


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
        f"{result['evaluation']['test']['protocol']}.{public_protocol(result)}{full_length(result)}"
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
    return "\n".join([*lines, ""])


def look_up_section(folder: Path) -> str:
    """What input vectors cost when they are computed, cached and compressed."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), reverse=True)]
    header = ("recipe", "table", "vectors", "MB", "variance lost", "by frequency", "test", "ms/batch", "look-up ms")
    lines = ["## Looking vectors up", "", "| " + " | ".join(header) + " |", "|---|---:|---" + "|---:" * 6 + "|"]
    for result in results:
        for made in result["rows"]:
            cells = ["not run"] * 6
            if "not_run" not in made:
                cells = [
                    f"{made['bytes'] / 1e6:.2f}",
                    *(f"{made[name]:.2%}" for name in ("lost", "lost_by_frequency")),
                    *(f"{made[name]:.2f}" for name in ("perplexity", "ms_per_batch")),
                    f"{made['look_up_ms']:.3f}",
                ]
            lines.append(
                "| " + " | ".join([f"`{result['recipe']}`", str(result["map_dim"]), made["name"], *cells]) + " |"
            )
    lines += [
        "",
        '"computed" needs the map and the unit, the others only what is listed; the output layer is tied to the map '
        "and needs it anyway. codes, product-codes, svd and bits are made to equal bytes. torchao's int4 is counted as "
        'if it were packed, which it is not in memory. "by frequency" weighs a token by its count to the power of ¾. '
        "Look-ups are of 9,000 tokens at once. A whole batch takes as long as the host takes to start its kernels, and "
        f"so differs by chance: {_apart_by_chance(results)}",
        "",
        *(_codes_beside_k_means(result) for result in results),
        "",
    ]
    for result in results:
        training, hardware = result["training"], result["hardware"]
        lines.append(
            f"- `{result['recipe']}`: {training['steps']:,} steps, {training['tokens'] / 1e6:.1f} M tokens of "
            f"{training['data']['corpus']} in {training['seconds']:.0f} s; {result['protocol']}; timed on "
            f"{result['timed']}, {hardware.get('gpu') or hardware['cpu']}, "
            f"commit {(result['commit'] or 'unknown')[:12]}."
        )
    return "\n".join(lines)


def _apart_by_chance(results: list[dict[str, Any]]) -> str:
    """Two rows of a standard table do the same work: it is its own cache."""
    apart = []
    for result in results:
        rows = {row["name"]: row for row in result["rows"]}
        if "standard" in result["recipe"]:
            times = sorted(rows[name]["ms_per_batch"] for name in ("computed", "cached, float32"))
            apart.append(
                f"{times[0]:.1f} and {times[1]:.1f} ms for the same work, computed and cached, of a standard table"
            )
    return "; ".join(apart) + "." if apart else "no row shows by how much."


def _codes_beside_k_means(result: dict[str, Any]) -> str:
    rows = {row["name"]: row for row in result["rows"]}
    codes, means = rows["codes 32 × 16"], rows["product-codes"]
    if "not_run" in codes or "not_run" in means:
        return f"- `{result['recipe']}`: learnt codes and product quantisation by K-means were not both run."
    word = "less" if codes["lost"] < means["lost"] else "more"
    return (
        f"- `{result['recipe']}`: at equal bytes, learnt codes lose {word} of the variance than product quantisation "
        f"by K-means ({codes['lost']:.1%} beside {means['lost']:.1%}; by frequency {codes['lost_by_frequency']:.1%} "
        f"beside {means['lost_by_frequency']:.1%}), and their perplexity is {codes['perplexity']:.2f} beside "
        f"{means['perplexity']:.2f}."
    )


def main() -> None:
    others = ("benchmarks", "minilm", "inference", "wiki78m")
    folders = sorted(p for p in HERE.iterdir() if p.is_dir() and p.name not in others and any(p.glob("*.json")))
    page = "\n".join(
        [
            INTRODUCTION,
            *(section(folder) + "\n" + correlation_section(folder) for folder in folders),
            all_stages(HERE / "wiki78m"),
            *([claims_section(HERE / "wiki78m")] if (HERE / "wiki78m").is_dir() else []),
            look_up_section(HERE / "inference"),
            "",
        ]
    )
    (HERE / "README.md").write_text(page)
    write_front_page(json.loads((HERE / "tatoeba" / "laptop.json").read_text()))
    write_translation_page(HERE / "europarl")


if __name__ == "__main__":
    main()
