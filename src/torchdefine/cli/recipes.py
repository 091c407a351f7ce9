"""Commands that show recipes and runs to people."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdefine.cli.shared import Command, add_shared, bar, data_settings, print_json, show
from torchdefine.errors import UserError

if TYPE_CHECKING:
    from torchdefine.task import Recipe, Tokens

RECIPES = """  torchdefine recipes                              the families of recipes
  torchdefine recipes demo                         one family, with parameters and published numbers
  torchdefine recipes --all                        every recipe
  torchdefine recipes demo/standard > mine.yaml    one recipe, as a file to change
  torchdefine train mine.yaml"""

COUNTING = """  torchdefine params table1a/r3
  torchdefine params table1a/r3 --data my_texts/    with the vocabulary of another text
  torchdefine params runs/first                     a run's model, with its own vocabulary
  torchdefine params demo/adaptive-define --unit.depth 5 --plan

Settings of data, embedding, unit, source, context and output change the parameters: `torchdefine train --help`
explains them all."""

PICTURES = """  curves      validation perplexity of every run; training perplexity as a thin line
  parameters  the parameters of each part, one stacked bar per run
  maps        correlation maps of the token vectors: standard, projected, DeFINE
  layers      correlation maps of one run with a DeFINE unit, layer by layer and group by group
  groups      mean cosines between the groups of every layer of one run with a DeFINE unit"""

FAMILIES = {
    "demo": "the five small language models of the demo: minutes on two cores",
    "masked": "masked language models such as BERT: minutes on two cores, or for one GPU",
    "tatoeba": "a small translator: minutes on two cores",
    "wikitext2": "LSTM and AWD-LSTM language models on WikiText-2",
    "ptb": "AWD-LSTM and a QRNN on the Penn Treebank, the paper's table 1c",
    "table1a": "the LSTM language models of the paper's table 1a",
    "txl": "Transformer-XL, the paper's table 2, and a small one for two cores",
    "ablation": "ablations of the unit (the paper's tables 6 and 8); -scaled: vectors of unit size",
    "depth-width": "units of several depths and widths (the paper's table 7); -scaled: vectors of unit size",
    "wmt14": "Transformers that translate, the paper's table 3",
    "europarl": "the Transformers of wmt14 on a smaller corpus: minutes on one GPU",
    "maps": "LSTMs for correlation maps: a standard table, and projections and DeFINE at three widths",
    "recurrent": "an LSTM, a QRNN and an SRU of equal size: minutes on two cores",
    "compared": "other methods for small tables that the paper cites: minutes on two cores",
    "wikitext103": "the QRNN of the paper's table 1b, on WikiText-103",
}
"""What the shipped recipes train, by their folders."""
COMMENTS_FROM = 44
"""Column of the defaults beside settings that differ from them."""
PUBLISHED = {
    "total": "M parameters",
    "valid_perplexity": "valid",
    "test_perplexity": "test",
    "bleu_newstest2014": "BLEU",
}


def add_commands(command: Command) -> None:
    """The commands that show recipes and runs."""
    summary = "List the recipes, or show one with all its settings."
    option = command("recipes", _recipes, summary, RECIPES)
    option("recipe", nargs="?", help="a recipe's name or a YAML file, to show it; or a family such as demo, to list it")
    option("--all", action="store_true", help="list every recipe")
    add_shared(option, "--json")

    option = command(
        "params", _params, "Count a recipe's parameters by part, and show the published numbers beside them.", COUNTING
    )
    option("recipe", help="a recipe's name, a YAML file, or a run's folder")
    option("--data", help="count with the vocabulary of this text: a folder, or a named corpus")
    option("--plan", action="store_true", help="also print the layers of the unit")
    add_shared(option, "--json")

    option = command(
        "compare", _compare, "Compare runs: parameters, perplexities, speed, and where the comparison is not fair."
    )
    add_shared(option, "folders", "--json")

    option = command(
        "report", _report, "Write an HTML report about runs, finished or not: one file that opens without a server."
    )
    add_shared(option, "folders")
    option("--out", help="the HTML file (default: report.html in the first run's folder)")
    option("--words", help="words whose nearest neighbours are shown, separated by commas (default: frequent words)")
    option("--prompt", default="The", help="the text that the runs continue (default: The)")

    option = command("plot", _plot, "Draw one figure about runs: PNG, SVG or PDF.", PICTURES)
    option("kind", choices=["curves", "parameters", "maps", "layers", "groups"], help="which figure")
    add_shared(option, "folders")
    option("--out", required=True, help="the file to write, ending in .png, .svg or .pdf")
    axes = ["tokens", "step", "seconds"]
    option("--by", choices=axes, help="the horizontal axis of curves (default: tokens)")
    option("--centred", action="store_true", help="subtract the mean of every dimension: maps of Pearson correlations")


def _recipes(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.recipe import load_recipe, recipe_names, recipes_below

    below = recipes_below(options.recipe or "")
    if options.recipe is not None and not below:
        recipe = load_recipe(options.recipe)
        plain = recipe.to_plain()
        settings = {section: plain.pop(section) for section in recipe.sections()}
        show(options, {**plain, "settings": settings, "differing": _differing(recipe)}, recipe_page(recipe))
        return
    if not (below or options.all or options.json):
        _print_families(recipe_names())
        return
    recipes = [load_recipe(name) for name in below or recipe_names()]
    if options.json:
        names = ("name", "description", "published", "varies", "chosen")
        print_json([{name: getattr(recipe, name) for name in names} for recipe in recipes])
    else:
        _print_recipes(recipes)


def _print_families(names: list[str]) -> None:
    from torchdefine.analysis.tables import print_table

    members = {family: [name for name in names if name.startswith(f"{family}/")] for family in FAMILIES}
    rows = [[name, str(len(members[name])), trains, members[name][0]] for name, trains in FAMILIES.items()]
    print_table(["family", "recipes", "what it trains", "example"], rows)
    print(
        "\n`torchdefine recipes FAMILY` lists the recipes of a family, `torchdefine recipes --all` all recipes. "
        "`torchdefine recipes RECIPE` shows the settings of a recipe."
    )


def _print_recipes(recipes: list[Recipe]) -> None:
    """Our own first, of which those that change a published row come last, then those of published rows."""
    from torchdefine.analysis.tables import print_table

    ours = sorted((recipe for recipe in recipes if not recipe.published), key=lambda recipe: bool(recipe.varies))
    if own := [[r.name, r.description, r.varies or "–"] for r in ours]:
        smallest = "The smallest are demo/…: they train in minutes on two cores, on the text in the package."
        has_demo = any(name.startswith("demo/") for name, *_ in own)
        print_table(["our own", "what it trains", "variant of"], own, note=smallest * has_demo + "\n")
    if published := [recipe for recipe in recipes if recipe.published]:
        rows = [
            [r.name, r.description, *(f"{r.published[key]:.2f}" if key in r.published else "–" for key in PUBLISHED)]
            for r in published
        ]
        note = (
            "These recipes have the settings of published models. The numbers are those of the papers, after full "
            "training. Our own results are in the project's documentation.\n"
        )
        print_table(["as published", "what it trains", *PUBLISHED.values()], rows, note)
    print(
        "`torchdefine recipes RECIPE` shows the settings of a recipe, and what the paper leaves open. "
        "`torchdefine params RECIPE` counts its parameters."
    )


def recipe_page(recipe: Recipe) -> Iterator[str]:
    """YAML that `train` reads as a file: settings that differ from their defaults, the others as comments."""
    from torchdefine.recipe import standing
    from torchdefine.task import FORMAT_VERSION

    yield f"# {recipe.name}: {standing(recipe)}"
    if recipe.published:
        shown = ", ".join(f"{name.replace('_', ' ')} {number:g}" for name, number in recipe.published.items())
        yield f"# Published, parameters in millions: {shown}"
    yield f"format_version: {FORMAT_VERSION}"
    yield f"description: {_in_yaml(recipe.description)}"
    if row := recipe.name if recipe.published else recipe.varies:
        yield f"varies: {row}"
    if recipe.chosen:
        yield f"chosen: {_in_yaml(recipe.chosen)}"
    yield f"task: {recipe.task}"
    yield "# Each section starts with the settings that differ from their defaults. The others are comments."
    differing = _differing(recipe)
    for section, defaults in recipe.defaults().items():
        own = differing.get(section, {})
        yield ""
        yield f"{section}:" if own else f"# {section}:"
        for name, value in own.items():
            yield f"  {f'{name}: {_in_yaml(value)}':<{COMMENTS_FROM}} # default {_in_yaml(defaults[name])}"
        for name, value in defaults.items():
            if name not in own:
                yield f"{'  # ' if own else '#   '}{name}: {_in_yaml(value)}"


def _differing(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The settings that have another value than their default, by section."""
    from torchdefine.config import plain_value

    found: dict[str, dict[str, Any]] = {}
    for section, defaults in recipe.defaults().items():
        for name, default in defaults.items():
            if (value := plain_value(getattr(getattr(recipe, section), name))) != default:
                found.setdefault(section, {})[name] = value
    return found


