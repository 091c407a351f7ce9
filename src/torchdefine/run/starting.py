"""What a run starts with, checked first: its recipe, the caller's changes to it, its folder, another run's weights.

What a run resumes from, ``begin`` of train.py restores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import Any

from torchdefine.data.tokenizer import TOKENIZER_FILE
from torchdefine.embedding import ProjectiveMap
from torchdefine.errors import UserError
from torchdefine.files import check_path, from_home
from torchdefine.recipe import differences, load_recipe, short_name
from torchdefine.run.checkpoint_file import read_checkpoint
from torchdefine.run.folder import RunFolder
from torchdefine.spelling import listed, option
from torchdefine.task import Recipe
from torchdefine.training.checkpoint import Checkpoint, load_weights
from torchdefine.training.distributed import Processes

Changes = dict[str, Any]
"""Changed settings by section."""
MODEL_SECTIONS = ("task", "embedding", "unit", "source", "context", "output")


def wanted_recipe(
    recipe: str | Path | Recipe | None,
    data: str | Path | Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
    out: str | Path | None = None,
    resume: bool = False,
) -> tuple[Any, Changes]:
    """The recipe with its changes, and the changes; a run resumed without naming a recipe uses its own."""
    text = {} if data is None else {"data": data if isinstance(data, Mapping) else {"corpus": str(data)}}
    changes = {section: values for section, values in {**overrides, **text}.items() if values}
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
    whole = changed_paths(recipe, _whole_path)
    settings = whole.to_plain()
    for section, values in changes.items():  # as the recipe has read them: a command line gives only text
        if isinstance(values, Mapping):
            changes[section] = {name: settings[section].get(name, value) for name, value in values.items()}
    return whole, changes


def changed_paths(recipe: Any, change: Callable[[str, str], str]) -> Any:
    """A recipe whose settings that are files or folders are changed: ``change`` gets their names and values."""
    sections = {}
    for section in recipe.sections():
        config = getattr(recipe, section)
        paths = {f.name: getattr(config, f.name) for f in fields(config) if f.metadata.get("path")}
        changes = {name: change(f"{section}.{name}", path) for name, path in paths.items() if path}
        sections[section] = replace(config, **changes)
    return replace(recipe, **sections)


def _whole_path(setting: str, path: str) -> str:
    """A run must find its text, its tokenizer and the run that it starts from, from anywhere."""
    given = from_home(path)
    whole = str(given.resolve())
    check_path(whole)  # the run's settings and its result will name it
    return path if setting == "data.corpus" and not given.exists() else whole  # the name of a corpus


def without_paths(recipe: Any) -> Any:
    """A recipe to be passed on: of files and folders on this machine only the last part of their names."""
    return replace(changed_paths(recipe, lambda _, path: Path(path).name), name=short_name(recipe.name))


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
    if resume:
        _check_same_settings(folder, recipe)
    else:
        folder.check_free()
    with folder.locked() if processes.is_first else nullcontext():
        yield folder


def _new_path(name: str) -> Path:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", short_name(name)) or "run"
    paths = (Path("runs") / f"{stem}-{number}" for number in count(1))
    return next(path for path in paths if not path.exists())


def _check_same_settings(folder: RunFolder, recipe: Any) -> None:
    """A run may go on after its texts were moved, since its checkpoints have their hashes."""
    own = changed_paths(folder.recipe(), _whole_path)
    may_differ = ("data.corpus", "data.tokenizer") if folder.last.exists() else ()
    found = differences(own.to_plain(), recipe.to_plain())
    shown = ", ".join(f"{place} ({one}, not {other})" for place, one, other in found if place not in may_differ)
    if shown:
        raise UserError(
            f"The run in {folder.path} was started with another {shown}: resume it with the same settings or without "
            f"naming any, or start a new one in another folder, from these weights by train.start_from {folder.path}."
        )


def take_weights(model: Any, recipe: Any, folder: RunFolder) -> None:
    """Load the weights that ``train.start_from`` names; the vocabulary must be this run's, the text need not be."""
    other = RunFolder(recipe.train.start_from)
    if not other.path.exists():
        raise UserError(f"train.start_from names {other.path}, but there is no such folder: name a run's folder.")
    if not other.best.exists():
        raise UserError(f"train.start_from {other.path} has no best weights: name a run's folder.")
    weights = read_checkpoint(other.best, only="model")
    if weights.facts.get("run") != other.identity():
        raise UserError(f"{other.best} belongs to another run than that in {other.path}: put the run's own file back.")
    if weights.facts.get("vocabulary_sha256") != folder.fingerprints["vocabulary_sha256"]:
        cure = "the words of another text are another vocabulary, so give both runs one tokenizer by data.tokenizer"
        if (tokenizer := other.path / TOKENIZER_FILE).is_file():
            cure = f"set data.tokenizer to {tokenizer}, which it was trained with"
        raise UserError(f"train.start_from {other.path} has another vocabulary: {cure}.")
    try:
        load_weights(model, with_low_ranks(weights, model, other.recipe()), other.best)
    except UserError:
        trained = other.recipe()
        found = [place for place, _, _ in differences(trained.to_plain(), recipe.to_plain())]
        of_the_model = [place for place in found if place.split(".")[0] in MODEL_SECTIONS]
        where = f" (they differ in {listed(of_the_model, 4)})" if of_the_model else ""
        raise UserError(
            f"train.start_from {other.path} is a model of {trained.name}, whose weights do not fit into one of "
            f"{recipe.name}{where}: start from a run with the same model."
        ) from None


def with_low_ranks(weights: Checkpoint, model: Any, trained: Any) -> Checkpoint:
    """The weights with the best low rank of a table where ``model`` has a projected map in the place of a standard one.

    So a table is compressed while a model learns, and the smaller one learns on (Acharya et al., 2019).
    """
    tensors = dict(weights.tensors)
    for name, part in model.named_modules():
        table, projection = (f"model.{name}.{weight}.weight" for weight in ("table", "projection"))
        if not isinstance(part, ProjectiveMap) or table not in tensors or projection in tensors:
            continue
        if (width := tensors[table].shape[1]) == part.output_dim:
            scaled = tensors[table] * (trained.embedding.factor(width) / part.scale)
            tensors |= {f"model.{name}.{one}": factor for one, factor in part.factors_of(scaled).items()}
    return Checkpoint(tensors, weights.facts)
