"""``train`` makes a run folder from a recipe: its outline, from the recipe to the finished run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.recipe import Recipe
from torchdefine.run.environment import describe_environment
from torchdefine.run.folder import RunFolder
from torchdefine.run.kept_checkpoints import keep_checkpoint
from torchdefine.run.load import load_run
from torchdefine.run.result import as_read, describe_training, shortfall
from torchdefine.run.run import Run
from torchdefine.run.start_from import take_weights
from torchdefine.run.starting import Changes, changes_by_section, chosen_folder, wanted_recipe
from torchdefine.task import Task, find_task
from torchdefine.training import Evaluation, Trainer
from torchdefine.training.averaging import StalledAveragingConfig
from torchdefine.training.checkpoint import load_weights
from torchdefine.training.distributed import Processes, joined_processes
from torchdefine.training.memory import keep_freed_memory
from torchdefine.training.precision import flush_denormals
from torchdefine.training.progress import QuietReporter, Reporter, default_reporter, say, watched, work_bar
from torchdefine.training.schedules import unfinished_warmup

log = logging.getLogger(__name__)


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
    **overrides: Mapping[str, Any] | str,
) -> Any:
    """Train a recipe and return the finished run: ``train("table1a/r3", data="my_corpus/", optim={"lr": 10})``.

    ``data`` is a folder or a named corpus, or settings of that section. ``out`` is the run's folder, a new one under
    ``runs/`` by default. ``resume`` goes on with the run in ``out``, and needs no recipe. ``reporter`` is told of every
    log line and validation, ``progress`` of the encoding of the text; without a reporter, ``verbose`` says whether
    they are shown, as they are by default on a terminal and in a notebook.
    """
    flush_denormals()
    keep_freed_memory()
    recipe, changes = wanted_recipe(recipe, changes_by_section(data, overrides), out, resume)
    with joined_processes(device) as processes, chosen_folder(recipe, out, resume, processes) as folder:
        voice = Voice.of(processes, reporter, progress, verbose)
        if folder.result.exists():
            return _already_finished(folder, device, voice)
        task = find_task(recipe.task)
        texts = open_data(task, recipe, processes, voice)
        folder.fingerprint(texts.tokenization, {split: text.tokens_sha256 for split, text in texts.splits.items()})
        model = _started_model(task, recipe, texts, folder, processes, processes.device(device), resume)
        trainer = _make_trainer(task, recipe, texts, model, folder, processes, voice)
        _begin(task, recipe, changes, texts, folder, trainer, voice, resume)
        trainer.run()
        return _finish(task, recipe, changes, texts, folder, trainer, voice)


@dataclass(frozen=True)
class Voice:
    """Who is told what: one process speaks for all."""

    reporter: Reporter
    shown: bool
    """Whether sentences are shown, since nobody else shows what happens."""
    reading: AbstractContextManager[Any]
    """Around the encoding of the text."""
    speaks: bool
    has_listener: bool
    """Whether the caller gave a reporter, and shows the result too."""

    @classmethod
    def of(
        cls, processes: Processes, reporter: Reporter | None, progress: Progress | None, verbose: bool | None
    ) -> Voice:
        shown = reporter is None and (watched() if verbose is None else verbose)
        telling = reporter or (default_reporter() if shown else QuietReporter())
        reading = work_bar("reading the text") if shown and progress is None else nullcontext(progress)
        first = processes.is_first
        return cls(telling if first else QuietReporter(), shown, reading, first, reporter is not None)

    def say(self, sentence: str) -> None:
        """Log a sentence, and show it too where training is shown but logging is not set up."""
        if self.speaks:
            log.info(sentence)
            if self.shown and not log.isEnabledFor(logging.INFO):
                say(sentence)


def _already_finished(folder: RunFolder, device: str | None, voice: Voice) -> Run:
    voice.say(
        f"The run in {folder.path} was finished already, so nothing is trained; a new one goes on from its weights by "
        f"train.start_from {folder.path}."
    )
    return load_run(folder.path, device=device)


def open_data(task: Task, recipe: Any, processes: Processes, voice: Voice) -> Any:
    """The first process fetches and encodes the text; the others then find it in the cache."""
    task.check_packages()
    if not processes.is_first:
        processes.wait()
        data = task.open_data(recipe, None)
    else:
        try:
            with voice.reading as progress:
                data = task.open_data(recipe, progress)
        except UserError:
            processes.wait()  # so that the others refuse the text for the same reason, not because we exit
            raise
        for text in data.splits.values():
            text.verify()
        processes.wait()
    processes.wait()
    return data


def _started_model(
    task: Task, recipe: Any, data: Any, folder: RunFolder, processes: Processes, device: torch.device, resume: bool
) -> Any:
    """The model before its first step, or before a checkpoint is loaded into it."""
    torch.manual_seed(recipe.train.seed)  # every process draws the same weights …
    model: Any = task.build(recipe, data.tokenization, data).to(device)
    torch.manual_seed(recipe.train.seed + 1_000_003 * processes.rank)  # … and its own dropout
    goes_on = resume and folder.last.exists()  # with its own weights, even if the other run is gone
    if recipe.train.start_from is not None and not goes_on:
        take_weights(model, recipe, folder)
    if recipe.train.compile:
        model.compile_parts()
    return model


def _make_trainer(
    task: Task, recipe: Any, data: Any, model: Any, folder: RunFolder, processes: Processes, voice: Voice
) -> Trainer:
    """The loop over the recipe's data, with validation where there is a text for it."""
    device = next(model.parameters()).device
    batches, validate = task.batches(recipe, data, device, processes), task.validation(recipe, data, model)
    if validate is None:
        _check_needs_no_validation(recipe)
    elif recipe.train.keep:
        validate = _keeping(validate, folder, model, recipe.train.keep, lambda: trainer.position.step, processes)
    trainer = Trainer(model, batches, recipe, folder, validate, processes, voice.reporter)
    return trainer


