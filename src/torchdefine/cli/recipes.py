"""Commands that show recipes: the list, one as a page, its parameters."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchdefine.cli.shared import Command, add_json, data_settings, print_json
from torchdefine.errors import UserError

if TYPE_CHECKING:
    from torchdefine.analysis.parameters import ParameterReport
    from torchdefine.recipe import Recipe

RECIPES = """  torchdefine recipes                              the list, with parameters and published numbers
  torchdefine recipes demo                         those whose names begin with demo
  torchdefine recipes demo/standard > mine.yaml    one recipe, as a file to change
  torchdefine train mine.yaml"""

COUNTING = """  torchdefine params table1a/r3
  torchdefine params table1a/r3 --data my_texts/    with the vocabulary of another text
  torchdefine params runs/first                     a run's model, with its own vocabulary
  torchdefine params demo/adaptive-define --unit.depth 5 --plan

Settings of data, embedding, unit, source, context and output change the parameters: `torchdefine train --help`
explains them all."""

COMMENTS_FROM = 44
"""Column of the defaults beside settings that differ from them."""
PUBLISHED = {
    "total": "M parameters",
    "valid_perplexity": "valid",
    "test_perplexity": "test",
    "bleu_newstest2014": "BLEU",
}


def add_commands(command: Command) -> None:
    """The commands that show recipes."""
    sub = command(
        "recipes", _recipes, "List what there is to train, or show one recipe with all its settings.", RECIPES
    )
    sub.add_argument(
        "recipe", nargs="?", help="a recipe's name, or a YAML file, to show; or the beginning of names, such as demo"
    )
    add_json(sub)

    sub = command("params", _params, "Show a recipe's parameters by part, ours beside the paper's.", COUNTING)
    sub.add_argument("recipe", help="a recipe's name, a YAML file, or a run's folder")
    sub.add_argument("--data", help="a folder with text, or a named corpus, whose vocabulary to count with")
    sub.add_argument("--plan", action="store_true", help="print the layers of the unit too")
    add_json(sub)


def _recipes(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.recipe import load_recipe, recipe_names, recipes_below

    below = recipes_below(options.recipe or "")
    if options.recipe is not None and not below:
        recipe = load_recipe(options.recipe)
        if options.json:
            plain = recipe.to_plain()
            settings = {section: plain.pop(section) for section in recipe.sections()}
            print_json({**plain, "settings": settings, "differing": _differing(recipe)})
        else:
            print("\n".join(recipe_page(recipe)))
        return
    recipes = [load_recipe(name) for name in below or recipe_names()]
    if options.json:
        print_json([{"name": r.name, "description": r.description, "published": r.published} for r in recipes])
    else:
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
        rows = [
            [r.name, r.description, *(f"{r.published[key]:.2f}" if key in r.published else "–" for key in PUBLISHED)]
            for r in published
        ]
        print_table(
            ["recipe", "what it trains", *PUBLISHED.values()],
            rows,
            note="Numbers are published ones, of whole trainings by the paper's authors, or of AWD-LSTM and of "
            "mixtures; what we measured ourselves is in the project's results.\n",
        )
    print("`torchdefine recipes RECIPE` shows its settings, `torchdefine params RECIPE` builds the model and counts.")


def recipe_page(recipe: Recipe) -> Iterator[str]:
    """YAML that `train` reads as a file: settings that differ from their defaults, the others as comments."""
    from torchdefine.recipe import FORMAT_VERSION

    yield f"# {recipe.name}"
    if recipe.published:
        shown = ", ".join(f"{name.replace('_', ' ')} {number:g}" for name, number in recipe.published.items())
        yield f"# Published, parameters in millions: {shown}"
    yield f"format_version: {FORMAT_VERSION}"
    yield _setting("description", recipe.description)
    yield _setting("task", recipe.task)
    yield "# What differs from its default comes first in every section; comments have the rest."
    differing = _differing(recipe)
    for section, defaults in recipe.defaults().items():
        own = differing.get(section, {})
        yield ""
        yield f"{section}:" if own else f"# {section}:"
        for name, value in own.items():
            yield f"  {_setting(name, value):<{COMMENTS_FROM}} # default {_value(defaults[name])}"
        for name, value in defaults.items():
            if name not in own:
                yield f"{'  # ' if own else '#   '}{_setting(name, value)}"


def _differing(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The settings that have another value than their default, by section."""
    from torchdefine.config import plain_value

    found = {
        section: {
            name: value
            for name, default in defaults.items()
            if (value := plain_value(getattr(getattr(recipe, section), name))) != default
        }
        for section, defaults in recipe.defaults().items()
    }
    return {section: values for section, values in found.items() if values}


def _setting(name: str, value: Any) -> str:
    return f"{name}: {_value(value)}"


def _value(value: Any) -> str:
    """A value as YAML in one line."""
    import yaml

    several = isinstance(value, list | dict)
    dumped = yaml.safe_dump(value if several else [value], default_flow_style=several, allow_unicode=True, width=10**6)
    return dumped.strip().removeprefix("- ")


def _params(options: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from torchdefine.analysis.parameters import print_parameters

    report = _counted(options, overrides)
    if options.json:
        print_json(report.to_dict())
    else:
        print_parameters(report, with_plan=options.plan)


def _counted(options: argparse.Namespace, overrides: dict[str, Any]) -> ParameterReport:
    """A recipe's parameters with the vocabulary of its text or of ``--data``; a run's with its own vocabulary."""
    from torchdefine.analysis.parameters import parameter_report
    from torchdefine.recipe import load_recipe
    from torchdefine.run import RunFolder
    from torchdefine.task import find_task

    folder, data = RunFolder(options.recipe), data_settings(options, overrides.pop("data", {}))
    changes = {**overrides, **({"data": data} if data else {})}
    recipe = load_recipe(folder.config if folder.exists() else options.recipe, changes)
    task = find_task(recipe.task)
    if options.data is not None and "corpus" not in task.vocabulary_settings:
        means = ", ".join(f"data.{name}" for name in task.vocabulary_settings)
        raise UserError(f"A model for {task.name} is counted by {means}, whatever its text: leave --data out.")
    if changes or (folder.exists() and folder.changes()):  # the published numbers are of another model
        recipe = dataclasses.replace(recipe, published={})
    if "vocabulary_size" in data:
        return parameter_report(recipe)
    if data.keys() & set(task.vocabulary_settings):  # not the vocabulary whose size the recipe or the run states
        stated = {"vocabulary_size": None} if hasattr(recipe.data, "vocabulary_size") else {}
        return parameter_report(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **stated)))
    return parameter_report(recipe, task.load_tokens(folder.path) if folder.exists() else None)
