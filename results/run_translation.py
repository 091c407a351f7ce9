"""Train translators one after another on one bitext, score them on further test sets too, and keep a JSON of each.

    python results/run_translation.py europarl/transformer europarl/transformer-define --data europarl/ \
        [--also newstest2014/ …] [--out results/europarl]

A recipe that has its JSON already is not run again, and one that was broken off goes on. `make results` turns the files
into a table.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml
from refusing import run_or_refuse

from torchdefine import train
from torchdefine.data import resolve_corpus
from torchdefine.data.sources import find_bitext
from torchdefine.errors import UserError
from torchdefine.files import write_json
from torchdefine.recipe import load_recipe, merged
from torchdefine.run.folder import RunFolder
from torchdefine.training.progress import LineReporter

HERE = Path(__file__).parent


def run_recipe(recipe: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the JSON of a recipe says: its result, and its scores on the other test sets by their names."""
    folder = options.runs / recipe.replace("/", "-")
    reporter = LineReporter(seconds_between=20)
    begun = RunFolder(folder).exists()
    changes = merged({"data": {"corpus": str(options.data)}}, options.changes)
    run = train(recipe, out=folder, resume=begun, reporter=reporter, **changes)
    record: dict[str, Any] = {**run.result, "also": {}}
    for bitext in options.also:
        scores = run.evaluate("test", data=bitext)
        record["also"][Path(bitext).resolve().name] = scores.to_dict()
    return record


def check_others(recipe: str, options: argparse.Namespace) -> None:
    """What is wrong with another test set must not be found out when a model has been trained."""
    languages = load_recipe(recipe, options.changes).data
    for bitext in options.also:
        path = resolve_corpus(bitext, parallel=True)
        files = find_bitext(path, languages.source, languages.target, require_train=False)
        if "test" not in files:
            raise UserError(f"{bitext} has no test text: it has {', '.join(files)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--data", required=True, help="a folder with a bitext")
    parser.add_argument("--also", nargs="*", default=[], help="folders with further test sets")
    parser.add_argument("--out", type=Path, default=HERE / "europarl")
    parser.add_argument("--runs", type=Path, default=Path("runs/translation"))
    parser.add_argument("--changes", type=yaml.safe_load, default={}, help="settings for all, as YAML, for a trial")
    options = parser.parse_args()
    for recipe in options.recipes:
        check_others(recipe, options)
    for recipe in options.recipes:
        path = options.out / f"{recipe.split('/')[-1]}.json"
        if path.exists():
            print(f"{path} exists; {recipe} is not run again.", flush=True)
            continue
        record = run_recipe(recipe, options)
        write_json(path, record)
        elsewhere = "".join(f", {name} {scores['bleu']:.2f}" for name, scores in record["also"].items())
        print(f"{recipe}: BLEU {record['test_bleu']:.2f}{elsewhere}", flush=True)


if __name__ == "__main__":
    run_or_refuse(main)
