"""Translation as a task: data, model, batches, validation, result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from torchdefine.data import Bitext, BitextBatches, TokenizerPair
from torchdefine.embedding import EMBEDDINGS, UNITS, TokenEmbedding, VocabularyFacts, build_embedding
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.task import Task, register_task
from torchdefine.tasks.translation.batches import PairData
from torchdefine.tasks.translation.data import open_bitext
from torchdefine.tasks.translation.evaluate import evaluate_pairs
from torchdefine.tasks.translation.model import Translator
from torchdefine.tasks.translation.recipe import TranslationRecipe
from torchdefine.tasks.translation.run import TranslationRun, evaluate_translator
from torchdefine.training.batches import TrainingData
from torchdefine.training.distributed import Processes
from torchdefine.training.evaluation import Evaluation


@register_task
class TranslationTask(Task):
    """Predict every token of a target sentence from its source and the tokens before it."""

    name = "translation"
    recipe = TranslationRecipe
    run = TranslationRun
    vocabulary_settings = ("bpe_size",)
    scores: ClassVar = {"test_bleu": "BLEU", "test_chrf": "chrF"}

    def check_packages(self) -> None:
        if missing := [name for name in ("tokenizers", "sacrebleu") if find_spec(name) is None]:
            raise UserError(
                f"Translation needs {' and '.join(missing)}, for subwords and BLEU: pip install 'torchdefine[mt]'."
            )

    def open_data(self, recipe: TranslationRecipe, progress: Progress | None) -> Bitext:
        return open_bitext(recipe, progress)

    def load_tokens(self, folder: Path) -> TokenizerPair:
        return TokenizerPair.load(folder)

    def build(self, recipe: TranslationRecipe, tokens: TokenizerPair, data: Bitext | None = None) -> Translator:
        """Subwords are not in frequency order, so bands go by how often they occur in training.

        Where weights are about to be loaded, the ranks come with them.
        """
        sizes = len(tokens.source), len(tokens.target)
        if data is None:
            counts = [np.zeros(size, np.int64) for size in sizes]
        else:
            train = data.splits["train"]
            counts = [train.source.counts(sizes[0]), train.target.counts(sizes[1])]
        source, target = map(VocabularyFacts, sizes, counts)
        return build_translator(recipe, source, target, tokens.source.pad_id)

    def count(self, recipe: TranslationRecipe, tokens: TokenizerPair | None = None) -> tuple[Translator, int]:
        size = recipe.data.vocabulary_size or recipe.data.bpe_size
        sizes = (size, size) if tokens is None else (len(tokens.source), len(tokens.target))
        with torch.device("meta"):
            model = build_translator(recipe, VocabularyFacts(sizes[0]), VocabularyFacts(sizes[1]), pad_id=0)
        return model, size if tokens is None else len(tokens)

    def batches(
        self, recipe: TranslationRecipe, data: Bitext, device: torch.device, processes: Processes
    ) -> TrainingData:
        train, pair = recipe.train, data.tokenization
        return PairData(
            BitextBatches(data.splits["train"], pair, train.batch_tokens, device, train.seed), train, processes
        )

    def validation(self, recipe: TranslationRecipe, data: Bitext, model: Translator) -> Callable[[], Evaluation] | None:
        if "valid" not in data.splits:
            return None
        pairs, tokens = data.splits["valid"], recipe.train.batch_tokens
        return lambda: evaluate_pairs(model, pairs, data.tokenization, batch_tokens=tokens)

    def result(self, recipe: TranslationRecipe, model: Translator, data: Bitext) -> dict[str, Any]:
        evaluations: dict[str, dict[str, Any]] = {}
        shown: dict[str, Any] = {}
        if validate := self.validation(recipe, data, model):
            evaluations["valid"] = validate().to_dict()
        if "test" in data.splits:
            test = evaluate_translator(recipe, model, data.tokenization, data)
            evaluations["test"] = test.to_dict()
            shown = {
                "test_bleu": test.scores.bleu,
                "test_chrf": test.scores.chrf,
                "decoded_sentences_per_second": test.sentences_per_second,
                "translations": test.examples,
            }
        return {
            "data": {
                "corpus": data.name,
                "vocabulary_size": len(data.tokenization),
                "vocabulary_sha256": data.tokenization.sha256,
                "left_out_pairs": data.left_out,
                "splits": {
                    name: {
                        "pairs": len(pairs),
                        "tokens": len(pairs.target),
                        "text_sha256": pairs.text_sha256,
                        "tokens_sha256": pairs.tokens_sha256,
                    }
                    for name, pairs in data.splits.items()
                },
            },
            **{f"{split}_perplexity": evaluation["perplexity"] for split, evaluation in evaluations.items()},
            **shown,
            "evaluation": evaluations,
        }

    def amount(self, data: Bitext) -> str:
        return f"{len(data.splits['train']):,} pairs of sentences"

    def about_data(self, recipe: TranslationRecipe, data: Bitext) -> list[str]:
        pair = data.tokenization
        sizes = f"{len(pair.target):,}" if pair.joint else f"{len(pair.source):,} and {len(pair.target):,}"
        if recipe.data.tokenizer is not None:
            return [f"The tokenizer has {sizes} subwords."]
        learned = f"{sizes} subwords were learned from the training text"
        if max(len(pair.source), len(pair.target)) < recipe.data.bpe_size:
            return [f"{learned}, which has no more: data.bpe_size is {recipe.data.bpe_size:,}."]
        return [f"{learned}."]

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
    target_embedding = build_embedding(recipe.embedding, recipe.unit, target)
    source_embedding = _source_embedding(recipe, source, target, target_embedding)
    transformer = recipe.context.build(target_embedding.embedding_dim)
    output = recipe.output.build(transformer.width, target_embedding, target)
    return Translator(source_embedding, target_embedding, transformer, output, pad_id, recipe.loss.label_smoothing)


def _source_embedding(
    recipe: TranslationRecipe, source: VocabularyFacts, target: VocabularyFacts, target_embedding: TokenEmbedding
) -> TokenEmbedding:
    if recipe.source.share == "embedding":
        if source.size != target.size:
            raise UserError("A shared embedding needs one BPE for both languages: use data.joint true.")
        return target_embedding
    embedding = EMBEDDINGS.changed(recipe.embedding, recipe.source.embedding, "source.embedding")
    own = build_embedding(embedding, UNITS.changed(recipe.unit, recipe.source.unit, "source.unit"), source)
    if recipe.source.share == "unit":
        own = TokenEmbedding.beside(own.map, target_embedding)
        own.row_dropout = embedding.row_dropout
    return own
