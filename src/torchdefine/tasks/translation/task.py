"""Translation as a task: data, model, batches, validation, result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from torchdefine.data import Bitext, BitextBatches, TokenizerPair, encode_bitext, resolve_corpus
from torchdefine.data.sources import find_bitext
from torchdefine.embedding import EMBEDDINGS, UNITS, TokenEmbedding, VocabularyFacts, build_embedding
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.task import Task, described, register_task
from torchdefine.tasks.translation.lines import require_packages
from torchdefine.tasks.translation.model import Translator
from torchdefine.tasks.translation.recipe import TranslationRecipe, TranslationTrainConfig
from torchdefine.tasks.translation.run import TranslationRun, evaluate_pairs
from torchdefine.training.distributed import Processes
from torchdefine.training.evaluation import Evaluation
from torchdefine.training.step import Batch, Part, TrainingData


@register_task
class TranslationTask(Task):
    """Predict every token of a target sentence from its source and the tokens before it."""

    name = "translation"
    recipe = TranslationRecipe
    run = TranslationRun
    vocabulary_settings = ("bpe_size",)
    scores: ClassVar = {"test_bleu": "BLEU", "test_chrf": "chrF"}
    least_scores: ClassVar = {"test_bleu": 1.0}

    def check_packages(self) -> None:
        require_packages(scores=False)

    def open_data(self, recipe: TranslationRecipe, progress: Progress | None) -> Bitext:
        config = recipe.data
        pair = None if config.tokenizer is None else TokenizerPair.load(config.tokenizer)
        path = resolve_corpus(config.corpus, parallel=True)
        require_packages(scores="test" in find_bitext(path, config.source, config.target, require_train=pair is None))
        return encode_bitext(path, config, tokenization=pair, progress=progress)

    def load_tokens(self, folder: Path) -> TokenizerPair:
        return TokenizerPair.load(folder)

    def build(self, recipe: TranslationRecipe, tokens: TokenizerPair, data: Bitext | None = None) -> Translator:
        """Subwords are not in frequency order, so bands go by how often they occur in training.

        Where weights are about to be loaded, the ranks come with them.
        """
        sizes = len(tokens.source), len(tokens.target)
        counts = [np.zeros(size, np.int64) for size in sizes]
        if data is not None:
            train = data.splits["train"]
            counts = [train.source.counts(sizes[0]), train.target.counts(sizes[1])]
        source, target = map(VocabularyFacts, sizes, counts, (tokens.source.token, tokens.target.token))
        return build_translator(recipe, source, target, tokens.source.pad_id)

    def count(self, recipe: TranslationRecipe, tokens: TokenizerPair | None = None) -> tuple[Translator, int]:
        size = recipe.data.vocabulary_size or recipe.data.bpe_size
        source, target = (size, size) if tokens is None else (len(tokens.source), len(tokens.target))
        with torch.device("meta"):
            model = build_translator(recipe, VocabularyFacts(source), VocabularyFacts(target), pad_id=0)
        return model, target

    def batches(
        self, recipe: TranslationRecipe, data: Bitext, device: torch.device, processes: Processes
    ) -> TrainingData:
        train, pair = recipe.train, data.tokenization
        batches = BitextBatches(data.splits["train"], pair, train.batch_tokens, device, train.seed)
        return PairData(batches, train, processes)

    def validation(self, recipe: TranslationRecipe, data: Bitext, model: Translator) -> Callable[[], Evaluation] | None:
        if "valid" not in data.splits:
            return None
        pairs, tokens = data.splits["valid"], recipe.train.batch_tokens
        return partial(evaluate_pairs, model, pairs, data.tokenization, batch_tokens=tokens)

    def result(self, run: TranslationRun, data: Bitext) -> dict[str, Any]:
        validate = self.validation(run.recipe, data, run.model)
        found: dict[str, Any] = {"valid": validate()} if validate else {}
        written: dict[str, Any] = {}
        if "test" in data.splits:
            found["test"] = test = run.evaluate("test", bitext=data)
            written = {
                "test_bleu": test.scores.bleu,
                "test_chrf": test.scores.chrf,
                "decoded_sentences_per_second": test.sentences_per_second,
                "translations": test.examples,
            }
        result = described(data, found)
        result["data"]["left_out_pairs"] = data.left_out
        return {**result, **written}

    def amount(self, data: Bitext) -> str:
        return f"{len(data.splits['train']):,} pairs of sentences"

    def about_data(self, recipe: TranslationRecipe, data: Bitext) -> list[str]:
        pair = data.tokenization
        sizes = f"{len(pair.target):,}" if pair.joint else f"{len(pair.source):,} and {len(pair.target):,}"
        if recipe.data.tokenizer is not None:
            return [f"The tokenizer has {sizes} subwords."]
        learned, wanted = f"{sizes} subwords were learned from the training text", recipe.data.bpe_size
        fewer = max(len(pair.source), len(pair.target)) < wanted
        return [f"{learned}, which has no more: data.bpe_size is {wanted:,}." if fewer else f"{learned}."]

    def encode(self, recipe: TranslationRecipe, out: str | Path, progress: Progress | None) -> Any:
        raise UserError("Pairs of sentences cannot be encoded beforehand: BLEU needs the sentences themselves.")

    def headline(self, result: Mapping[str, Any]) -> list[str]:
        if "test_bleu" not in result:
            return []
        return [f"test BLEU {result['test_bleu']:.2f}, chrF {result['test_chrf']:.2f}"]


def build_translator(
    recipe: TranslationRecipe, source: VocabularyFacts, target: VocabularyFacts, pad_id: int
) -> Translator:
    """The model of a recipe with fresh weights from torch's current random state."""
    own_target = own_source = build_embedding(recipe.embedding, recipe.unit, target)
    if recipe.source.share != "embedding":
        config = EMBEDDINGS.changed(recipe.embedding, recipe.source.embedding, "source.embedding")
        own_source = build_embedding(config, UNITS.changed(recipe.unit, recipe.source.unit, "source.unit"), source)
        if recipe.source.share == "unit":
            shared = own_source.features
            own_source = TokenEmbedding.beside(own_source.map, own_target)
            own_source.features = shared
            own_source.row_dropout, own_source.map_dropout = config.row_dropout, config.map_dropout
    elif source.size != target.size:
        raise UserError("A shared embedding needs one BPE for both languages: use data.joint true.")
    transformer = recipe.context.build(own_target.embedding_dim)
    output = recipe.output.build(transformer.width, own_target, target)
    return Translator(own_source, own_target, transformer, output, pad_id, recipe.loss.label_smoothing)


