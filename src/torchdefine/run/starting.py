"""What a run starts with, checked first: its recipe, the caller's changes to it, and its folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchdefine.errors import UserError
from torchdefine.files import check_utf8
from torchdefine.recipe import SECTIONS, Recipe, load_recipe, short_name
from torchdefine.recipe.settings import explain, merge, to_plain
from torchdefine.spelling import did_you_mean_section, option
from torchdefine.training import RunFolder
from torchdefine.training.distributed import Processes

Changes = dict[str, dict[str, Any]]
"""Changed settings by section."""

PLACES = ("data.corpus", "data.tokenizer")
"""Settings that are paths; a run may go on after files were moved, since its checkpoints have their hashes."""


def wanted_recipe(
    recipe: str | Path | Recipe | None, changes: Changes, out: str | Path | None, resume: bool
) -> tuple[Recipe, Changes]:
    """The recipe with its changes, and the changes; a run resumed without naming a recipe uses its own."""
    if recipe is None:
        if not resume or out is None:
            raise UserError(
                f"Name a recipe to train, or go on with a run by {option('resume')} and its folder as {option('out')}."
            )
        folder = RunFolder(out)
        own = folder.recipe()
        recipe, changes = load_recipe(folder.config, _with_own_validations(changes, own)), folder.changes()
    elif not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, changes)
    elif changes:
        raise UserError("Overrides go with a recipe's name or file; change a Recipe object itself instead.")
    return _with_whole_paths(recipe), changes


def _with_own_validations(changes: Changes, own: Recipe) -> Changes:
    """A run that goes on keeps its own ``eval_every``, also when it is given other steps."""
    return merge({"train": {"eval_every": own.train.eval_every}}, changes)


def changes_by_section(data: str | Path | Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> Changes:
    """A caller's changes to a recipe."""
    for name, values in overrides.items():
        if name not in SECTIONS:
            names = [dotted for dotted, _, _ in explain(Recipe)]
            raise UserError(f"{name} is no section of a recipe{did_you_mean_section(name, values, names)}")
        if not isinstance(values, Mapping):
            raise UserError(f"{name} holds several settings, so it cannot be {values!r}: use {name}={{NAME: VALUE}}.")
    changes = {name: dict(values) for name, values in overrides.items()}
    if data is not None:
        changes["data"] = dict(data) if isinstance(data, Mapping) else {"corpus": str(data)}
    return {section: values for section, values in changes.items() if values}


def _with_whole_paths(recipe: Recipe) -> Recipe:
    """A run must find its text, its tokenizer and the run it starts from, from anywhere."""
    data, training = recipe.data, recipe.train
    if data.corpus and Path(data.corpus).expanduser().exists():  # else it is the name of a corpus
        data = replace(data, corpus=_whole_path(data.corpus))
    if data.tokenizer is not None:
        data = replace(data, tokenizer=_whole_path(data.tokenizer))
    if training.start_from is not None:
        training = replace(training, start_from=_whole_path(training.start_from))
    return replace(recipe, data=data, train=training)


def _whole_path(path: str) -> str:
    whole = str(Path(path).expanduser().resolve())
    check_utf8(whole)  # the run's settings and its result will name it
    return whole


@contextmanager
def chosen_folder(recipe: Recipe, out: str | Path | None, resume: bool, processes: Processes) -> Iterator[RunFolder]:
    """The run's folder, checked but not yet written to, and locked against other processes that train in it."""
    if resume and out is None:
        raise UserError(f"To resume a run, say which: pass its folder as {option('out')}.")
    if out is None and processes.count > 1:
        raise UserError(f"With several processes, name the run's folder: pass {option('out')}.")
    if out is not None and not str(out):
        raise UserError(f"The run's folder is empty text: pass a name as {option('out')}.")
    folder = RunFolder(out if out is not None else _new_path(recipe.name))
    check_utf8(folder.path)
    if resume:
        _check_same_settings(folder, recipe)
    else:
        folder.check_free()
    with folder.locked() if processes.is_first else nullcontext():
        yield folder


def _check_same_settings(folder: RunFolder, recipe: Recipe) -> None:
    own = _with_whole_paths(folder.recipe())
    may_differ = PLACES if folder.last.exists() else ()
    differing = [found for found in differences(to_plain(own), to_plain(recipe)) if found[0] not in may_differ]
    if not differing:
        return
    shown = ", ".join(f"{place} ({one}, not {other})" for place, one, other in differing)
    raise UserError(
        f"The run in {folder.path} was started with another {shown}: resume it with the same settings or without "
        f"naming any, or start a new one in another folder, from these weights by train.start_from {folder.path}."
    )


def differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where settings differ, and both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in dict.fromkeys([*one, *other]):
            if name not in ("name", "description", "published"):
                yield from differences(one.get(name), other.get(name), f"{place}.{name}" if place else name)
    elif one != other:
        yield place, one, other


def _new_path(name: str) -> Path:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", short_name(name)) or "run"
    number = 1
    while (path := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return path
