"""What can be done with a trained translator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdefine.data import Bitext, Tokenization, TokenizerPair, resolve_bitext
from torchdefine.data.bitext import one_line
from torchdefine.data.sources import find_bitext
from torchdefine.data.text_files import read_pairs
from torchdefine.export import Exportable
from torchdefine.files import Progress
from torchdefine.run.run import Measured, Run, Sample, check_split
from torchdefine.tasks.translation.data import open_bitext
from torchdefine.tasks.translation.evaluate import evaluate_pairs
from torchdefine.tasks.translation.lines import (
    LongLine,
    Translation,
    TranslationOptions,
    TranslationScores,
    require_sacrebleu,
    score_translations,
    translate_lines,
)
from torchdefine.tasks.translation.model import Translator
from torchdefine.tasks.translation.programs import exportable
from torchdefine.tasks.translation.recipe import TranslationRecipe
from torchdefine.training.evaluation import Evaluation

SHOWN_TRANSLATIONS = 10


@dataclass(frozen=True)
class TranslationEvaluation:
    """How well a translator does on pairs of sentences: how it predicts the references, and what it writes itself."""

    predicted: Evaluation
    scores: TranslationScores
    sentences_per_second: float
    search: str
    examples: list[dict[str, str]]

    @property
    def protocol(self) -> str:
        return f"{self.predicted.protocol}; translations by {self.search}"

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.predicted.to_dict(),
            "protocol": self.protocol,
            **self.scores.to_dict(),
            "sentences_per_second": self.sentences_per_second,
        }


class TranslationRun(Run):
    """A trained translator with its tokenizers, settings and result."""

    model: Translator
    recipe: TranslationRecipe
    tokenization: TokenizerPair

    def translate(
        self,
        lines: Sequence[str],
        options: TranslationOptions | None = None,
        *,
        progress: Progress | None = None,
        on_long_line: Callable[[LongLine], None] | None = None,
    ) -> list[list[Translation]]:
        """The best translations of every line, as many lists as lines; without options, by the recipe's beam."""
        return translate_lines(
            self.model,
            self.tokenization,
            lines,
            self.recipe.data.max_length,
            options or TranslationOptions(self.recipe.beam),
            progress=progress,
            on_long_line=on_long_line,
        )

    def evaluate(
        self, split: str = "test", *, data: str | Path | None = None, progress: Progress | None = None
    ) -> TranslationEvaluation:
        """Perplexity, BLEU and chrF on a split of the run's own bitext, or of another one."""
        check_split(split)
        return evaluate_translator(
            self.recipe, self.model, self.tokenization, split=split, data=data, progress=progress
        )

    def exportable(self, model: Translator) -> Exportable:
        return exportable(model, self.tokenization)

    def measure(
        self, split: str = "test", *, data: str | Path | None = None, progress: Progress | None = None
    ) -> Measured:
        """Perplexity, BLEU and chrF with their signatures, in lines and as facts."""
        found = self.evaluate(split, data=data, progress=progress)
        predicted = found.predicted
        lines = [
            f"{split} perplexity {predicted.perplexity:,.4f} (loss {predicted.loss:.5f} nats)",
            *found.scores.lines(),
            f"{predicted.tokens:,} target tokens, {found.sentences_per_second:,.1f} sentences a second",
            found.protocol,
        ]
        return Measured(lines, found.to_dict())

    @property
    def names_of_tokens(self) -> Tokenization:
        return self.tokenization.target

    def sample(self, prompt: str, length: int, seed: int) -> Sample:
        """Sentences of the test text as the finished run translated them."""
        shown = self.result.get("translations", []) if self.folder.result.exists() else []
        if not shown:
            return Sample(note="The run has not translated a test text yet.")
        header = ("source", "translation", "reference")
        return Sample(table=(header, [[item[name] for name in header] for item in shown]))


def evaluate_translator(
    recipe: TranslationRecipe,
    model: Translator,
    tokenization: TokenizerPair,
    bitext: Bitext | None = None,
    *,
    split: str = "test",
    data: str | Path | None = None,
    progress: Progress | None = None,
) -> TranslationEvaluation:
    """Perplexity, BLEU and chrF on a split of the recipe's bitext, or of another one."""
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
    started = time.monotonic()
    found = translate_lines(model, tokenization, sources, recipe.data.max_length, options, progress=progress)
    seconds = time.monotonic() - started
    texts = [translations[0].text for translations in found]
    every = max(1, len(texts) // SHOWN_TRANSLATIONS)
    return TranslationEvaluation(
        predicted,
        score_translations(texts, references),
        round(len(texts) / max(seconds, 1e-9), 2),
        f"a beam of {options.beam.size}, length penalty {options.beam.length_penalty:g}",
        [
            {"source": sources[at], "translation": texts[at], "reference": references[at]}
            for at in range(0, len(texts), every)
        ][:SHOWN_TRANSLATIONS],
    )