def _keeping(
    validate: Callable[[], Evaluation],
    folder: RunFolder,
    model: Any,
    count: int,
    step: Callable[[], int],
    processes: Processes,
) -> Callable[[], Evaluation]:
    """A validation that keeps the weights, too."""

    def keep_and_validate() -> Evaluation:
        if processes.is_first:
            keep_checkpoint(folder, model, step(), count)
        return validate()

    return keep_and_validate


def _check_needs_no_validation(recipe: Any) -> None:
    """Without a validation text, refuse settings that would silently have no effect."""
    going_by_it = {
        "schedule.kind plateau": recipe.schedule.drops_after(2**62),
        "averaging.kind stalled": isinstance(recipe.averaging, StalledAveragingConfig),
        "train.early_stopping": recipe.train.early_stopping is not None,
        "train.keep": recipe.train.keep > 0,
    }
    for name, asked_for in going_by_it.items():
        if asked_for:
            raise UserError(f"{name} goes by validations, but there is no validation text: add one, or change it.")


def _begin(
    task: Task,
    recipe: Any,
    changes: Changes,
    data: Any,
    folder: RunFolder,
    trainer: Trainer,
    voice: Voice,
    resume: bool,
) -> None:
    """Restore the last checkpoint, and only now, after all checks, write the files of the run."""
    if resume:
        trainer.resume()
    if voice.speaks:
        if resume:
            folder.bring_up_to_date(recipe, data.tokenization)
        else:
            folder.create(recipe, data.tokenization)
        counts = task.token_counts(data)
        if counts is not None and not folder.token_counts.exists():
            folder.write_token_counts(counts)
        for sentence in _before_training(task, recipe, data, trainer):
            voice.say(sentence)
        if resume and not trainer.position.step:
            voice.say("The run had written no checkpoint yet, so it begins at its first step.")
        facts = {"parameters": trainer.model.parameters_by_part(), **describe_environment(trainer.device)}
        folder.log_start(trainer.position.step, as_read(changes, recipe), facts)
    trainer.processes.wait()


def _before_training(task: Task, recipe: Any, data: Any, trainer: Trainer) -> list[str]:
    """What the user should know while the run can still be stopped."""
    batches = trainer.data
    passes = batches.epoch_after(batches.total_steps)
    shown = f"{passes:,.1f}" if passes >= 0.1 else f"{passes:.1g}"
    amount = f"The training text has {task.amount(data)}; {batches.total_steps:,} steps are {shown} passes over it."
    unmeasured = ""
    if not {"valid", "test"} & data.splits.keys():
        unmeasured = (
            "There is neither a valid nor a test text, so nothing will be validated or tested: add one to the folder "
            f"of the text, or measure the run afterwards by `torchdefine eval RUN --data {task.measured_on}`."
        )
    warmup = unfinished_warmup(recipe.schedule, batches.total_steps)
    said = [trainer.precision.note, amount, *task.about_data(recipe, data), unmeasured, warmup]
    return [sentence for sentence in said if sentence]


def _finish(
    task: Task, recipe: Any, changes: Changes, data: Any, folder: RunFolder, trainer: Trainer, voice: Voice
) -> Run:
    """Measure the best weights and write the result."""
    model, processes = trainer.model, trainer.processes
    processes.wait()
    load_weights(model, folder.read(folder.best, only="model"), folder.best)
    run: Run = task.run(folder, recipe, data.tokenization, model.eval(), folder.best)
    if processes.is_first:
        described = describe_training(recipe, changes, model.parameters_by_part(), folder, trainer.position)
        how = {"processes": processes.count, "precision": trainer.precision.name}
        result = {**described, **task.result(run, data), **describe_environment(trainer.device), **how}
        folder.write_result(result)
        if not voice.has_listener and (trouble := shortfall(result)):
            log.warning(trouble)
    processes.wait()
    return run
