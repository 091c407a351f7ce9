"""Language models as a task: data, model, batches, validation, result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchdefine.data.batches import SegmentPlan, TokenStreams, shard
from torchdefine.data.corpus import Corpus, TextConfig, encode_corpus
from torchdefine.data.sources import resolve_corpus
from torchdefine.data.token_file import LOSS_THAT_COUNTS
from torchdefine.data.tokenizer import load_tokenization
from torchdefine.data.vocabulary import EOS, UNK, Tokenization
from torchdefine.embedding import VocabularyFacts, build_embedding
from torchdefine.files import Progress
from torchdefine.task import Task, described, register_task
from torchdefine.tasks.language.evaluate import PUBLIC_STREAMS, evaluate, short_stream_warning, unigram_perplexity
from torchdefine.tasks.language.model import LanguageModel
from torchdefine.tasks.language.recipe import LanguageRecipe, LanguageTrainConfig
from torchdefine.tasks.language.run import MANY_UNKNOWN, LanguageRun
from torchdefine.training.distributed import Processes
from torchdefine.training.evaluation import Evaluation
from torchdefine.training.step import Batch, Part, TrainingData


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
        return build_language_model(recipe, VocabularyFacts(size, counts, tokens.token))

    def count(self, recipe: LanguageRecipe, tokens: Tokenization | None = None) -> tuple[LanguageModel, int]:
        size = len(tokens) if tokens is not None else recipe.data.vocabulary_size
        size = size or len(open_corpus(recipe.data).tokenization)
        with torch.device("meta"):
            return build_language_model(recipe, VocabularyFacts(size)), size

    def batches(self, recipe: LanguageRecipe, data: Corpus, device: torch.device, processes: Processes) -> TrainingData:
        rows = shard(recipe.train.batch_size, processes.rank, processes.count, recipe.train.accumulate)
        tokens, start = np.asarray(data.splits["train"].tokens), data.tokenization.eos_id
        return TextBatches(TokenStreams(tokens, recipe.train.batch_size, device, start, rows), recipe.train)

    def validation(self, recipe: LanguageRecipe, data: Corpus, model: LanguageModel) -> Callable[[], Evaluation] | None:
        if "valid" not in data.splits:
            return None
        streams = recipe.eval.valid_batch_size or recipe.eval.batch_size
        valid, start = data.splits["valid"], data.tokenization.eos_id
        return partial(evaluate, model, valid, start, batch_size=streams, length=recipe.eval.length)

    def result(self, run: LanguageRun, data: Corpus) -> dict[str, Any]:
        texts = {split: data.splits[split] for split in ("valid", "test") if split in data.splits}
        counts = data.splits["train"].counts(len(data.tokenization))
        result = {
            **described(data, {split: run.evaluate(data=text) for split, text in texts.items()}),
            **{f"{split}_unigram_perplexity": unigram_perplexity(counts, text.tokens) for split, text in texts.items()},
        }
        if run.recipe.eval.public:
            public = {split: run.evaluate(data=text, batch_size=PUBLIC_STREAMS) for split, text in texts.items()}
            result["public_evaluation"] = {split: one.to_dict() for split, one in public.items()}
        return result

    def amount(self, data: Corpus) -> str:
        counted = "words and line ends" if data.tokenization.kind == "words" else "subwords"
        return f"{len(data.splits['train']):,} {counted}"

    def about_data(self, recipe: LanguageRecipe, data: Corpus) -> list[str]:
        return [*describe_tokens(data, recipe.data), *describe_bands(len(data.tokenization), recipe)]

    def token_counts(self, data: Corpus) -> Sequence[int] | None:
        """Vocabularies of words have counts themselves."""
        if data.tokenization.counts is not None:
            return None
        return data.splits["train"].counts(len(data.tokenization)).tolist()

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
    beside = getattr(recipe.context, "beside_dim", 0)
    embedding = build_embedding(recipe.embedding, recipe.unit, vocabulary, beside)
    tied_dim = recipe.output.width(embedding)
    context = recipe.context.build(embedding.embedding_dim, tied_dim)  # type: ignore[attr-defined]
    output = recipe.output.build(context.output_dim, embedding, vocabulary)
    return LanguageModel(embedding, context, output, recipe.loss)


class TextBatches:
    """Streams of text read side by side, segment after segment, with the state carried over."""

    def __init__(self, streams: TokenStreams, config: LanguageTrainConfig) -> None:
        self.streams, self.parts, self.length = streams, config.accumulate, config.length
        self.plan = SegmentPlan(streams.length, config.length, config.seed if config.random_length else None)
        self.total_steps = config.steps or self.plan.steps_in(config.epochs or 1)
        self.steps_per_epoch = float(self.plan.steps_in(1))
        self.rows_per_part = streams.batch_size // self.parts

    def batch(self, step: int) -> Batch:
        start, length = self.plan.segment(step)
        inputs, targets = self.streams.segment(start, length)  # (B, T)
        host_targets = self.streams.host_targets(start, length)
        share = self.rows_per_part
        rows = [slice(part * share, (part + 1) * share) for part in range(self.parts)]
        return Batch(
            [Part((inputs[r], targets[r]), host_targets[r], 1 / self.parts) for r in rows],
            tokens=host_targets.size,
            # A varied length must not change how much each token moves the weights.
            rate=length / self.length if self.plan.seed is not None else 1.0,
            begins_text=start == 0,
            place=f"{length} tokens from token {start} of every stream",
        )

    def epoch_after(self, steps: int) -> float:
        return self.plan.epoch_after(steps)


def describe_tokens(corpus: Corpus, data: TextConfig) -> list[str]:
    """The size of the vocabulary and the fraction of unknown words, in a sentence or two."""
    tokens, different = corpus.tokenization, corpus.different_words
    size = len(tokens)
    cuts = {}  # the settings that keep words of the training text out of the vocabulary
    if size - 2 != different:
        if data.max_size is not None and size == data.max_size:
            cuts["data.max_size"] = data.max_size
        if data.min_count > 1:
            cuts["data.min_count"] = data.min_count
    if tokens.kind == "subwords":
        entries = f"The tokenizer has {size:,} subwords."
    elif different is None:
        entries = f"The vocabulary has {size:,} entries."
    elif size - 2 == different:
        entries = (
            f"The vocabulary has {size:,} entries: all {different:,} different words of the text, {UNK} and {EOS}."
        )
    else:
        by = " and ".join(f"{name} {value:,}" for name, value in cuts.items())
        entries = (
            f"The vocabulary is limited by {by} to {size:,} entries: the {size - 2:,} most frequent of the text's "
            f"{different:,} different words, {UNK} and {EOS}."
        )
    lost = max(text.header.lost_share or 0.0 for text in corpus.splits.values())
    if lost >= LOSS_THAT_COUNTS:
        entries += (
            f" It drops or changes {lost:.1%} of the characters of the text, so bits per byte are too low: use a "
            "tokenizer that keeps them, such as a byte-level one."
        )
    if (valid := corpus.splits.get("valid")) is None:
        return [entries]
    unknown = valid.header.unknown / len(valid)
    if tokens.kind == "subwords" and not unknown:
        return [entries]
    return [entries, f"{unknown:.1%} of the validation text is {UNK}{_cure(tokens, cuts, unknown)}"]


def _cure(tokens: Tokenization, cuts: Mapping[str, int], unknown: float) -> str:
    """The end of the sentence on unknown words: what helps where they are many."""
    if unknown <= MANY_UNKNOWN:
        return "."
    if tokens.kind == "subwords":
        return ": use a tokenizer that knows this text."
    if not cuts and tokens.counts is not None and tokens.counts[tokens.unk_id]:
        return ", which occurs in the training text itself."
    ways = ["a larger data.max_size (none keeps every word)"] if "data.max_size" in cuts else []
    ways += ["a smaller data.min_count"] if "data.min_count" in cuts else []
    return f": use {', '.join(ways)}{', or ' if ways else ''}subwords by data.tokenizer."


def describe_bands(size: int, recipe: LanguageRecipe) -> list[str]:
    """A sentence on bands that would begin beyond the vocabulary."""
    found = []
    for section in ("embedding", "output"):
        cutoffs = getattr(getattr(recipe, section), "cutoffs", ())
        if beyond := [f"{cutoff:,}" for cutoff in cutoffs if cutoff >= size]:
            found.append(
                f"These {section}.cutoffs are larger than the vocabulary and are ignored: {', '.join(beyond)}."
            )
    return found
