"""Language models as a task: data, model, batches, validation, result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchdefine.data import Corpus, Tokenization, TokenStreams, encode_corpus, load_tokenization, resolve_corpus, shard
from torchdefine.embedding import VocabularyFacts, build_embedding
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.task import Task, register_task
from torchdefine.tasks.language.about_data import describe_bands, describe_tokens
from torchdefine.tasks.language.batches import TextBatches
from torchdefine.tasks.language.evaluate import PUBLIC_STREAMS, evaluate, short_stream_warning, unigram_perplexity
from torchdefine.tasks.language.model import LanguageModel
from torchdefine.tasks.language.recipe import LanguageRecipe, TextConfig
from torchdefine.tasks.language.run import LanguageRun
from torchdefine.training.batches import TrainingData
from torchdefine.training.distributed import Processes
from torchdefine.training.evaluation import Evaluation


@register_task
class LanguageTask(Task):
    """Predict every token of a text from those before it."""

    name = "language"
    recipe = LanguageRecipe
    run = LanguageRun
    measured_on = "FILE"
    vocabulary_settings = ("corpus", "tokenizer", "min_count", "max_size")

    def open_data(self, recipe: LanguageRecipe, progress: Progress | None) -> Corpus:
        return open_corpus(recipe.data, progress)

    def load_tokens(self, folder: Path) -> Tokenization:
        return load_tokenization(folder)

    def build(self, recipe: LanguageRecipe, tokens: Tokenization, data: Corpus | None = None) -> LanguageModel:
        """Words are in frequency order; subwords are not, so their bands go by how often they occur in training.

        Where weights are about to be loaded, the ranks come with them.
        """
        size, counts = len(tokens), None
        if tokens.kind == "subwords":
            counts = np.zeros(size, np.int64) if data is None else data.splits["train"].counts(size)
        return build_language_model(recipe, VocabularyFacts(size, counts))

    def count(self, recipe: LanguageRecipe, tokens: Tokenization | None = None) -> tuple[LanguageModel, int]:
        size = len(tokens) if tokens is not None else recipe.data.vocabulary_size
        size = size or len(open_corpus(recipe.data).tokenization)
        with torch.device("meta"):
            return build_language_model(recipe, VocabularyFacts(size)), size

    def batches(self, recipe: LanguageRecipe, data: Corpus, device: torch.device, processes: Processes) -> TrainingData:
        rows = shard(recipe.train.batch_size, processes.rank, processes.count)
        if (rows.stop - rows.start) % recipe.train.accumulate:
            raise UserError(
                f"The {rows.stop - rows.start} streams of a process cannot be cut into {recipe.train.accumulate} equal "
                "parts: change train.batch_size or train.accumulate."
            )
        tokens, start = np.asarray(data.splits["train"].tokens), data.tokenization.eos_id
        return TextBatches(TokenStreams(tokens, recipe.train.batch_size, device, start, rows), recipe.train)

    def validation(self, recipe: LanguageRecipe, data: Corpus, model: LanguageModel) -> Callable[[], Evaluation] | None:
        if "valid" not in data.splits:
            return None
        streams = recipe.eval.valid_batch_size or recipe.eval.batch_size
        valid, start = data.splits["valid"], data.tokenization.eos_id
        return partial(evaluate, model, valid, start, batch_size=streams, length=recipe.eval.length)

    def result(self, recipe: LanguageRecipe, model: LanguageModel, data: Corpus) -> dict[str, Any]:
        evaluations = _evaluations(recipe, model, data, recipe.eval.batch_size)
        public = _evaluations(recipe, model, data, PUBLIC_STREAMS) if recipe.eval.public else {}
        counts = data.splits["train"].counts(len(data.tokenization))
        unigram = {split: unigram_perplexity(counts, np.asarray(data.splits[split].tokens)) for split in evaluations}
        return {
            "data": {
                "corpus": data.name,
                "vocabulary_size": len(data.tokenization),
                "vocabulary_sha256": data.tokenization.sha256,
                "splits": {
                    name: {
                        "tokens": len(text),
                        "text_sha256": text.header.text_sha256,
                        "tokens_sha256": text.header.tokens_sha256,
                        "lost_share": text.header.lost_share,
                    }
                    for name, text in data.splits.items()
                },
            },
            **{f"{split}_perplexity": evaluation.perplexity for split, evaluation in evaluations.items()},
            **{f"{split}_unigram_perplexity": value for split, value in unigram.items()},
            "evaluation": {split: evaluation.to_dict() for split, evaluation in evaluations.items()},
            **({"public_evaluation": {split: one.to_dict() for split, one in public.items()}} if public else {}),
        }

    def amount(self, data: Corpus) -> str:
        counted = "words and line ends" if data.tokenization.kind == "words" else "subwords"
        return f"{len(data.splits['train']):,} {counted}"

    def about_data(self, recipe: LanguageRecipe, data: Corpus) -> list[str]:
        return [*describe_tokens(data, recipe.data), *describe_bands(len(data.tokenization), recipe)]

    def token_counts(self, data: Corpus) -> Sequence[int] | None:
        """Vocabularies of words have counts themselves."""
        if data.tokenization.counts is not None:
            return None
        counts: list[int] = data.splits["train"].counts(len(data.tokenization)).tolist()
        return counts

    def caveats(self, result: Mapping[str, Any], recipe: LanguageRecipe, run: str = "RUN") -> dict[str, str]:
        streams = recipe.eval.batch_size
        return {
            split: f"{short} `torchdefine eval {run} --split {split} --batch-size 1` is exact."
            for split, one in result["evaluation"].items()
            if (short := short_stream_warning(one["tokens"], streams))
        }

    def encode(self, recipe: LanguageRecipe, out: str | Path, progress: Progress | None) -> Corpus:
        return open_corpus(recipe.data, progress, out=out)


def open_corpus(config: TextConfig, progress: Progress | None = None, *, out: str | Path | None = None) -> Corpus:
    """The recipe's text, encoded, in the cache or in a new folder."""
    return encode_corpus(resolve_corpus(config.corpus, progress=progress), config, out=out, progress=progress)


def build_language_model(recipe: LanguageRecipe, vocabulary: VocabularyFacts) -> LanguageModel:
    """The model of a recipe with fresh weights from torch's current random state."""
    embedding = build_embedding(recipe.embedding, recipe.unit, vocabulary)
    tied_dim = embedding.map_dim if recipe.output.tied else None
    context = recipe.context.build(embedding.embedding_dim, tied_dim)  # type: ignore[attr-defined]
    output = recipe.output.build(context.output_dim, embedding, vocabulary)
    return LanguageModel(embedding, context, output, recipe.loss)


def _evaluations(recipe: LanguageRecipe, model: LanguageModel, corpus: Corpus, streams: int) -> dict[str, Evaluation]:
    start, length = corpus.tokenization.eos_id, recipe.eval.length
    return {
        split: evaluate(model, corpus.splits[split], start, batch_size=streams, length=length)
        for split in ("valid", "test")
        if split in corpus.splits
    }
