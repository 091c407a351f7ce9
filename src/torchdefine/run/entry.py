"""Runs from Python: ``train`` makes a run folder, ``load_run`` opens one."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from torchdefine.data import Bitext, Corpus
from torchdefine.data.tokenizer import TOKENIZER_FILE
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.models import LanguageModel, Translator
from torchdefine.recipe import Recipe
from torchdefine.recipe.effects import settings_without_effect
from torchdefine.recipe.settings import to_plain
from torchdefine.run.describe_data import describe_amount, describe_bands, describe_measuring, describe_tokens
from torchdefine.run.loaded import Run
from torchdefine.run.starting import Changes, changes_by_section, chosen_folder, differences, wanted_recipe
from torchdefine.run.tasks import describe, fresh_model, load_tokens, make_trainer, open_data, unloaded_model
from torchdefine.spelling import option
from torchdefine.training import RunFolder, Trainer
from torchdefine.training.checkpoint import load_weights, read_checkpoint
from torchdefine.training.distributed import Processes, joined_processes
from torchdefine.training.environment import describe_environment
from torchdefine.training.kept_checkpoints import average_checkpoints
from torchdefine.training.memory import keep_freed_memory
from torchdefine.training.precision import flush_denormals
from torchdefine.training.progress import QuietReporter, Reporter, default_reporter, say, watched, work_bar
from torchdefine.training.result import as_read, shortfall
from torchdefine.training.schedules import unfinished_warmup

log = logging.getLogger(__name__)

MOST_SETTINGS_NAMED = 4


def train(
    recipe: str | Path | Recipe | None = None,
    *,
    data: str | Path | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    device: str | None = None,
    reporter: Reporter | None = None,
    progress: Progress | None = None,
    verbose: bool | None = None,
    **overrides: Mapping[str, Any],
) -> Run:
    """Train a recipe and return the finished run: ``train("table1a/r3", data="my_corpus/", optim={"lr": 10})``.

    ``data`` is a folder or a named corpus, or settings of that section. ``out`` is the run's folder, a new one under
    ``runs/`` by default. ``resume`` goes on with the run in ``out``, and needs no recipe. ``reporter`` is told of every
    log line and validation, ``progress`` of the encoding of the text; without a reporter, ``verbose`` says whether
    they are shown, as they are by default on a terminal and in a notebook.
    """
    flush_denormals()
    keep_freed_memory()
    recipe, changes = wanted_recipe(recipe, changes_by_section(data, overrides), out, resume)
    shown = reporter is None and (watched() if verbose is None else verbose)
    with (
        joined_processes(device) as processes,
        chosen_folder(recipe, out, resume, processes) as folder,
        work_bar("reading the text") if shown and progress is None else nullcontext(progress) as reading,
    ):
        if folder.result.exists():
            if processes.is_first:
                _tell(
                    f"The run in {folder.path} was finished already, so nothing is trained; a new one goes on from its "
                    f"weights by train.start_from {folder.path}.",
                    shown,
                )
            return load_run(folder.path, device=device)
        target = processes.device(device)
        corpus = open_data(recipe, processes, reading)
        folder.fingerprint(corpus.tokenization, {split: text.tokens_sha256 for split, text in corpus.splits.items()})
        model = _started_model(recipe, corpus, folder, processes, target, resume)
        telling = reporter or (default_reporter() if shown else QuietReporter())
        if not processes.is_first:  # one process speaks for all
            telling = QuietReporter()
        trainer = make_trainer(model, corpus, recipe, folder, processes, telling)
        environment = describe_environment(target)
        if resume:
            trainer.resume()
        if processes.is_first:  # only now, after all checks
            _open_folder(folder, recipe, corpus, resume)
            for sentence in _before_training(recipe, changes, corpus, trainer):
                _tell(sentence, shown)
            if resume and not trainer.position.step:
                _tell("The run had written no checkpoint yet, so it begins at its first step.", shown)
            facts = {"parameters": model.parameters_by_part(), **environment}
            folder.log_start(trainer.position.step, as_read(changes, recipe), facts)
        processes.wait()
        position = trainer.run()
        processes.wait()
        load_weights(model, read_checkpoint(folder.best, only="model"), folder.best)
        if processes.is_first:
            result = describe(recipe, changes, model, corpus, folder, position)
            how = {"processes": processes.count, "precision": trainer.precision.name}
            folder.write_result({**result, **environment, **how})
            if reporter is None and (trouble := shortfall(result)):  # with a reporter, the caller shows the result too
                log.warning(trouble)
        processes.wait()
        return Run(folder, recipe, corpus.tokenization, model.eval(), folder.best)


def _open_folder(folder: RunFolder, recipe: Recipe, corpus: Corpus | Bitext, resume: bool) -> None:
    """Write the files that a run's folder has from its first step on."""
    if resume:
        folder.bring_up_to_date(recipe, corpus.tokenization)
    else:
        folder.create(recipe, corpus.tokenization)
    _keep_token_counts(folder, corpus)


