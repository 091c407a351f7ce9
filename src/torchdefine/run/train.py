"""``train`` makes a run folder from a recipe: its outline, from the recipe to the finished run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchdefine.embedding.token_embedding import SizesRead, sizes_read
from torchdefine.errors import UserError
from torchdefine.files import Progress, seal_of
from torchdefine.run.environment import code_sha256, describe_environment
from torchdefine.run.folder import RunFolder
from torchdefine.run.result import shortfall
from torchdefine.run.run import Run, load_run
from torchdefine.run.starting import Changes, chosen_folder, take_weights, wanted_recipe
from torchdefine.task import Recipe, Task, find_task
from torchdefine.training import Trainer
from torchdefine.training.checkpoint import load_weights
from torchdefine.training.distributed import Processes, joined_processes
from torchdefine.training.progress import Reporter, default_reporter, say, watched, work_bar

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
    they are shown, as they are by default on a terminal and in a notebook. From then on the process keeps freed memory
    and treats numbers below 1e-38 as zero, which is faster.
    """
    wanted, changes = wanted_recipe(recipe, data, overrides, out, resume)
    with (
        joined_processes(device) as processes,
        own_random_numbers(processes.device(device)),
        chosen_folder(wanted, out, resume, processes) as folder,
    ):
        voice = Voice(processes, reporter, progress, verbose)
        setup = Setup(wanted, changes, folder, processes, voice, resume)
        if folder.result.exists():
            return open_finished(setup, device)
        texts = open_data(setup)
        model = build_model(setup, texts, device)
        trainer = make_trainer(setup, texts, model)
        begin(setup, texts, trainer)
        trainer.run()
        return finish(setup, texts, trainer)


def own_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Within it torch's random numbers may be set; afterwards they go on where the caller left them."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


class Voice:
    """Who is told what: one process speaks for all."""

    def __init__(
        self, processes: Processes, reporter: Reporter | None, progress: Progress | None, verbose: bool | None
    ) -> None:
        self.speaks, self.has_listener, self.progress = processes.is_first, reporter is not None, progress
        self.shown = reporter is None and (watched() if verbose is None else verbose)
        shower = reporter or (default_reporter() if self.shown else Reporter())
        self.reporter = shower if self.speaks else Reporter()

    def reading(self) -> AbstractContextManager[Progress | None]:
        """Around the encoding of the text."""
        return work_bar("reading the text") if self.shown and self.progress is None else nullcontext(self.progress)

    def say(self, sentence: str) -> None:
        """Log a sentence, and show it too where training is shown but logging is not set up."""
        if self.speaks:
            log.info(sentence)
            if self.shown and not log.isEnabledFor(logging.INFO):
                say(sentence)


@dataclass(frozen=True)
class Setup:
    """What a training goes by from its beginning to its end."""

    recipe: Any
    changes: Changes
    folder: RunFolder
    processes: Processes
    voice: Voice
    resume: bool

    @property
    def task(self) -> Task:
        return find_task(self.recipe.task)


def open_finished(setup: Setup, device: str | None) -> Any:
    path = setup.folder.path
    setup.voice.say(
        f"The run in {path} is already finished, so nothing is trained. To start a new run from its weights, use "
        f"train.start_from {path}."
    )
    return load_run(path, device=device)


def open_data(setup: Setup) -> Any:
    """The recipe's texts: the first process fetches and encodes them, the others then find them in the cache."""
    task, processes = setup.task, setup.processes
    refusal = None
    for turn in (True, False):
        try:
            if processes.is_first is turn:
                task.check_packages()
                with setup.voice.reading() if turn else nullcontext() as progress:
                    data = task.open_data(setup.recipe, progress)
                for text in data.splits.values():
                    text.verify()
        except UserError as error:
            refusal = str(error)
        for sentence in filter(None, processes.facts_of_all(refusal)):
            raise UserError(sentence)  # the same in all processes
    check_agreement(setup, data)
    setup.folder.fingerprint(data.tokenization, setup.recipe, data)
    return data


def check_agreement(setup: Setup, data: Any) -> None:
    """Refuse processes that would train something else than each other: with one sentence, all of them."""
    recipe, processes = setup.recipe, setup.processes
    own = {
        "the recipe": recipe.bound_settings(),
        "the text": {split: text.tokens_sha256 for split, text in data.splits.items()},
        "the vocabulary": data.tokenization.sha256,
        "whether to resume": setup.resume,
        "the number of processes": processes.count,
        "the versions of the code": [code_sha256(), torch.__version__],
    }
    everyones = processes.facts_of_all({name: seal_of(fact) for name, fact in own.items()})
    if differing := [name for name in own if len({others[name] for others in everyones}) > 1]:
        raise UserError(
            f"The processes do not agree on {' and '.join(differing)}: give all of them the same recipe, text and "
            "version of torchdefine."
        )


def build_model(setup: Setup, data: Any, device: str | None) -> Any:
    """The model before its first step, or before a checkpoint is loaded into it."""
    recipe, processes, folder = setup.recipe, setup.processes, setup.folder
    torch.manual_seed(recipe.train.seed)  # every process draws the same weights …
    with torch.device("cpu"):  # whatever the caller's default is
        model: Any = setup.task.build(recipe, data.tokenization, data).to(processes.device(device))
    torch.manual_seed(recipe.train.seed + 1_000_003 * processes.rank)  # … and its own dropout
    goes_on = setup.resume and folder.last.exists()  # with its own weights, even if the other run is gone
    if recipe.train.start_from is not None and not goes_on:
        take_weights(model, recipe, folder)
    if recipe.train.compile:
        model.compile_parts()
    return model


