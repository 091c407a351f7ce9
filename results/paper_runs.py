"""The stored runs of the paper's rows: where each differs from its recipe, and which share of the tokens it saw."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from old_names import read_run, settings_of, with_new_names
from provenance import short_commit
from stage_tables import speed_cells, timed_alone

from torchdefine.config import shown
from torchdefine.recipe import differences, load_recipe, recipe_of
from torchdefine.task import find_task

HERE = Path(__file__).parent
MODEL = ("embedding", "unit", "context", "output", "source")
TRAINING = ("loss", "optim", "schedule", "averaging", "train")
NOT_TOLD = {"steps", "epochs", "seed", "eval_every", "log_every", "checkpoint_every", "keep"}
"""Settings of training that say how long, how often and by what chance; of the length, the share of tokens tells."""

Settings = dict[str, Any]
recipe_called = cache(load_recipe)


class Ran(NamedTuple):
    """What a row of a table shows of our own: the runs of all seeds, and the settings that its recipe has not."""

    row: Settings
    runs: list[Settings]
    model: Settings
    training: Settings

    @property
    def folder(self) -> str:
        return str(self.runs[0]["file"].parent)


def ran(row: Settings, pattern: str) -> Ran:
    runs = stored(pattern, row.get("part"))
    found = {place: own for place, _, own in differences(_plain(row["recipe"]), runs[0]["settings"])}
    differs = {place: own for place, own in found.items() if own is not None or not _is_of_another_kind(place, found)}
    training = {place: own for place, own in differs.items() if _is_of_training(place)}
    model = {place: own for place, own in differs.items() if place.split(".")[0] in MODEL and place not in training}
    return Ran(row, runs, model, training)


def _is_of_training(place: str) -> bool:
    section, _, name = place.partition(".")
    return "dropout" in name if section == "context" else section in TRAINING and name not in NOT_TOLD


def _is_of_another_kind(place: str, differs: Settings) -> bool:
    """Whether a part is of another kind than the recipe's, which has no such setting."""
    return f"{place.split('.')[0]}.kind" in differs


@cache
def _plain(recipe: str) -> Settings:
    return settings_of(recipe_called(recipe))


@cache
def stored(pattern: str, part: str | None = None) -> list[Settings]:
    """The runs of all seeds; of a file of results/inference its training, with the row called ``part``."""
    found = []
    for path in sorted(HERE.glob(f"{pattern}.json")):
        run = read_run(path)
        if part is not None:
            (row,) = [row for row in run["rows"] if row["name"] == part]
            settings = settings_of(recipe_of(with_new_names(run["training"]["settings"])))
            run = {**run, **run["training"], **row, "settings": settings}
        alone = timed_alone(path.parent).get("rows", {}).get(run.get("row"))
        found.append({**run, "alone": alone, "file": path.relative_to(HERE)})
    if not found:
        raise FileNotFoundError(f"There is no results/{pattern}.json.")
    return found


@cache
def counted(name: str) -> str:
    """Parameters in millions of the model that a recipe builds."""
    recipe = recipe_called(name)
    model, _ = find_task(recipe.task).count(recipe)
    return f"{model.parameters_by_part()['total'] / 1e6:.2f}"


def share(shows: Ran) -> str:
    """Tokens of training, as a part of those that the recipe has: of its epochs over the paper's text, or its steps."""
    recipe, tokens = recipe_called(shows.row["recipe"]), shows.runs[0]["tokens"]
    train = recipe.train
    if train.epochs:
        whole = train.epochs * shows.row["corpus_tokens"]
    else:
        of_text = hasattr(train, "batch_size")
        whole = train.steps * (train.batch_size * train.length if of_text else train.batch_tokens * train.accumulate)
    return f"{tokens / 1e6:.0f} M of {shows.runs[0]['data']['corpus']}, {tokens / whole:.1%}"


def listed(settings: Settings) -> str:
    return ", ".join(f"`{place}` {'unset' if own is None else shown(own)}" for place, own in settings.items())


def common_training(shows: list[Ran]) -> Settings:
    """What all of them had in training that their recipes have not."""
    first, *others = [each.training for each in shows]
    return {place: own for place, own in first.items() if all(place in o and o[place] == own for o in others)}


def model_of(shows: Ran, told: Settings) -> str:
    """Whether a run had the recipe's model; and of its training what is not ``told`` of all runs of its folder."""
    own = {place: value for place, value in shows.training.items() if place not in told}
    said = f"our variant: {listed(shows.model)}" if shows.model else "as published"
    return said + (f"; trained with {listed(own)}" if own else "")


def origin(folder: str, shows: list[Ran]) -> str:
    """How the runs of one folder came about: command, differences of training, seeds, machine and commit."""
    runs = [run for each in shows for run in each.runs]
    told = common_training(shows)
    facts = [
        f"`{command_of(folder, runs)}`",
        f"trained with {listed(told)}" if told else "",
        _all("seed", [run["seed"] for run in runs]),
        _all("", [f"{run['precision']} on {run['hardware'].get('gpu') or run['hardware']['cpu']}" for run in runs]),
        _all("commit", [short_commit(run["commit"]) for run in runs]),
    ]
    return f"[{folder}](../results/{folder}): " + "; ".join(fact for fact in facts if fact) + "."


def _all(name: str, values: list[Any]) -> str:
    different = list(dict.fromkeys(map(str, values)))
    return f"{name}{'s' if len(different) > 1 else ''} {', '.join(different)}".strip() if name else ", ".join(different)


def command_of(folder: str, runs: list[Settings]) -> str:
    """What repeats the runs of a folder; a recipe's needs the settings that the page lists."""
    corpus, recipes = runs[0]["data"]["corpus"], " ".join(dict.fromkeys(run["recipe"] for run in runs))
    if "row" in runs[0]:
        return f"python results/run_stage.py {folder.split('/')[-1]} --data {corpus}/"
    if "test_bleu" in runs[0]:
        return f"python results/run_translation.py {recipes} --data {corpus}/ --also newstest2014/"
    if "rows" in runs[0]:
        return f"python results/inference_table.py {corpus}/ --steps {runs[0]['steps']}"
    train = runs[0]["settings"]["train"]
    length = f"epochs {train['epochs']:g}" if "epochs" in train else f"steps {train['steps']}"
    return f"torchdefine train RECIPE --data {corpus}/ --train.{length}"


def milliseconds(run: Settings) -> float | None:
    """Of a training step, where it was timed alone."""
    cell = speed_cells([run])[0]
    return None if cell == "–" else float(cell)


def mean_of(values: Iterable[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{mean(known):,.{digits}f}" if known else "–"


def number(value: float | None) -> str:
    """As the paper prints it, whole numbers without decimals."""
    return "–" if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