def _started_model(
    recipe: Recipe, corpus: Any, folder: RunFolder, processes: Processes, device: torch.device, resume: bool
) -> Any:
    """The model before its first step, or before a checkpoint is loaded into it."""
    torch.manual_seed(recipe.train.seed)  # every process draws the same weights …
    model = fresh_model(recipe, corpus).to(device)
    torch.manual_seed(recipe.train.seed + 1_000_003 * processes.rank)  # … and its own dropout
    goes_on = resume and folder.last.exists()  # with its own weights, even if the other run is gone
    if recipe.train.start_from is not None and not goes_on:
        _take_weights(model, recipe, folder, RunFolder(recipe.train.start_from))
    if recipe.train.compile:
        model.compile_parts()
    return model


def _before_training(recipe: Recipe, changes: Changes, corpus: Corpus | Bitext, trainer: Trainer) -> list[str]:
    """What the user should know while the run can still be stopped."""
    given = {f"{section}.{name}" for section, settings in changes.items() for name in settings}
    idle = sorted(given & settings_without_effect(recipe))
    without_effect = f"Without effect beside the recipe's other settings: {', '.join(idle)}." if idle else ""
    warmup = unfinished_warmup(recipe.schedule, trainer.data.total_steps)
    described = [describe_amount(corpus, trainer.data), *describe_tokens(corpus, recipe)]
    described += [*describe_bands(corpus, recipe), *describe_measuring(corpus)]
    return [sentence for sentence in (trainer.precision.note, without_effect, *described, warmup) if sentence]


def _tell(sentence: str, shown: bool) -> None:
    """Log a sentence, and show it too where training is shown but logging is not set up."""
    log.info(sentence)
    if shown and not log.isEnabledFor(logging.INFO):
        say(sentence)


def _keep_token_counts(folder: RunFolder, corpus: Corpus | Bitext) -> None:
    """Keep counts for machines without the training text, for evaluation and compression; words have theirs already."""
    if isinstance(corpus, Corpus) and corpus.tokenization.counts is None and not folder.token_counts.exists():
        folder.write_token_counts(corpus.splits["train"].counts(len(corpus.tokenization)).tolist())


def load_run(
    path: str | Path,
    *,
    checkpoint: str = "best",
    device: str | None = None,
    cached: bool = False,
    compressed: bool = False,
) -> Run:
    """Open a run folder: ``load_run("runs/x").model``; ``checkpoint`` is "best", "last" or "average".

    With ``cached``, vectors are looked up that ``Run.cache`` wrote for these weights; with ``compressed``, those that
    ``Run.compress`` packed. From then on the process treats numbers below 1e-38 as zero, which is faster.
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
        raise UserError(
            f"The run in {path} has no average: make it with `torchdefine average {shlex.quote(str(path))}`."
        )
    if checkpoint == "best" and not file.exists() and folder.last.exists():
        raise UserError(
            f"The run in {path} has not been validated yet, so it has no best weights: use {option('checkpoint')} last."
        )
    weights = read_checkpoint(file, only="model")
    folder.check_fingerprints(weights.facts, file)
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are thrown away: the caller's random numbers stay
        model = unloaded_model(recipe, tokenization)
    load_weights(model, weights, file)
    run = Run(folder, recipe, tokenization, model.to(Processes().device(device)).eval(), file)
    if cached:
        run.use_cache()
    if compressed:
        run.use_compressed()
    return run


def average_run(path: str | Path, last: int | None = None) -> tuple[RunFolder, list[int]]:
    """Average the ``last`` checkpoints that a run has kept, all by default; ``load_run`` then takes "average" too."""
    folder = RunFolder(path)
    folder.fingerprint(load_tokens(folder.recipe(), folder.path))
    return folder, average_checkpoints(folder, last)


def _take_weights(model: LanguageModel | Translator, recipe: Recipe, folder: RunFolder, other: RunFolder) -> None:
    """Start from another run's best weights; its vocabulary must be this run's, its text need not be."""
    if not other.path.exists():
        raise UserError(f"train.start_from names {other.path}, but there is no such folder: name a run's folder.")
    if not other.best.exists():
        raise UserError(f"train.start_from {other.path} has no best weights: name a run's folder.")
    weights = read_checkpoint(other.best, only="model")
    if weights.facts.get("vocabulary_sha256") != folder.fingerprints["vocabulary_sha256"]:
        raise UserError(f"train.start_from {other.path} has another vocabulary: {_how_to_share_a_vocabulary(other)}.")
    try:
        load_weights(model, weights, other.best)
    except UserError:
        trained = other.recipe()
        raise UserError(
            f"train.start_from {other.path} is a model of {trained.name}, whose weights do not fit into one of "
            f"{recipe.name}{_where_models_differ(trained, recipe)}: start from a run with the same model."
        ) from None


def _how_to_share_a_vocabulary(run: RunFolder) -> str:
    tokenizer = run.path / TOKENIZER_FILE
    if tokenizer.is_file():
        return f"set data.tokenizer to {tokenizer}, which it was trained with"
    return "the words of another text are another vocabulary, so give both runs one tokenizer by data.tokenizer"


def _where_models_differ(one: Recipe, other: Recipe) -> str:
    """Some settings in brackets; nothing where it is not the settings."""
    parts = ("task", "embedding", "context", "output", "transformer")
    found = [place for place, _, _ in differences(to_plain(one), to_plain(other)) if place.split(".")[0] in parts]
    more = f" and {len(found) - MOST_SETTINGS_NAMED} more" if len(found) > MOST_SETTINGS_NAMED else ""
    return f" (they differ in {', '.join(found[:MOST_SETTINGS_NAMED])}{more})" if found else ""
