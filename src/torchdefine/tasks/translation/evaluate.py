"""How good a translator is: how it predicts references, every token counted once, and what it writes itself."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchdefine.data import Bitext, BitextBatches, SentencePairs, TokenizerPair, encode_bitext, resolve_bitext
from torchdefine.data.bitext import one_line
from torchdefine.data.sources import find_bitext
from torchdefine.data.text_files import read_pairs
from torchdefine.files import Progress
from torchdefine.modes import evaluating
from torchdefine.tasks.translation.lines import (
    TranslationOptions,
    TranslationScores,
    require_sacrebleu,
    score_translations,
    translate_lines,
)
from torchdefine.tasks.translation.model import Translator
from torchdefine.tasks.translation.recipe import TranslationRecipe
from torchdefine.training.evaluation import Evaluation, arithmetic

SHOWN_TRANSLATIONS = 10


@dataclass(frozen=True)
class TranslationEvaluation:
    """How well a translator does on pairs of sentences."""

    predicted: Evaluation
    """Of the references; its protocol says how translations were found, too."""
    scores: TranslationScores
    sentences_per_second: float
    examples: list[dict[str, str]]

    def to_dict(self) -> dict[str, Any]:
        speed = {"sentences_per_second": self.sentences_per_second}
        return {**self.predicted.to_dict(), **asdict(self.scores), **speed}


def open_bitext(
    recipe: TranslationRecipe,
    progress: Progress | None = None,
    *,
    data: str | Path | None = None,
    tokenization: TokenizerPair | None = None,
    split: str | None = None,
) -> Bitext:
    """The recipe's bitext, encoded; or another one, with tokenizers that exist already, and maybe one split of it."""
    if tokenization is None and recipe.data.tokenizer is not None:
        tokenization = TokenizerPair.load(recipe.data.tokenizer)
    path = resolve_bitext(recipe.data.corpus if data is None else data)
    return encode_bitext(path, recipe.data, tokenization=tokenization, split=split, progress=progress)


@torch.no_grad()
def evaluate_pairs(
    model: Translator,
    pairs: SentencePairs,
    tokenization: TokenizerPair,
    *,
    batch_tokens: int = 4096,
    progress: Progress | None = None,
) -> Evaluation:
    """Predict every token of the targets, each sentence's end included, in float32."""
    batches = BitextBatches(pairs, tokenization, batch_tokens, next(model.parameters()).device)
    total = torch.zeros((), dtype=torch.float64, device=batches.device)
    with evaluating(model):
        for number in range(batches.per_epoch):
            batch = batches.batch(number)
            hint = model.host_hint(batch.host_targets)
            losses, _ = model(batch.source, batch.inputs, batch.targets, None, reduction="sum", hint=hint)
            total += losses.cross_entropy.double()
            if progress is not None:
                progress(number + 1, batches.per_epoch)
    protocol = (
        "every target token predicted once from its source and the true tokens before it, ends of sentences included, "
        f"{arithmetic(model)}"
    )
    return Evaluation.of(float(total), pairs.target.header, protocol)


def evaluate_translator(
    recipe: TranslationRecipe,
    model: Translator,
    tokenization: TokenizerPair,
    split: str,
    *,
    bitext: Bitext | None = None,
    data: str | Path | None = None,
    progress: Progress | None = None,
) -> TranslationEvaluation:
    """Perplexity, BLEU and chrF on a split of the recipe's bitext, which may be open already, or of another one."""
    require_sacrebleu()
    bitext = bitext or open_bitext(recipe, data=data, tokenization=tokenization, split=split)
    predicted = evaluate_pairs(
        model, bitext.splits[split], tokenization, batch_tokens=recipe.train.batch_tokens, progress=progress
    )
    path = resolve_bitext(recipe.data.corpus if data is None else data)
    files = find_bitext(path, recipe.data.source, recipe.data.target, require_train=False)
    blocks = list(read_pairs(files[split]))
    sources = [one_line(line) for block in blocks for line in block.source]
    references = [one_line(line) for block in blocks for line in block.target]
    options = TranslationOptions(recipe.beam)
    search = f"translations by a beam of {options.beam.size}, length penalty {options.beam.length_penalty:g}"
    started = time.monotonic()
    found = translate_lines(model, tokenization, sources, recipe.data.max_length, options, progress=progress)
    seconds = time.monotonic() - started
    texts = [best[0].text for best in found]
    shown = range(0, len(texts), max(1, len(texts) // SHOWN_TRANSLATIONS))[:SHOWN_TRANSLATIONS]
    return TranslationEvaluation(
        replace(predicted, protocol=f"{predicted.protocol}; {search}"),
        score_translations(texts, references),
        round(len(texts) / max(seconds, 1e-9), 2),
        [{"source": sources[at], "translation": texts[at], "reference": references[at]} for at in shown],
    )
