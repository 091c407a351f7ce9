"""The table of all runs of recipes on one text, where they come from, and their curves."""

from __future__ import annotations

import json
from pathlib import Path

from curves import draw_curves
from old_names import read_run, settings_of
from provenance import short_commit

from torchdefine.recipe import load_recipe

NO_SETTINGS = ("data", "published")
HEADER = (
    *("recipe", "unit", "context", "tables", "total M", "steps", "M tokens", "minutes", "valid", "test", "unigram"),
    "published test",
)


def recipe_section(folder: Path) -> str:
    results = [read_run(path) for path in sorted(folder.glob("*.json"))]
    results.sort(key=lambda result: result["test_perplexity"])
    lines = [f"## {folder.name}", "", "| " + " | ".join(HEADER) + " |", "|---" + "|---:" * (len(HEADER) - 1) + "|"]
    named = labels(results)
    lines += ["| " + " | ".join(row(*pair)) + " |" for pair in zip(results, named, strict=True)]
    lines.append("")
    lines += origins(results)
    labels_in_picture = [name.replace("`", "").replace(", ", "\n   ") for name in named]
    picture = draw_curves(folder.name, dict(zip(labels_in_picture, results, strict=True)))
    lines += ["", f"![Validation perplexity]({picture})"]
    return "\n".join(lines)


def row(result: dict, label: str) -> list[str]:
    parameters = result["parameters"]
    published = load_recipe(result["recipe"]).published.get("test_perplexity")
    return [
        label,
        *(f"{parameters[part] / 1e6:.3f}" for part in ("define", "context", "input_output", "total")),
        f"{result['steps']:,}",
        f"{result['tokens'] / 1e6:.1f}",
        "–" if result.get("shared_device") else f"{result['seconds'] / 60:.1f}",
        f"{result['valid_perplexity']:.2f}",
        f"{result['test_perplexity']:.2f}",
        f"{result['test_unigram_perplexity']:.1f}" if "test_unigram_perplexity" in result else "–",
        "–" if published is None else f"{published}",
    ]


def labels(results: list[dict]) -> list[str]:
    """The recipes' names, and for those that were run more than once what is different between their runs."""
    found = []
    for result in results:
        twins = [other for other in results if other["recipe"] == result["recipe"]]
        differs = [
            f"{section}.{name} {json.dumps(setting(result, section, name))}"
            for section in sections(result)
            for name in sorted({name for twin in twins for name in twin["settings"][section]})
            if any(setting(twin, section, name) != setting(result, section, name) for twin in twins)
        ]
        found.append(", ".join([f"`{result['recipe']}`", *differs]))
    return found


def sections(result: dict) -> list[str]:
    """Those of the recipe but its text."""
    return [name for name, value in result["settings"].items() if isinstance(value, dict) and name not in NO_SETTINGS]


def setting(result: dict, section: str, name: str) -> object:
    """A run's setting; None where its kind of part has no such one."""
    return result["settings"][section].get(name)


def origins(results: list[dict]) -> list[str]:
    """Where results come from: in one paragraph what all have in common, in a line each what they have not."""
    facts = [origin_facts(result) for result in results]
    common = [fact for fact in facts[0] if all(fact in found for found in facts)]
    lines = ["All rows: " + "; ".join(common) + "."] if common and len(results) > 1 else []
    for result, found in zip(results, facts, strict=True):
        own = [fact for fact in found if fact not in common or len(results) == 1]
        if own:
            lines += [""] * (len(lines) == 1) + [f"- `{result['recipe']}`: {'; '.join(own)}."]
    return lines


def origin_facts(result: dict) -> list[str]:
    hardware = result["hardware"].get("gpu") or result["hardware"]["cpu"]
    facts = [
        changes(result),
        f"text {result['data']['corpus']}",
        f"seed {result['seed']}",
        f"{result['precision']} on {hardware}, torch {result['versions']['torch']}",
        f"commit {short_commit(result['commit'])}",
        result["evaluation"]["test"]["protocol"],
        scoring(result),
        public_protocol(result),
        "trained in parallel with other runs, so its time does not compare"
        if result.get("shared_device")
        else full_length(result),
    ]
    return [fact for fact in facts if fact]


def changes(result: dict) -> str:
    """What was set otherwise than in the recipe as it is now."""
    recipe = {"settings": settings_of(load_recipe(result["recipe"]))}
    changed = [
        f"{section}.{name} {json.dumps(setting(result, section, name))}"
        for section in sections(result)
        for name in result["settings"][section].keys() | recipe["settings"][section].keys()
        if setting(result, section, name) != setting(recipe, section, name)
    ]
    return f"with {', '.join(sorted(changed))}" if changed else ""


def scoring(result: dict) -> str:
    """How translations were scored, where there are any."""
    test = result["evaluation"]["test"]
    if "bleu_signature" not in test:
        return ""
    pairs = result["data"]["splits"]["test"]["pairs"]
    return f"scores on {pairs:,} pairs: BLEU {test['bleu_signature']}, chrF {test['chrf_signature']}"


def public_protocol(result: dict) -> str:
    """What the public Transformer-XL code's way to evaluate gives, where it was measured."""
    if "public_evaluation" not in result:
        return ""
    values = {split: result["public_evaluation"][split]["perplexity"] for split in ("valid", "test")}
    return f"public protocol (10 streams, each from an empty memory) {values['valid']:.2f} / {values['test']:.2f}"


def full_length(result: dict) -> str:
    """What the recipe's own number of epochs would take at the speed of this run, where it was cut short."""
    epochs, whole = result["settings"]["train"].get("epochs"), load_recipe(result["recipe"]).train.epochs
    if not epochs or not whole or epochs >= whole:
        return ""
    minutes = result["seconds"] / 60 * whole / epochs
    return f"the recipe's {whole:g} epochs would take {minutes:.0f} minutes at this speed"
