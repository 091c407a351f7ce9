"""Every table, figure and comparison of the paper, and ours: docs/paper….md, from paper.yaml and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from paper_runs import (
    Ran,
    common_training,
    counted,
    mean_of,
    milliseconds,
    model_of,
    number,
    origin,
    ran,
    recipe_called,
    share,
)

from torchdefine.config import shown
from torchdefine.embedding import DefineUnit
from torchdefine.recipe import recipe_names, standing

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
INTRODUCTION = """# The paper, row by row

These pages list every table, figure and comparison of the DeFINE paper
([Mehta et al., 2020](https://arxiv.org/abs/1911.12385)). Each row names the recipe that trains it, the paper's numbers,
and ours. `make results` writes the pages from stored runs. [Does DeFINE deliver?](evidence.md) draws the conclusions.

- **No row is a reproduction.** Our runs had another text, or far fewer tokens, or both. A column gives the text, the
  tokens, and the percentage of the paper's tokens.
- **Our run's model** is "as published" if it has the settings of the recipe. "Our variant" lists every other setting.
- **"M"** is millions of parameters. "counted" is what `torchdefine params RECIPE` counts.
- **Two seeds** give a mean. Do not compare perplexities on different texts.

More pages:

- [Ablations](paper-ablations.md): tables 6 to 9, and the two units that the paper's sizes give.
- [Claims, figures and citations](paper-claims.md), and where each of them is here.
- [Runs and recipes](paper-runs.md): how our runs were trained, what the paper leaves open, and our own recipes.
"""
ABLATIONS = """# The paper's ablations

Tables 6 to 9 of the DeFINE paper. [The paper, row by row](paper.md) explains the columns.
"""
CLAIMS = """# Claims, figures and citations of the paper

Where each claim, figure, equation and citation of the DeFINE paper is in this project.
"""
RUNS = """# Our runs and recipes for the paper's rows

Where the numbers on [The paper, row by row](paper.md) come from: the command of each run, and every setting of training
that differs from the recipe.
"""


PLANS_SAY = """The same n, k, m and N give two units. `unit.plan wide`, the default, reaches width k and has no norm.
`published` has the paper's counts: its reduce layer replaces the layer of width k."""


class Metric(NamedTuple):
    """A number of a table: its heading, its name among the paper's numbers if it is there, and where a run has it."""

    heading: str
    published: str | None
    of_run: Callable[[dict[str, Any]], float | None] | None
    digits: int = 2


class Table(NamedTuple):
    """A table as paper.yaml has it, and our runs of each of its rows."""

    said: dict[str, Any]
    ours: list[list[Ran]]


METRICS = {
    "valid": Metric("valid", "valid_perplexity", lambda run: run["valid_perplexity"]),
    "test": Metric("test", "test_perplexity", lambda run: None if "test_bleu" in run else run["test_perplexity"]),
    "ms": Metric("ms/batch", "ms", milliseconds, 1),
    "newstest2014": Metric(
        "newstest2014", "bleu_newstest2014", lambda run: run.get("also", {}).get("newstest2014", {}).get("bleu")
    ),
    "newstest2017": Metric("newstest2017", "bleu_newstest2017", None),
    "europarl": Metric("Europarl", None, lambda run: run["test_bleu"]),
    "megabytes": Metric("MB", "megabytes", lambda run: run["bytes"] / 1e6, 1),
    "perplexity": Metric("test", "perplexity", lambda run: run["perplexity"]),
    "inference_ms": Metric("ms/batch", "inference_ms", lambda run: run["ms_per_batch"], 1),
}


def write_paper_pages() -> None:
    for name, text in paper_pages(read_paper()).items():
        (DOCS / name).write_text(text, encoding="utf-8")


def read_paper() -> dict[str, Any]:
    paper: dict[str, Any] = yaml.safe_load((HERE / "paper.yaml").read_text(encoding="utf-8"))
    return paper


def paper_pages(paper: dict[str, Any]) -> dict[str, str]:
    """The text of each page, by its name."""
    main, ablations = ([with_runs(table) for table in paper[part]] for part in ("tables", "ablations"))
    tables = [*main, *ablations]
    by_folder: dict[str, list[Ran]] = {}
    for shows in (one for table in tables for of_row in table.ours for one in of_row):
        by_folder.setdefault(shows.folder, []).append(shows)
    told = {folder: common_training(shows) for folder, shows in by_folder.items()}
    recipes = list(dict.fromkeys(row["recipe"] for table in tables for row in table.said["rows"] if "recipe" in row))
    pages = {
        "paper.md": [INTRODUCTION, *(table_section(table, told) for table in main)],
        "paper-ablations.md": [
            ABLATIONS,
            *(table_section(table, told) for table in ablations),
            hyper_parameters(paper["hyper_parameters"]),
            plans(paper["plans"]),
        ],
        "paper-claims.md": [
            CLAIMS,
            places("Claims of the text", paper["claims"]),
            places("Figures and equations", paper["figures"]),
            places("What the paper compares with or builds on", paper["citations"]),
        ],
        "paper-runs.md": [
            RUNS,
            section("Where our numbers come from", [origin(folder, shows) for folder, shows in by_folder.items()]),
            section("What the paper leaves open, and what we chose", choices(recipes)),
            section("Our own recipes, and what they change", variants(recipes)),
        ],
    }
    return {name: "\n".join(parts).rstrip("\n") + "\n" for name, parts in pages.items()}


def with_runs(table: dict[str, Any]) -> Table:
    return Table(table, [[ran(row, runs) for runs in row.get("runs", ())] for row in rows_of(table)])


def rows_of(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a table, with what it says of all of them."""
    of_all = {name: table[name] for name in ("corpus_tokens", "not_run") if name in table}
    return [{**of_all, **row} for row in table["rows"]]


def table_section(table: Table, told: dict[str, dict[str, Any]]) -> str:
    """A table of the paper and the command for its rows; ``told`` is what training all runs of a folder share."""
    metrics = [METRICS[name] for name in table.said["metrics"]]
    header = ["row", "recipe", "paper's M", "counted", *(f"paper's {metric.heading}" for metric in published(metrics))]
    header += ["our run's model", "our run's tokens", *(f"our {metric.heading}" for metric in of_runs(metrics))]
    lines = [f"## {table.said['title']}", "", f"`{table.said['command']}`", "", "| " + " | ".join(header) + " |"]
    lines.append("|---|---|" + "---:|" * (2 + len(published(metrics))) + "---|---:|" + "---:|" * len(of_runs(metrics)))
    for row, ours in zip(rows_of(table.said), table.ours, strict=True):
        lines += ["| " + " | ".join(cells) + " |" for cells in row_cells(row, ours, metrics, told)]
    return "\n".join([*lines, "", *(f"- {note}" for note in table.said.get("notes", ())), ""])


def published(metrics: list[Metric]) -> list[Metric]:
    return [metric for metric in metrics if metric.published]


def of_runs(metrics: list[Metric]) -> list[Metric]:
    return [metric for metric in metrics if metric.of_run]


def row_cells(
    row: dict[str, Any], ours: list[Ran], metrics: list[Metric], told: dict[str, dict[str, Any]]
) -> Iterator[list[str]]:
    """A line for each run of a row, or one that says why there is none."""
    name = row.get("recipe")
    papers = {**(recipe_called(name).published if name else {}), **row.get("published", {})}
    recipe = f"`{name}`, {standing(recipe_called(name)).split(';')[0]}" if name else "–"
    said = [row["row"], recipe, number(papers.get("total")), counted(name) if name else "–"]
    said += [number(papers.get(metric.published)) for metric in published(metrics)]
    for shows in ours:
        measured = [mean_of(map(metric.of_run, shows.runs), metric.digits) for metric in of_runs(metrics)]
        yield [*said, model_of(shows, told[shows.folder]), share(shows), *measured]
        said = [""] * len(said)
    if not ours:
        why = f"not run, because {row['not_run']}" if name else f"not here, because {row['not_here']}"
        yield [*said, why, *["–"] * (1 + len(of_runs(metrics)))]


def section(title: str, points: list[str]) -> str:
    return "\n".join([f"## {title}", "", *(f"- {point}" for point in points), ""])


def choices(recipes: list[str]) -> list[str]:
    """What the paper leaves open, and how the recipes have it."""
    return _grouped({name: recipe_called(name).chosen for name in recipes})


def variants(recipes: list[str]) -> list[str]:
    """Our own recipes that change a row of the paper, and in what."""
    own = {name: recipe for name in recipe_names() if (recipe := recipe_called(name)).varies in recipes}
    return _grouped({name: standing(own[name]).removeprefix(f"{own[name].varies} ") for name in own})


def _grouped(said: dict[str, str]) -> list[str]:
    """One sentence for all names of which the same is said."""
    names: dict[str, list[str]] = {}
    for name, text in said.items():
        names.setdefault(text, []).append(f"`{name}`")
    return [f"{', '.join(of)}: {text}." for text, of in names.items() if text]


def hyper_parameters(table: dict[str, Any]) -> str:
    settings = recipe_called(table["recipe"]).to_plain()
    lines = ["## Table 9: hyper-parameters of the LSTMs", "", f"Those of `{table['recipe']}`:", ""]
    lines += ["| hyper-parameter | published | recipe |", "|---|---:|---|"]
    for row in table["rows"]:
        places = [place.split(".") for place in row.get("settings", ())]
        own = ", ".join(f"`{section}.{name}` {shown(settings[section][name])}" for section, name in places)
        lines.append(f"| {row['row']} | {row['published']} | {own or row['here']} |")
    return "\n".join([*lines, ""])


def plans(recipes: list[str]) -> str:
    """The unit's layers by the library's plan and by the published one, for recipes that have the latter."""
    lines = ["## The library's unit and the published one", "", PLANS_SAY, ""]
    lines += ["| recipe | wide: width / groups of each layer | M | published: width / groups | M |"]
    lines += ["|---|---|---:|---|---:|"]
    for name in recipes:
        cells = []
        for plan in ("wide", "published"):
            layers, size = unit_of(name, plan)
            cells += [layers, f"{size / 1e6:.2f}"]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def unit_of(name: str, plan: str) -> tuple[str, int]:
    """The layers of a recipe's unit in a plan, and its parameters."""
    recipe = recipe_called(name)
    read = getattr(recipe.embedding, "output_dim", None) or recipe.embedding.map_dim
    with torch.device("meta"):
        unit = DefineUnit(read, replace(recipe.unit, plan=plan))
    layers = " · ".join(f"{layer.output_width:,} / {layer.groups}" for layer in unit.plan)
    return layers, sum(weight.numel() for weight in unit.parameters())


def places(title: str, rows: list[dict[str, str]]) -> str:
    lines = [f"## {title}", "", "| in the paper | here |", "|---|---|"]
    return "\n".join([*lines, *(f"| {row['what']} | {row['here']} |" for row in rows), ""])
