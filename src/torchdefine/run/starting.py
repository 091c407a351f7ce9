"""What a run starts with, checked first: its recipe, the caller's changes to it, and its folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torchdefine.errors import UserError
from torchdefine.files import check_path
from torchdefine.recipe import Recipe, load_recipe, short_name
from torchdefine.run.folder import RunFolder
from torchdefine.spelling import option
from torchdefine.training.distributed import Processes

Changes = dict[str, Any]
"""Changed settings by section."""


def wanted_recipe(
    recipe: str | Path | Recipe | None, changes: Changes, out: str | Path | None, resume: bool
) -> tuple[Any, Changes]:
    """The recipe with its changes, and the changes; a run resumed without naming a recipe uses its own."""
    if recipe is None:
        if not resume or out is None:
            raise UserError(
                f"Name a recipe to train, or go on with a run by {option('resume')} and its folder as {option('out')}."
            )
        folder = RunFolder(out)
        own = {"eval_every": folder.recipe().train.eval_every}  # kept, also when it is given other steps
        changes = {**changes, "train": {**own, **changes.get("train", {})}}
        recipe, changes = load_recipe(folder.config, changes), folder.changes()
    elif not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, changes)
    elif changes:
        raise UserError("Overrides go with a recipe's name or file; change a Recipe object itself instead.")
    return changed_paths(recipe, _whole_path), changes


def changes_by_section(data: str | Path | Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> Changes:
    """A caller's changes to a recipe."""
    changes = {name: values if isinstance(values, str) else dict(values) for name, values in overrides.items()}
    if data is not None:
        changes["data"] = dict(data) if isinstance(data, Mapping) else {"corpus": str(data)}
    return {section: values for section, values in changes.items() if values}


def changed_paths(recipe: Any, change: Callable[[str], str]) -> Any:
    """A recipe whose settings that are files or folders are changed."""
    sections = {}
    for name in recipe.sections():
        config = getattr(recipe, name)
        paths = {f.name: getattr(config, f.name) for f in fields(config) if f.metadata.get("path")}
        sections[name] = replace(config, **{name: change(path) for name, path in paths.items() if path})
    return replace(recipe, **sections)


def _whole_path(path: str) -> str:
    """A run must find its text, its tokenizer and the run it starts from, from anywhere; other names are of corpora."""
    given = Path(path).expanduser()
    if not given.exists() and len(given.parts) == 1 and not given.suffix:
        return path
    whole = str(given.resolve())
    check_path(whole)  # the run's settings and its result will name it
    return whole


@contextmanager
def chosen_folder(recipe: Any, out: str | Path | None, resume: bool, processes: Processes) -> Iterator[RunFolder]:
    """The run's folder, checked but not yet written to, and locked against other processes that train in it."""
    if resume and out is None:
        raise UserError(f"To resume a run, say which: pass its folder as {option('out')}.")
    if out is None and processes.count > 1:
        raise UserError(f"With several processes, name the run's folder: pass {option('out')}.")
    if out is not None and not str(out):
        raise UserError(f"The run's folder is empty text: pass a name as {option('out')}.")
    folder = RunFolder(out if out is not None else _new_path(recipe.name))
    check_path(folder.path)
    if resume:
        _check_same_settings(folder, recipe)
    else:
        folder.check_free()
    with folder.locked() if processes.is_first else nullcontext():
        yield folder


def _check_same_settings(folder: RunFolder, recipe: Any) -> None:
    """A run may go on after its texts were moved, since its checkpoints have their hashes."""
    own = changed_paths(folder.recipe(), _whole_path)
    may_differ = ("data.corpus", "data.tokenizer") if folder.last.exists() else ()
    found = differences(own.to_plain(), recipe.to_plain())
    differing = [difference for difference in found if difference[0] not in may_differ]
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
