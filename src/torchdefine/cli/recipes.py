"""Commands that start from a recipe."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdefine.cli.recipe_page import recipe_facts, recipe_page
from torchdefine.cli.shared import Command, add_device, data_settings, print_json
from torchdefine.errors import UserError
from torchdefine.recipe import Recipe, load_recipe, recipe_names, recipes_below
from torchdefine.recipe.settings import explain

if TYPE_CHECKING:
    from torchdefine.run.loaded import Run

RECIPES = """  torchdefine recipes                              the list, with parameters and published numbers
  torchdefine recipes demo                         those whose names begin with demo
  torchdefine recipes demo/standard > mine.yaml    one recipe, as a file to change
  torchdefine train mine.yaml"""

TRAINING = """  torchdefine train demo/adaptive-define --out runs/first
  torchdefine train demo/adaptive-define --data my_texts/ --out runs/second --optim.lr 3e-3 --train.steps 2000
  torchdefine train mine.yaml --out runs/third           a recipe of your own
  torchdefine train --out runs/third --resume            go on where it was interrupted"""


ENCODING = """  torchdefine encode table1a/r3 --data my_texts/ --out my_tokens/
  torchdefine train table1a/r3 --data my_tokens/           here, or on a machine that the folder was taken to

  The words of a text are counted and numbered once, by the data settings of a recipe, and kept in a cache. For a large
  text and a machine whose time is expensive, this does it beforehand: my_tokens/ has the tokens and their vocabulary,
  and takes the place of the text for every recipe with the same data settings."""


def add_commands(command: Command) -> None:
    """The commands that start from a recipe."""
    sub = command(
        "recipes", _recipes, "List what there is to train, or show one recipe with all its settings.", RECIPES
    )
    sub.add_argument(
        "recipe", nargs="?", help="a recipe's name, or a YAML file, to show; or the beginning of names, such as demo"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("train", _train, "Train a recipe on a text.", TRAINING, _settings_help())
    sub.add_argument(
        "recipe",
        nargs="?",
        help="a recipe's name, or a YAML file; with --resume not needed: the run has its own",
    )
    sub.add_argument(
        "--data", help="a folder with train, valid and test text, one that `encode` wrote, or a named corpus"
    )
    sub.add_argument("--out", help="the run's folder (default: a new one under runs/)")
    sub.add_argument("--resume", action="store_true", help="go on with the run in --out")
    add_device(sub)
    sub.add_argument("--tensorboard", action="store_true", help="write TensorBoard logs into the run's folder too")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")

    sub = command("encode", _encode, "Turn a text into tokens beforehand, in a folder that can be moved.", ENCODING)
    sub.add_argument("recipe", help="the recipe that will be trained, for its data settings: a name, or a YAML file")
    sub.add_argument("--data", help="a folder with train, valid and test text, or a named corpus")
    sub.add_argument("--out", required=True, help="a new folder for the tokens")

    sub = command(
        "demo", _demo, "Train five small language models on the shipped text and compare them: a few minutes."
    )
    sub.add_argument("--out", default="runs/demo", help="where the runs and the report go (default: runs/demo)")


def _settings_help() -> str:
    """Every setting that a command line may change, section by section."""
    lines = [
        "settings:",
        "  Any setting of the recipe can be changed by --SECTION.NAME VALUE, as in --optim.lr 1e-3.",
        "  […] is the value where the recipe sets none; `torchdefine recipes NAME` shows a recipe's own.",
    ]
    section = ""
    for name, default, explanation in explain(Recipe):
        if name.split(".")[0] != section:
            section = name.split(".")[0]
            lines += ["", f"{section}:"]
        lines.append(f"  --{name:<28} {explanation} [{default}]")
    return "\n".join(lines)


def _recipes(options: argparse.Namespace, _: dict[str, Any]) -> None:
    below = recipes_below(options.recipe or "")
    if options.recipe is not None and not below:
        recipe = load_recipe(options.recipe)
        if options.json:
            print_json(recipe_facts(recipe))
        else:
            print(recipe_page(recipe))
        return
    recipes = [load_recipe(name) for name in below or recipe_names()]
    if options.json:
        print_json([{"name": r.name, "description": r.description, "published": r.published} for r in recipes])
        return
    _print_recipes(recipes)


def _print_recipes(recipes: list[Recipe]) -> None:
    """Our own first, which are smaller, then those with published numbers."""
    from torchdefine.analysis.tables import print_table

    own = [recipe for recipe in recipes if not recipe.published]
    published = [recipe for recipe in recipes if recipe.published]
    if own:
        smallest = "demo/… are the smallest: minutes on two cores, with the text that comes with the package."
        print_table(
            ["recipe", "what it trains"],
            [[recipe.name, recipe.description] for recipe in own],
            note=smallest * any(recipe.name.startswith("demo/") for recipe in own) + "\n",
        )
    if published:
        numbers = ("total", "valid_perplexity", "test_perplexity", "bleu_newstest2014")
        print_table(
            ["recipe", "what it trains", "M parameters", "valid", "test", "BLEU"],
            [
                [
                    recipe.name,
                    recipe.description,
                    *(f"{recipe.published[key]:.2f}" if key in recipe.published else "–" for key in numbers),
                ]
                for recipe in published
            ],
            note="Numbers are published ones, of whole trainings by the paper's authors, or of AWD-LSTM and of "
            "mixtures; what we measured ourselves is in the project's results.\n",
        )
    print("`torchdefine recipes RECIPE` shows its settings, `torchdefine params RECIPE` builds the model and counts.")


def _train(options: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from torchdefine.run import train
    from torchdefine.training.progress import TensorBoardReporter, default_reporter, shown_perplexity, work_bar
    from torchdefine.training.result import best_before_the_end, shortfall

    data = data_settings(options, overrides.pop("data", {}))
    reporter: Any = default_reporter()
    if options.tensorboard:
        if not options.out:
            raise UserError("TensorBoard logs go into the run's folder: name it with --out.")
        reporter = TensorBoardReporter(reporter, str(Path(options.out) / "tensorboard"))
    with work_bar("reading the text") as progress:
        run = train(
            options.recipe,
            data=data,
            out=options.out,
            resume=options.resume,
            device=options.device,
            reporter=reporter,
            progress=progress,
            **overrides,
        )
    if os.environ.get("RANK", "0") != "0":  # under torchrun one process speaks for all
        return
    result = run.result
    trouble = shortfall(result)
    if options.json:
        print_json(result)
        if trouble:
            print(trouble, file=sys.stderr)
        return
    if "test_bleu" in result:
        print(f"test BLEU {result['test_bleu']:.2f}, chrF {result['test_chrf']:.2f}")
    for split in ("valid", "test"):
        if f"{split}_perplexity" in result:
            unigram = result.get(f"{split}_unigram_perplexity")
            beside = f" (unigram {unigram:,.1f})" if unigram else ""
            print(f"{split} perplexity {shown_perplexity(result[f'{split}_perplexity'])}{beside}")
    if earlier := best_before_the_end(result):
        print(earlier)
    _print_caveats(run)
    print(f"The run is in {run.folder.path}.")
    if trouble:
        print(trouble)


def _encode(options: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from torchdefine.build import open_corpus
    from torchdefine.run.describe_data import describe_tokens
    from torchdefine.run.starting import changes_by_section, wanted_recipe
    from torchdefine.training.progress import work_bar

    data = data_settings(options, overrides.pop("data", {}))
    recipe, _ = wanted_recipe(options.recipe, changes_by_section(data, overrides), None, resume=False)
    if recipe.task == "translation":
        raise UserError("Only texts for language models are encoded beforehand: BLEU needs the sentences themselves.")
    with work_bar("reading the text") as progress:
        corpus = open_corpus(recipe.data, progress, out=options.out)
    for sentence in describe_tokens(corpus, recipe):
        print(sentence)
    amounts = ", ".join(f"{split} {len(file):,}" for split, file in corpus.splits.items())
    size = sum(path.stat().st_size for path in corpus.folder.iterdir()) / 1e6
    print(f"The tokens ({amounts}; {size:,.1f} MB) are in {corpus.folder}: name it as --data in the place of the text.")


def _print_caveats(run: Run) -> None:
    """What a reader must know about the numbers of a run that has just ended, or why there are none."""
    from torchdefine.training.evaluate import short_stream_warning

    evaluated, folder = run.result["evaluation"], shlex.quote(str(run.folder.path))
    if not evaluated:
        named = "FOLDER" if run.recipe.task == "translation" else "FILE"
        print(
            "Nothing was measured, for there is neither a valid nor a test text: add one to the folder of the text, or "
            f"measure another by `torchdefine eval {folder} --data {named}`."
        )
    if run.recipe.task == "translation":  # one sentence at a time, whatever their number
        return
    for split, one in evaluated.items():
        short = short_stream_warning(one["tokens"], run.recipe.eval.batch_size)
        command = f"torchdefine eval {folder} --split {split} --batch-size 1"
        if short:
            print(f"{short} `{command}` is exact.")


def _demo(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.demo import run_demo

    run_demo(Path(options.out))
