"""Runs from Python: ``train`` makes a run folder, ``load_run`` opens one."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.loaded_run import Run
from torchdefine.models import LanguageModel, Translator
from torchdefine.recipe import Recipe, load_recipe, short_name
from torchdefine.settings import to_plain
from torchdefine.tasks import (
    describe,
    describe_amount,
    fresh_model,
    load_tokens,
    make_trainer,
    open_data,
    unloaded_model,
)
from torchdefine.training import RunFolder
from torchdefine.training.checkpoint import load_weights, read_checkpoint
from torchdefine.training.distributed import Processes, joined_processes
from torchdefine.training.environment import describe_environment
from torchdefine.training.kept_checkpoints import average_checkpoints
from torchdefine.training.memory import keep_freed_memory
from torchdefine.training.precision import flush_denormals
from torchdefine.training.progress import QuietReporter, Reporter

log = logging.getLogger(__name__)


def train(
    recipe: str | Path | Recipe,
    *,
    data: str | Path | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str | None = None,
    reporter: Reporter | None = None,
    progress: Progress | None = None,
    **overrides: Mapping[str, Any],
) -> Run:
    """Train a recipe and return the finished run: ``train("table1a/r3", data="my_corpus/", optim={"lr": 10})``.

    ``data`` is a folder or a named corpus, or settings of that section. ``out`` is the run's folder, a new one under
    ``runs/`` by default. ``resume`` goes on with the run in ``out``. ``reporter`` is told of every log line and
    validation, ``progress`` of the encoding of the text.
    """
    flush_denormals()
    keep_freed_memory()
    changes = _changes(data, overrides)
    recipe = _resolve(recipe, changes)
    with joined_processes(device) as processes, _chosen_folder(recipe, out, resume, processes) as folder:
        if folder.result.exists():
            return load_run(folder.path, device=device)
        target = processes.device(device)
        corpus = open_data(recipe, processes, progress)
        folder.fingerprint(corpus.tokenization, corpus.splits["train"].tokens_sha256)
        torch.manual_seed(recipe.train.seed)  # every process draws the same weights …
        model = fresh_model(recipe, corpus).to(target)
        torch.manual_seed(recipe.train.seed + 1_000_003 * processes.rank)  # … and its own dropout
        goes_on = resume and folder.last.exists()  # with weights of its own, whatever has become of the other run
        if recipe.train.start_from is not None and not goes_on:
            _take_weights(model, folder, Path(recipe.train.start_from))
        if recipe.train.compile:
            model.compile_parts()
        if reporter is None or not processes.is_first:  # one process speaks for all
            reporter = QuietReporter()
        trainer = make_trainer(model, corpus, recipe, folder, processes, reporter)
        if resume:
            trainer.resume()
        elif processes.is_first:  # only now, when nothing speaks against the run any more
            folder.create(recipe, corpus.tokenization)
        processes.wait()
        environment = describe_environment(target)
        if processes.is_first:
            log.info(describe_amount(corpus, trainer.data))
            folder.log(
                "start", {"step": trainer.position.step, "parameters": model.parameters_by_part(), **environment}
            )
        position = trainer.run()
        processes.wait()
        load_weights(model, read_checkpoint(folder.best, only="model"), folder.best)
        if processes.is_first:
            result = describe(recipe, changes, model, corpus, folder, position)
            folder.write_result(
                {**result, **environment, "processes": processes.count, "precision": trainer.precision.name}
            )
        processes.wait()
        return Run(folder, recipe, corpus.tokenization, model.eval(), folder.best)


def load_run(
    path: str | Path,
    *,
    checkpoint: str = "best",
    device: str | None = None,
    cached: bool = False,
    compressed: bool = False,
) -> Run:
    """Open a run folder: ``load_run("runs/x").model``; ``checkpoint`` is "best", "last" or "average".

    With ``cached`` the finished vectors are looked up that ``Run.cache`` wrote for these weights, with ``compressed``
    those that ``Run.compress`` packed.
    """
    if cached and compressed:
        raise UserError("Vectors are looked up in the cache or in the compressed table: choose one of them.")
    if checkpoint not in ("best", "last", "average"):
        raise UserError(f"The checkpoint {checkpoint!r} is unknown: use best, last or average.")
    flush_denormals()
    folder = RunFolder(path)
    recipe = folder.recipe()
    tokenization = load_tokens(recipe, folder.path)
    folder.fingerprint(tokenization)
    file = {"best": folder.best, "last": folder.last, "average": folder.average}[checkpoint]
    if checkpoint == "average" and not file.exists():
        raise UserError(f"The run in {path} has no average: make it with `torchdefine average {path}`.")
    if checkpoint == "best" and not file.exists() and folder.last.exists():
        raise UserError(
            f"The run in {path} has not been validated yet, so it has no best weights: use --checkpoint last."
        )
    weights = read_checkpoint(file, only="model")
    folder.check_fingerprints(weights.facts, file)
    model = unloaded_model(recipe, tokenization)
    load_weights(model, weights, file)
    run = Run(folder, recipe, tokenization, model.to(Processes().device(device)).eval(), file)
    if cached:
        run.use_cache()
    if compressed:
        run.use_compressed()
    return run


def average_run(path: str | Path, last: int | None = None) -> tuple[RunFolder, list[int]]:
    """Average the ``last`` checkpoints that a run has kept, all by default; ``load_run`` then knows "average" too."""
    folder = RunFolder(path)
    folder.fingerprint(load_tokens(folder.recipe(), folder.path))
    return folder, average_checkpoints(folder, last)


def _take_weights(model: LanguageModel | Translator, folder: RunFolder, start_from: Path) -> None:
    """Begin where another run was best; its vocabulary must be this run's, its text need not."""
    file = RunFolder(start_from).best
    if not file.exists():
        raise UserError(f"train.start_from {start_from} has no best weights: name a run's folder.")
    weights = read_checkpoint(file, only="model")
    folder.check_vocabulary(weights.facts, file)
    load_weights(model, weights, file)


