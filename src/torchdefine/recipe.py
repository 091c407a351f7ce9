"""Recipes: everything that decides how a run turns out, as YAML.

Shipped ones go by name, files by path; bases lie below and overrides above.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from torchdefine.config import convert, shown
from torchdefine.errors import UnknownSetting, UserError
from torchdefine.files import check_path, read_text
from torchdefine.plain import read_yaml
from torchdefine.spelling import did_you_mean, did_you_mean_section, listed
from torchdefine.task import FACTS, FORMAT_VERSION, Recipe, find_task
from torchdefine.training.loop import decided_by_validations, for_five_validations

FILE_ENDINGS = (".yaml", ".yml")
"""A recipe whose name has such an ending is a file; any other name is that of a shipped one."""
RUN_SETTINGS_FILE = "config.yaml"
"""The file with a run's recipe; a folder that has it is a run."""


def recipe_names() -> list[str]:
    """The recipes that come with the package; those whose name starts with an underscore are only bases."""
    root = resources.files("torchdefine") / "recipes"
    with resources.as_file(root) as folder:
        found = [str(p.relative_to(folder).with_suffix("")) for p in folder.rglob("*.yaml")]
    return sorted(name for name in found if not name.rsplit("/", 1)[-1].startswith("_"))


def recipes_below(name: str) -> list[str]:
    """The shipped recipes whose names begin with that of a folder of them."""
    return [one for one in recipe_names() if name.rstrip("/") and one.startswith(f"{name.rstrip('/')}/")]


def short_name(name: str) -> str:
    """A recipe's name without the folders and the ending of a file."""
    return Path(name).stem if name.endswith(FILE_ENDINGS) else name


def load_recipe(name: str | Path, overrides: Mapping[str, Any] | None = None) -> Any:
    """A shipped recipe by name, or a YAML file by path, with overrides by section: ``{"optim": {"lr": 10}}``."""
    below, given = _read_file(str(name)), overrides or {}
    values = merged(below, given)
    values["description"] = _true_description(below, given)
    recipe = recipe_of({"name": str(name), **values})
    return _validated_on_the_way(recipe, given.get("train") or {})


def recipe_of(values: Mapping[str, Any]) -> Any:
    """A recipe from plain values; unknown sections and settings are refused."""
    recipe = find_task(values.get("task")).recipe
    _check_names(recipe, values)
    published = convert(dict[str, float], values.get("published", {}), "published")
    given: dict[str, Any] = {
        name: of.read(values[name], name) for name, of in recipe.sections().items() if name in values
    }
    texts = {fact: convert(str, values.get(fact, ""), fact) for fact in ("name", "description", "varies", "chosen")}
    return recipe(published=published, **texts, **given)


def differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where the settings of two recipes differ, as plain values, and both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in dict.fromkeys([*one, *other]):
            if place or name not in FACTS[:-1]:
                yield from differences(one.get(name), other.get(name), f"{place}.{name}" if place else name)
    elif one != other:
        yield place, one, other


def standing(recipe: Recipe) -> str:
    """Whether a recipe is that of a published row, or where it differs from the one that it changes."""
    if recipe.published:
        return "as published" + f"; the paper leaves open, and we chose: {recipe.chosen}" * bool(recipe.chosen)
    if not recipe.varies:
        return "our own"
    row = load_recipe(recipe.varies).to_plain()
    changed = [
        f"{place} {'unset' if own is None else shown(own)} (instead of {'unset' if its is None else shown(its)})"
        for place, its, own in differences(row, recipe.to_plain())
    ]
    return f"{recipe.varies} with {', '.join(changed)}" if changed else f"the settings of {recipe.varies}"


def _check_names(recipe: type[Recipe], values: Mapping[str, Any]) -> None:
    """Refuse unknown sections and settings with those that may have been meant; "" is a section that was left out."""
    known = recipe.settings()
    for section, given in values.items():
        if section in FACTS:
            continue
        for name in given if isinstance(given, Mapping) else ():
            dotted = f"{section}.{name}".lstrip(".")
            if dotted not in known:
                raise UnknownSetting(dotted, known)
        if section not in recipe.sections():
            raise UserError(f"{section} is no section of a recipe{did_you_mean_section(section, given, known)}")


