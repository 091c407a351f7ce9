"""Classifiers made of masked language models: writes results/masked/downstream/*.json, and the table of docs/masked.md.

    python results/masked_tables.py --run runs/laptop --wordnet DICT                  # fine-tune, three seeds
    python results/masked_tables.py --run runs/laptop --wordnet DICT --from-scratch   # its sizes, with fresh weights
    python results/masked_tables.py                                                   # the table alone

The runs' own results are the files of results/masked. A recipe without one is shown as not run.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from marked import write_between_marks
from provenance import short_commit

from torchdefine import load_recipe, load_run
from torchdefine.files import write_json
from torchdefine.run.environment import describe_environment
from torchdefine.task import find_task

HERE = Path(__file__).parent
RUNS, PAGE = HERE / "masked", HERE.parent / "docs" / "masked.md"
DOWNSTREAM = RUNS / "downstream"
FAMILIES = ("laptop", "wiki78m-8k", "wiki78m-32k", "wiki78m-128k")
TABLES = {
    "standard": "standard table",
    "albert": "narrow table, two projections (ALBERT)",
    "narrow": "narrow table, one projection",
    "define": "narrow table, DeFINE",
}
HEADER = ("text, subwords", "token table", "encoder M", "tables and unit M", "total M", "masked perplexity", "accuracy")


def fine_tune(run_folder: Path, wordnet: Path, *, from_scratch: bool, into: Path = DOWNSTREAM) -> None:
    """Export a run, make classifiers of the folder by the example, and keep what they reached."""
    run = load_run(run_folder, device="cpu")
    example = runpy.run_path(str(HERE.parent / "examples" / "gloss_classifier.py"))
    with tempfile.TemporaryDirectory() as scratch:
        run.export(folder := Path(scratch) / "model", "transformers")
        options = [str(folder), "--wordnet", str(wordnet), *(["--from-scratch"] if from_scratch else [])]
        found = example["main"](options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"format_version": 1, "recipe": run.recipe.name, "pretrained_by": run.result["run"]}
    name = run.recipe.name.removeprefix("masked/") + ("-from-scratch" if from_scratch else "")
    into.mkdir(parents=True, exist_ok=True)
    write_json(into / f"{name}.json", {**about, **describe_environment(device), "results": found})


def reached(name: str) -> str:
    """Mean and range of the accuracies, where there are some."""
    path = DOWNSTREAM / f"{name}.json"
    if not path.exists():
        return "not run"
    accuracies = json.loads(path.read_text())["results"]["accuracies"]
    return f"{statistics.mean(accuracies):.1%} ({min(accuracies):.1%} – {max(accuracies):.1%})"


def row(family: str, table: str) -> list[str]:
    recipe = load_recipe(recipe_name(family, table))
    model, size = find_task("masked").count(recipe)
    parts = model.parameters_by_part()
    path = RUNS / f"{recipe.name.removeprefix('masked/')}.json"
    perplexity = f"{json.loads(path.read_text())['test_perplexity']:.1f}" if path.exists() else "not run"
    millions = (parts["context"], parts["total"] - parts["context"], parts["total"])
    text = f"{recipe.data.corpus.removesuffix('-shuffled')}, {size:,}"
    return [text, TABLES[table], *(f"{part / 1e6:.2f}" for part in millions), perplexity, reached(path.stem)]


def recipe_name(family: str, table: str) -> str:
    """The laptop's main recipe is ALBERT's."""
    return "masked/laptop" if (family, table) == ("laptop", "albert") else f"masked/{family}-{table}"


def whole_table() -> str:
    rows = [row(family, table) for family in FAMILIES for table in TABLES]
    lines = ["| " + " | ".join(HEADER) + " |", "|---|---" + "|---:" * (len(HEADER) - 2) + "|"]
    lines += ["| " + " | ".join(one) + " |" for one in rows]
    return "\n".join([*lines, "", *notes()])


def notes() -> list[str]:
    stored = [json.loads(path.read_text()) for path in sorted(DOWNSTREAM.glob("*.json"))]
    if not stored:
        return []
    found, last = stored[0]["results"], stored[-1]
    seeds = len(found["settings"]["seeds"])
    commits = ", ".join(sorted({short_commit(one["commit"]) for one in stored}))
    return [
        f"Accuracy: {found['classes']} classes, {found['trained on']:,} definitions for training and "
        f"{found['measured on']:,} for the test. Mean and range of {seeds} seeds of fine-tuning, with one pretraining.",
        f"Without pretraining, the model of `masked/laptop` reaches {reached('laptop-from-scratch')}. The most "
        f"frequent class has {found['most frequent class']:.1%} of the definitions.",
        f"{last['hardware']['cpu']}, torch {last['versions']['torch']}, commits of the classifiers {commits}.",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="RUN", help="a trained run to make classifiers of")
    parser.add_argument("--wordnet", type=Path, metavar="DICT", help="as examples/gloss_classifier.py takes it")
    parser.add_argument("--from-scratch", action="store_true")
    options = parser.parse_args(arguments)
    if options.run:
        fine_tune(options.run, options.wordnet, from_scratch=options.from_scratch)
    else:
        write_between_marks(PAGE, "masked tables", whole_table())


if __name__ == "__main__":
    main()
