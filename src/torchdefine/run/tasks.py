"""The two tasks that a recipe may name, in one shape: their data, their models, and what a trainer needs of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchdefine.build import VocabularyFacts, build_language_model, open_corpus
from torchdefine.build_translation import build_translator, loaded_facts, open_bitext, trained_facts
from torchdefine.data import Bitext, Corpus, Tokenization, TokenizerPair, TokenStreams, load_tokenization, shard
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.models import LanguageModel
from torchdefine.recipe import Recipe
from torchdefine.run.translation import check_translation_packages, describe_translation, pair_data, pair_validation
from torchdefine.training import Evaluation, RunFolder, Trainer, evaluate
from torchdefine.training.batches import TextBatches, TrainingData
from torchdefine.training.distributed import Processes
from torchdefine.training.kept_checkpoints import keep_checkpoint
from torchdefine.training.progress import Reporter
from torchdefine.training.result import describe_result
from torchdefine.training.run_state import Position


def open_data(recipe: Recipe, processes: Processes, progress: Progress | None) -> Corpus | Bitext:
    """The first process fetches and encodes the text; the others then find it in the cache."""
    if recipe.task == "translation":
        check_translation_packages()
    if not processes.is_first:
        processes.wait()
        corpus = _open_text(recipe, None)
    else:
        try:
            corpus = _open_text(recipe, progress)
        except UserError:
            processes.wait()  # so that the others refuse the text for the same reason, not because we exit
            raise
        for text in corpus.splits.values():
            text.verify()
        processes.wait()
    processes.wait()
    return corpus


def _open_text(recipe: Recipe, progress: Progress | None) -> Corpus | Bitext:
    return open_bitext(recipe, progress) if recipe.task == "translation" else open_corpus(recipe.data, progress)


def fresh_model(recipe: Recipe, corpus: Any) -> Any:
    """The recipe's model with fresh weights, for the corpus or bitext it will be trained on."""
    if recipe.task == "translation":
        return build_translator(recipe, *trained_facts(corpus), corpus.tokenization.source.pad_id)
    return build_language_model(recipe, _trained_facts(corpus))


def load_tokens(recipe: Recipe, folder: Path) -> Any:
    """The vocabulary or tokenizers that a run saved."""
    return TokenizerPair.load(folder) if recipe.task == "translation" else load_tokenization(folder)


def unloaded_model(recipe: Recipe, tokenization: Any) -> Any:
    """The recipe's model, whose weights are about to be loaded."""
    if recipe.task == "translation":
        return build_translator(recipe, *loaded_facts(tokenization), tokenization.source.pad_id)
    return build_language_model(recipe, _loaded_facts(tokenization))


def describe(
    recipe: Recipe, changes: Mapping[str, Any], model: Any, corpus: Any, folder: RunFolder, position: Position
) -> dict[str, Any]:
    """The result of a finished run."""
    if recipe.task == "translation":
        return describe_translation(recipe, changes, model, corpus, folder, position)
    return describe_result(recipe, changes, model, corpus, folder, position)


def make_trainer(
    model: Any,
    corpus: Any,
    recipe: Recipe,
    folder: RunFolder,
    processes: Processes,
    reporter: Reporter,
) -> Trainer:
    """The loop over the recipe's data, with validation where there is a text for it."""
    device = next(model.parameters()).device
    data: TrainingData
    if recipe.task == "translation":
        data, validate = pair_data(recipe, corpus, device, processes), pair_validation(recipe, corpus, model)
    else:
        data, validate = _text_data(recipe, corpus, device, processes), _text_validation(recipe, corpus, model)
    if validate is None:
        _check_needs_no_validation(recipe)
    if validate is None or not recipe.train.keep:
        return Trainer(model, data, recipe, folder, validate, processes, reporter)

    def validate_and_keep() -> Evaluation:
        if processes.is_first:
            keep_checkpoint(folder, model, trainer.position.step, recipe.train.keep)
        return validate()

    trainer = Trainer(model, data, recipe, folder, validate_and_keep, processes, reporter)
    return trainer


def _check_needs_no_validation(recipe: Recipe) -> None:
    """Without a validation text, refuse settings that would silently have no effect."""
    going_by_it = {
        "schedule.kind plateau": recipe.schedule.kind == "plateau",
        "optim.averaging stalled": recipe.optim.averaging == "stalled",
        "train.stop_when_stalled": recipe.train.stop_when_stalled,
        "train.keep": recipe.train.keep > 0,
    }
    for name, asked_for in going_by_it.items():
        if asked_for:
            raise UserError(f"{name} goes by validations, but there is no validation text: add one, or change it.")


def _text_data(recipe: Recipe, corpus: Corpus, device: torch.device, processes: Processes) -> TextBatches:
    rows = shard(recipe.train.batch_size, processes.rank, processes.count)
    if (rows.stop - rows.start) % recipe.train.accumulate:
        raise UserError(
            f"The {rows.stop - rows.start} streams of a process cannot be cut into {recipe.train.accumulate} equal "
            "parts: change train.batch_size or train.accumulate."
        )
    tokens, start = np.asarray(corpus.splits["train"].tokens), corpus.tokenization.eos_id
    return TextBatches(TokenStreams(tokens, recipe.train.batch_size, device, start, rows), recipe.train)


def _text_validation(recipe: Recipe, corpus: Corpus, model: LanguageModel) -> Callable[[], Evaluation] | None:
    if "valid" not in corpus.splits:
        return None
    valid, start = corpus.splits["valid"], corpus.tokenization.eos_id
    streams = recipe.eval.valid_batch_size or recipe.eval.batch_size
    return partial(evaluate, model, valid, start, batch_size=streams, length=recipe.eval.length)


def _loaded_facts(tokenization: Tokenization) -> VocabularyFacts:
    """For a model whose weights are about to be loaded: where bands go by rank, the ranks come with the weights."""
    size = len(tokenization)
    return VocabularyFacts(size, np.zeros(size, np.int64) if tokenization.kind == "subwords" else None)


def _trained_facts(corpus: Corpus) -> VocabularyFacts:
    """Words are in frequency order; subwords are not, so their bands go by how often they occur in training."""
    size, subwords = len(corpus.tokenization), corpus.tokenization.kind == "subwords"
    return VocabularyFacts(size, corpus.splits["train"].counts(size) if subwords else None)