def _recipe_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> type[Recipe]:
    return find_task(above.get("task") or below.get("task")).recipe


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of ``above`` over those of ``below``, section by section."""
    values = {**below, **above}
    for name, of in _recipe_over(below, above).sections().items():
        if name in below and name in above:
            values[name] = of.merged(below[name], above[name], name)
    given = above.get("train")
    if isinstance(given, Mapping):  # steps replace epochs, and the other way round
        chosen = [name for name in ("steps", "epochs") if str(given.get(name)).lower() not in ("none", "null")]
        if len(chosen) == 1:
            values["train"] = {**values["train"], "epochs" if chosen == ["steps"] else "steps": None}
    return values


def _true_description(below: Mapping[str, Any], above: Mapping[str, Any]) -> Any:
    """The description of ``below`` with the changes that ``above`` makes to the model, or the latter's own."""
    if "description" in above:
        return above["description"]
    recipe, changes = _recipe_over(below, above), []
    _check_names(recipe, above)
    for f in dataclasses.fields(recipe):
        if above.get(f.name) is not None and f.metadata.get("model"):
            of, under = f.metadata["section"], below.get(f.name) or {}
            values = of.merged({}, above[f.name], f.name)
            before, after = of.read(under, f.name), of.read(of.merged(under, values, f.name), f.name)
            changes += [
                f"{f.name}.{name} {shown(getattr(after, name))}"
                for name in values
                if not hasattr(before, name) or getattr(before, name) != getattr(after, name)
            ]
    description = below.get("description", "")
    if not changes:
        return description
    return f"{description}, changed by {', '.join(changes)}" if description else f"Changed by {', '.join(changes)}"


def _validated_on_the_way(recipe: Any, given: Mapping[str, Any]) -> Any:
    """At least five validations for a run whose caller set its steps but not ``eval_every``."""
    training = recipe.train
    if "steps" not in given or training.steps is None or "eval_every" in given or decided_by_validations(recipe):
        return recipe
    every = min(training.eval_every, for_five_validations(training.steps))
    return dataclasses.replace(recipe, train=dataclasses.replace(training, eval_every=every))


def _read_file(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values of a recipe over those of its bases."""
    if name in above:
        raise UserError(f"The recipe {name} is its own base: {' → '.join([*above, name])}.")
    values = _parse(*_recipe_text(name))
    base = values.pop("base", None)
    bases = base if isinstance(base, list) else [base] if base is not None else []
    below: dict[str, Any] = {}
    for one in bases:  # each over those before it, and the recipe's own values over all
        if not isinstance(one, str):
            raise UserError(f"A base of the recipe {name} is {one!r}, but must be a name or a file.")
        if one.endswith(FILE_ENDINGS) and not Path(one).is_absolute():
            one = os.path.normpath(Path(name).parent / one)  # files refer to their neighbours
        inherited = _read_file(one, (*above, name))
        if inherited.pop("published", None) and not one.endswith(FILE_ENDINGS):  # the numbers of another row
            inherited["varies"] = one
        below = merged(below, inherited)
    if "published" in values:
        below.pop("varies", None)
    if below.get("description"):
        values["description"] = _true_description(below, values)
    return merged(below, values)


def _recipe_text(name: str) -> tuple[str, str]:
    if name.endswith(FILE_ENDINGS):
        return name, read_text(Path(name), "recipe file")
    check_path(name)
    shipped = resources.files("torchdefine") / "recipes" / f"{name}.yaml"
    if not shipped.is_file():
        own = Path(name) / RUN_SETTINGS_FILE
        if own.is_file():  # a run is easily named in place of its recipe
            resume = f"torchdefine train --out {shlex.quote(str(own.parent))} --resume"
            raise UserError(f"{name} is a run and no recipe: go on with it by `{resume}`, or name its recipe, {own}.")
        if below := recipes_below(name):
            raise UserError(f"{name!r} is no recipe, but some begin so: name one of {listed(below)}.")
        close = did_you_mean(name, recipe_names())
        way_out = close if "did you mean" in close else ": `torchdefine recipes` lists them all."
        raise UserError(f"The recipe {name!r} is unknown{way_out}")
    return name, shipped.read_text(encoding="utf-8")


def _parse(name: str, text: str) -> dict[str, Any]:
    values = read_yaml(text, f"The recipe {name}")
    if not isinstance(values, dict):
        raise UserError(f"The recipe {name} holds no settings: a mapping of sections was expected.")
    version = values.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise UserError(f"The recipe {name} has format version {version}; this torchdefine reads {FORMAT_VERSION}.")
    # A section whose lines are all comments is empty.
    versions = ("format_version", "torchdefine_version")
    return {name: value for name, value in values.items() if value is not None and name not in versions}