def _in_yaml(value: Any) -> str:
    """A value as YAML in one line."""
    import yaml

    several = isinstance(value, list | dict)
    dumped = yaml.safe_dump(value if several else [value], default_flow_style=several, allow_unicode=True, width=10**6)
    return dumped.strip().removeprefix("- ")


def _params(options: argparse.Namespace, overrides: dict[str, Any]) -> None:
    from torchdefine.analysis.tables import parameter_report, print_parameters
    from torchdefine.recipe import standing

    recipe, tokens = _counted(options, overrides)
    report, plan = parameter_report(recipe, tokens)
    if options.json:
        print_json({**report, "standing": standing(recipe)})
        return
    print_parameters(report, standing(recipe))
    if options.plan and plan is not None:
        print(f"\n{plan}")


def _counted(options: argparse.Namespace, overrides: dict[str, Any]) -> tuple[Recipe, Tokens | None]:
    """A recipe to be counted with the vocabulary of its text or of ``--data``; a run's with its own vocabulary."""
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
        varies = recipe.name if recipe.published else recipe.varies
        recipe = dataclasses.replace(recipe, published={}, varies=varies)
    if "vocabulary_size" in data:
        return recipe, None
    if data.keys() & set(task.vocabulary_settings):  # not the vocabulary whose size the recipe or the run states
        stated = {"vocabulary_size": None} if hasattr(recipe.data, "vocabulary_size") else {}
        return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **stated)), None
    return recipe, task.load_tokens(folder.path) if folder.exists() else None


def _compare(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.analysis.comparison import compare_runs, print_comparison

    comparison = compare_runs(options.folders)
    if options.json:
        print_json(comparison.to_dict())
    else:
        print_comparison(comparison)


def _report(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.analysis.report import write_report

    path = Path(options.out) if options.out else Path(options.folders[0]) / "report.html"
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"The report is HTML: {path} must end in .html.")
    words = [word.strip() for word in options.words.split(",") if word.strip()] if options.words else None
    with bar("reading the runs") as progress:
        write_report(options.folders, path, words, options.prompt, progress)
    print(f"The report is in {path}.")


def _plot(options: argparse.Namespace, _: dict[str, Any]) -> None:
    from torchdefine.analysis.report import draw

    if options.by is not None and options.kind != "curves":
        raise UserError(f"--by sets the horizontal axis of curves, but {options.kind} have no such axis: leave it out.")
    if options.centred and options.kind in ("curves", "parameters"):
        raise UserError(f"--centred is for correlation maps, but {options.kind} show none: leave it out.")
    out = Path(options.out)
    for sentence in draw(options.kind, options.folders, out, by=options.by or "tokens", centred=options.centred):
        print(sentence, file=sys.stderr)
    print(f"The picture is in {out}.")