def make_trainer(setup: Setup, data: Any, model: Any) -> Trainer:
    """The loop over the recipe's data, with validation where there is a text for it."""
    recipe, task, processes = setup.recipe, setup.task, setup.processes
    batches = task.batches(recipe, data, next(model.parameters()).device, processes)
    validate = task.validation(recipe, data, model)
    return Trainer(model, batches, recipe, setup.folder, validate, processes, setup.voice.reporter)


def begin(setup: Setup, data: Any, trainer: Trainer) -> None:
    """Restore the last checkpoint, and only now, after all checks, write the files of the run."""
    folder, voice, resume = setup.folder, setup.voice, setup.resume
    if resume:
        trainer.resume()
    if voice.speaks:
        folder.begin(setup.recipe, data.tokenization, resume)
        counts = setup.task.token_counts(data)
        if counts is not None and not folder.token_counts.exists():
            folder.write_token_counts(counts)
        fresh = not trainer.position.step and setup.recipe.train.start_from is None
        sizes = {side: sizes_read(one) for side, one in trainer.model.embeddings().items()} if fresh else {}
        for sentence in _before_training(setup, data, trainer, sizes):
            voice.say(sentence)
        facts = {"parameters": trainer.model.parameters_by_part(), **describe_environment(trainer.device)}
        facts |= {"initial_rms": {side: size._asdict() for side, size in sizes.items()}} if fresh else {}
        folder.log("start", {"step": trainer.position.step, "overrides": setup.changes, **facts})
    setup.processes.wait()


def _before_training(setup: Setup, data: Any, trainer: Trainer, sizes: Mapping[str, SizesRead]) -> list[str]:
    """What the user should know while the run can still be stopped."""
    task, steps = setup.task, trainer.data.total_steps
    passes = trainer.data.epoch_after(steps)
    shown = f"{passes:,.1f}" if passes >= 0.1 else f"{passes:.1g}"
    unmeasured = cold = unbegun = ""
    if not {"valid", "test"} & data.splits.keys():
        unmeasured = (
            "There is neither a valid nor a test text, so nothing will be validated or tested: add one to the folder "
            f"of the text, or measure the run afterwards with `torchdefine eval RUN --data {task.measured_on}`."
        )
    if (warmup := setup.recipe.schedule.warmup) > steps:
        cold = (
            f"The warm-up takes {warmup:,} steps, but training ends after {steps:,}, so the learning rate never "
            "reaches its maximum: use a smaller schedule.warmup, or more steps."
        )
    if setup.resume and not trainer.position.step:
        unbegun = "The run had written no checkpoint yet, so it starts again at its first step."
    sentences = [
        trainer.precision.note,
        f"The training text has {task.amount(data)}; {steps:,} steps are {shown} passes over it.",
        *task.about_data(setup.recipe, data),
        *_what_it_reads(sizes),
        unmeasured,
        cold,
        unbegun,
    ]
    return [sentence for sentence in sentences if sentence]


def _what_it_reads(sizes: Mapping[str, SizesRead]) -> Iterator[str]:
    """The size of fresh vectors, which decides more than what a unit does with them."""
    for side, (mapped, finished) in sizes.items():
        of = f" ({side})" if len(sizes) > 1 else ""
        unit = "" if mapped is None else f" (the unit's input: {mapped:.2g})"
        yield f"Initial root mean square of the vectors{of} that the model reads: {finished:.2g}{unit}."


def finish(setup: Setup, data: Any, trainer: Trainer) -> Run:
    """Measure the best weights, write the result and open the run."""
    recipe, folder, task, processes = setup.recipe, setup.folder, setup.task, setup.processes
    model, position = trainer.model, trainer.position
    processes.wait()
    load_weights(model, folder.read(folder.best, only="model"), folder.best)
    run: Run = task.run(folder, recipe, data.tokenization, model.eval(), folder.best)
    if processes.is_first:
        of_the_curve = ("step", "tokens", "seconds", "loss", "lr", "gradient_norm")
        result = {
            "recipe": recipe.name,
            "overrides": setup.changes,
            "settings": recipe.to_plain(),
            "seed": recipe.train.seed,
            "parameters": model.parameters_by_part(),
            "steps": position.step,
            "tokens": position.tokens,
            "seconds": round(position.total_seconds, 2),
            "tokens_per_second": round(position.tokens / max(position.train_seconds, 1e-9), 1),
            "best_step": position.best_step,
            "curve": [{k: v for k, v in record.items() if k != "kind"} for record in folder.records("valid")],
            "train_curve": [{k: r[k] for k in of_the_curve if k in r} for r in folder.records("train")],
            **task.result(run, data),
            **describe_environment(trainer.device),
            "processes": processes.count,
            "precision": trainer.precision.name,
        }
        folder.write_result(result)
        if not setup.voice.has_listener and (trouble := shortfall(result)):
            log.warning(trouble)
    processes.wait()
    return run
