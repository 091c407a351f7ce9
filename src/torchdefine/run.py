"""Runs from Python: ``train`` makes a run folder, ``load_run`` opens one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchdefine.build import VocabularyFacts, build_language_model, open_corpus
from torchdefine.context import TransformerXL
from torchdefine.data import Corpus, Tokenization, TokenStreams, encode_corpus, load_tokenization, resolve_corpus, shard
from torchdefine.decoding import SamplingOptions, generate
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.models import LanguageModel
from torchdefine.recipe import Recipe, load_recipe
from torchdefine.settings import to_plain
from torchdefine.training import Evaluation, RunFolder, Trainer, evaluate
from torchdefine.training.checkpoint import load_weights, read_checkpoint
from torchdefine.training.distributed import Processes, joined_processes
from torchdefine.training.environment import describe_environment
from torchdefine.training.precision import flush_denormals
from torchdefine.training.progress import QuietReporter, Reporter
from torchdefine.training.result import describe_result, training_counts


@dataclass
class Run:
    """A trained model with its vocabulary, settings and result."""

    folder: RunFolder
    recipe: Recipe
    tokenization: Tokenization
    model: LanguageModel

    @property
    def result(self) -> dict[str, Any]:
        return self.folder.read_result()

    def evaluate(
        self,
        split: str = "test",
        *,
        data: str | Path | None = None,
        batch_size: int | None = None,
        length: int | None = None,
        memory: int | None = None,
        clamp: int | None = None,
        progress: Progress | None = None,
    ) -> Evaluation:
        """Perplexity on a split of the run's own corpus, or of another one encoded with the run's vocabulary.

        What is None is as in the recipe; ``memory`` and ``clamp`` are how far back a Transformer-XL looks.
        """
        source = resolve_corpus(str(data or self.recipe.data.corpus))
        corpus = encode_corpus(source, vocabulary=self.tokenization)
        if split not in corpus.splits:
            raise UserError(f"{source} has no {split} text: it has {', '.join(corpus.splits)}.")
        with _remembering(self.model, memory, clamp):
            return evaluate(
                self.model,
                corpus.splits[split],
                self.tokenization.eos_id,
                batch_size=self.recipe.eval.batch_size if batch_size is None else batch_size,
                length=self.recipe.eval.length if length is None else length,
                progress=progress,
            )

    def generate(
        self,
        prompt: str = "",
        length: int = 100,
        options: SamplingOptions | None = None,
        *,
        seed: int | None = None,
    ) -> str:
        """Continue a text; words outside the vocabulary are read as <unk>, and <unk> is never drawn."""
        words = self.tokenization
        ids = [words.eos_id, *(words.encode(prompt)[:-1] if prompt else [])]
        if options is None:
            options = SamplingOptions(forbidden=() if words.unk_id is None else (words.unk_id,))
        generator = torch.Generator().manual_seed(seed) if seed is not None else None
        continuation = generate(self.model, ids, length, options, generator=generator)
        return words.decode(continuation)


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
    changes = _changes(data, overrides)
    recipe = _resolve(recipe, changes)
    with joined_processes() as processes, _chosen_folder(recipe, out, resume, processes) as folder:
        if folder.result.exists():
            return load_run(folder.path, device=device)
        target = processes.device(device)
        corpus = _encoded(recipe, processes, progress)
        folder.fingerprint(corpus.tokenization, corpus.splits["train"])
        torch.manual_seed(recipe.train.seed)  # every process draws the same weights …
        model = build_language_model(recipe, _trained_facts(corpus)).to(target)
        torch.manual_seed(recipe.train.seed + 1_000_003 * processes.rank)  # … and its own dropout
        if recipe.train.compile:
            model.compile_parts()
        if reporter is None or not processes.is_first:  # one process speaks for all
            reporter = QuietReporter()
        trainer = _trainer(model, corpus, recipe, folder, processes, reporter)
        if resume:
            trainer.resume()
        elif processes.is_first:  # only now, when nothing speaks against the run any more
            folder.create(recipe, corpus.tokenization)
        processes.wait()
        environment = describe_environment(target)
        if processes.is_first:
            folder.log(
                "start", {"step": trainer.position.step, "parameters": model.parameters_by_part(), **environment}
            )
        position = trainer.run()
        processes.wait()
        load_weights(model, read_checkpoint(folder.best, only="model"), folder.best)
        if processes.is_first:
            result = describe_result(recipe, changes, model, corpus, folder, position)
            folder.write_result(
                {**result, **environment, "processes": processes.count, "precision": trainer.precision.name}
            )
        processes.wait()
        return Run(folder, recipe, corpus.tokenization, model)


def load_run(path: str | Path, *, checkpoint: str = "best", device: str | None = None) -> Run:
    """Open a run folder: ``load_run("runs/x").model``; ``checkpoint`` is "best" or "last"."""
    if checkpoint not in ("best", "last"):
        raise UserError(f"The checkpoint {checkpoint!r} is unknown: use best or last.")
    flush_denormals()
    folder = RunFolder(path)
    recipe = folder.recipe()
    tokenization = load_tokenization(folder.path)
    folder.fingerprint(tokenization)
    file = folder.best if checkpoint == "best" else folder.last
    if checkpoint == "best" and not file.exists() and folder.last.exists():
        raise UserError(
            f"The run in {path} has not been validated yet, so it has no best weights: use --checkpoint last."
        )
    weights = read_checkpoint(file, only="model")
    folder.check_fingerprints(weights.facts, file)
    model = build_language_model(recipe, _loaded_facts(tokenization))
    load_weights(model, weights, file)
    return Run(folder, recipe, tokenization, model.to(Processes().device(device)).eval())


def _remembering(model: LanguageModel, memory: int | None, clamp: int | None) -> AbstractContextManager[None]:
    if memory is None and clamp is None:
        return nullcontext()
    if not isinstance(model.context, TransformerXL):
        raise UserError("Only a Transformer-XL can be evaluated with another --memory or --clamp: leave them out.")
    return model.context.remembering(memory, clamp)


def _loaded_facts(tokenization: Tokenization) -> VocabularyFacts:
    """For a model whose weights are about to be loaded: where bands go by rank, the ranks come with the weights."""
    size = len(tokenization)
    return VocabularyFacts(size, np.zeros(size, np.int64) if tokenization.kind == "subwords" else None)


def _trained_facts(corpus: Corpus) -> VocabularyFacts:
    """Words are in frequency order; subwords are not, so their bands go by how often they occur in training."""
    subwords = corpus.tokenization.kind == "subwords"
    return VocabularyFacts(len(corpus.tokenization), training_counts(corpus) if subwords else None)


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
    corpus = Path(recipe.data.corpus).expanduser()
    if recipe.data.corpus and corpus.is_dir():  # a run must find its text from anywhere
        recipe = replace(recipe, data=replace(recipe.data, corpus=str(corpus.resolve())))
    return recipe


def _encoded(recipe: Recipe, processes: Processes, progress: Progress | None) -> Corpus:
    """The first process fetches and encodes the text; the others then find it in the cache."""
    for mine in (True, False):
        if processes.is_first == mine:
            corpus = open_corpus(recipe.data, progress if processes.is_first else None)
            if processes.is_first:
                for text in corpus.splits.values():
                    text.verify()
        processes.wait()
    return corpus


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
        changed = _first_difference(to_plain(folder.recipe()), to_plain(recipe))
        if changed:
            raise UserError(
                f"The run in {folder.path} was started with another {changed}: resume it with the same settings, or "
                "start a new one with another --out."
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
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).stem if name.endswith(".yaml") else name) or "run"
    number = 1
    while (path := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return path


def _trainer(
    model: LanguageModel,
    corpus: Corpus,
    recipe: Recipe,
    folder: RunFolder,
    processes: Processes,
    reporter: Reporter,
) -> Trainer:
    device = next(model.parameters()).device
    start = corpus.tokenization.eos_id
    rows = shard(recipe.train.batch_size, processes.rank, processes.count)
    if (rows.stop - rows.start) % recipe.train.accumulate:
        raise UserError(
            f"The {rows.stop - rows.start} streams of a process cannot be cut into {recipe.train.accumulate} equal "
            "parts: change train.batch_size or train.accumulate."
        )
    streams = TokenStreams(np.asarray(corpus.splits["train"].tokens), recipe.train.batch_size, device, start, rows)
    validate = None
    if "valid" in corpus.splits:
        valid = corpus.splits["valid"]
        rows_in_validation = recipe.eval.valid_batch_size or recipe.eval.batch_size
        validate = partial(evaluate, model, valid, start, batch_size=rows_in_validation, length=recipe.eval.length)
    return Trainer(model, streams, recipe, folder, validate, processes, reporter)