def _changes(data: str | Path | Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a caller changes of a recipe, by section."""
    for name, values in overrides.items():
        if not isinstance(values, Mapping):
            raise UserError(f"{name} holds several settings, so it cannot be {values!r}: use {name}={{NAME: VALUE}}.")
    changes = {name: dict(values) for name, values in overrides.items()}
    if data is not None:
        changes["data"] = dict(data) if isinstance(data, Mapping) else {"corpus": str(data)}
    return changes


def _resolve(recipe: str | Path | Recipe, changes: Mapping[str, Any]) -> Recipe:
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(str(recipe), changes)
    elif changes:
        raise UserError("Overrides go with a recipe's name or file; change a Recipe object itself instead.")
    return _with_whole_paths(recipe)


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
    return str(Path(path).expanduser().resolve())


@contextmanager
def _chosen_folder(recipe: Recipe, out: str | Path | None, resume: bool, processes: Processes) -> Iterator[RunFolder]:
    """The run's folder, checked but not yet written to, and kept from other processes that would train in it."""
    if resume and out is None:
        raise UserError("To resume a run, say which: pass its folder as --out.")
    if out is None and processes.count > 1:
        raise UserError("With several processes, name the run's folder: pass --out.")
    if out is not None and not str(out):
        raise UserError("The run's folder is empty text: pass a name as --out.")
    folder = RunFolder(out if out is not None else _new_path(recipe.name))
    if resume:
        changed = _first_difference(to_plain(_with_whole_paths(folder.recipe())), to_plain(recipe))
        if changed:
            raise UserError(
                f"The run in {folder.path} was started with another {changed}: resume it with the same settings, or "
                f"start a new one with another --out, from these weights by --train.start_from {folder.path}."
            )
    else:
        folder.check_free()
    with folder.locked() if processes.is_first else nullcontext():
        yield folder


def _first_difference(one: Any, other: Any, place: str = "") -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*one, *other]:
            if name in ("name", "description", "published"):
                continue
            found = _first_difference(one.get(name), other.get(name), f"{place}.{name}" if place else name)
            if found:
                return found
        return ""
    return "" if one == other else place


def _new_path(name: str) -> Path:
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", short_name(name)) or "run"
    number = 1
    while (path := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return path
