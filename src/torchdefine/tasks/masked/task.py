"""Masked language models as a task: data, model, batches, validation, result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from torchdefine.data.corpus import Corpus
from torchdefine.embedding import VocabularyFacts, build_embedding
from torchdefine.files import Progress
from torchdefine.task import Task, described, register_task
from torchdefine.tasks.masked.batches import MaskedBatches, Masking, PackedRows
from torchdefine.tasks.masked.evaluate import evaluate
from torchdefine.tasks.masked.model import MaskedModel
from torchdefine.tasks.masked.recipe import MaskedRecipe
from torchdefine.tasks.masked.run import MaskedRun, protocol_of
from torchdefine.tasks.masked.text import MaskedTokenizer, open_text
from torchdefine.training.distributed import Processes
from torchdefine.training.evaluation import Evaluation
from torchdefine.training.step import TrainingData


@register_task
class MaskedTask(Task):
    """Predict hidden tokens of a text from all others, as BERT does."""

    name = "masked"
    recipe = MaskedRecipe
    run = MaskedRun
    measured_on = "FILE"
    vocabulary_settings = ("corpus", "tokenizer", "bpe_size")
    scores: ClassVar = {"test_accuracy": "accuracy"}

    def open_data(self, recipe: MaskedRecipe, progress: Progress | None) -> Corpus:
        return open_text(recipe.data, progress)

    def load_tokens(self, folder: Path) -> MaskedTokenizer:
        return MaskedTokenizer.load(folder / MaskedTokenizer.file_name)

    def build(self, recipe: MaskedRecipe, tokens: MaskedTokenizer, data: Corpus | None = None) -> MaskedModel:
        """Subwords are not in the order of frequency, so bands go by how often they occur in training."""
        counts = np.zeros(len(tokens), np.int64) if data is None else data.splits["train"].counts(len(tokens))
        return build_masked_model(recipe, VocabularyFacts(len(tokens), counts, tokens.token))

    def count(self, recipe: MaskedRecipe, tokens: MaskedTokenizer | None = None) -> tuple[MaskedModel, int]:
        size = len(tokens) if tokens is not None else recipe.data.vocabulary_size or recipe.data.bpe_size
        with torch.device("meta"):
            return build_masked_model(recipe, VocabularyFacts(size)), size

    def batches(self, recipe: MaskedRecipe, data: Corpus, device: Any, processes: Processes) -> TrainingData:
        tokens: Any = data.tokenization
        rows = PackedRows(np.asarray(data.splits["train"].tokens), recipe.train.length, tokens.bos_id)
        return MaskedBatches(rows, Masking(recipe.masking, tokens), recipe.train, device, processes)

    def validation(self, recipe: MaskedRecipe, data: Corpus, model: MaskedModel) -> Callable[[], Evaluation] | None:
        if "valid" not in data.splits:
            return None
        tokens: Any = data.tokenization
        return lambda: evaluate(model, data.splits["valid"], protocol_of(recipe, tokens))[0]

    def result(self, run: MaskedRun, data: Corpus) -> dict[str, Any]:
        texts = {split: data.splits[split] for split in ("valid", "test") if split in data.splits}
        found = {split: run.evaluate(data=text, with_accuracy=True) for split, text in texts.items()}
        return {
            **described(data, {split: evaluation for split, (evaluation, _) in found.items()}),
            **{f"{split}_accuracy": right for split, (_, right) in found.items()},
        }

    def amount(self, data: Corpus) -> str:
        return f"{len(data.splits['train']):,} subwords"

    def about_data(self, recipe: MaskedRecipe, data: Corpus) -> list[str]:
        return [f"The tokenizer has {len(data.tokenization):,} subwords."]

    def token_counts(self, data: Corpus) -> Sequence[int] | None:
        return data.splits["train"].counts(len(data.tokenization)).tolist()

    def headline(self, result: Mapping[str, Any]) -> list[str]:
        if "test_accuracy" not in result:
            return []
        return [f"{result['test_accuracy']:.1%} of the hidden tokens of the test text are predicted right"]

    def encode(self, recipe: MaskedRecipe, out: str | Path, progress: Progress | None) -> Corpus:
        return open_text(recipe.data, progress, out=out)


def build_masked_model(recipe: MaskedRecipe, vocabulary: VocabularyFacts) -> MaskedModel:
    """The model of a recipe with fresh weights from torch's current random state."""
    embedding = build_embedding(recipe.embedding, recipe.unit, vocabulary)
    encoder = recipe.context.build(embedding.embedding_dim)
    return MaskedModel(embedding, encoder, recipe.output.build(encoder.width, embedding, vocabulary))