class PairData:
    """Every step takes ``accumulate`` batches in every process; each target token weighs the same in the loss."""

    rows_per_part = 0  # a translator carries nothing from batch to batch

    def __init__(self, batches: BitextBatches, config: TranslationTrainConfig, processes: Processes) -> None:
        self.batches, self.parts, self.processes = batches, config.accumulate, processes
        self.batches_per_step = self.parts * processes.count
        self.steps_per_epoch = batches.per_epoch / self.batches_per_step
        epochs = Fraction(str(config.epochs or 1))  # as it is written, so that nothing is rounded up
        self.total_steps = config.steps or math.ceil(epochs * batches.per_epoch / self.batches_per_step)

    def batch(self, step: int) -> Batch:
        first, count = step * self.batches_per_step, self.processes.count
        tokens = sum(self.batches.tokens(first + index) for index in range(self.batches_per_step))
        begin = first + self.processes.rank * self.parts
        own = [self.batches.batch(number) for number in range(begin, begin + self.parts)]
        return Batch(
            # Gradients are averaged over the processes, so a part is weighed against the mean tokens of a process.
            [Part((b.source, b.inputs, b.targets), b.host_targets, b.tokens * count / tokens) for b in own],
            tokens=sum(b.tokens for b in own),
            place=f"batch {first % self.batches.per_epoch} of the {self.batches.per_epoch} of a pass over the pairs",
        )

    def epoch_after(self, steps: int) -> float:
        """Passes over the pairs; a whole number after each step in which a pass ended, even midway."""
        taken, per_epoch = steps * self.batches_per_step, self.batches.per_epoch
        ended, rest = divmod(taken, per_epoch)
        return float(ended) if ended and rest < self.batches_per_step else taken / per_epoch
