"""What can be done with a trained translator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchdefine.config import to_plain
from torchdefine.data import Tokenization, TokenizerPair
from torchdefine.export import Exportable
from torchdefine.files import Progress
from torchdefine.run.run import Measured, Run, Sample, check_split
from torchdefine.tasks.sampling import SamplingOptions
from torchdefine.tasks.translation.beam import BeamConfig
from torchdefine.tasks.translation.evaluate import TranslationEvaluation, evaluate_translator
from torchdefine.tasks.translation.lines import (
    OnLongLine,
    Translation,
    TranslationOptions,
    score_translations,
    translate_lines,
)
from torchdefine.tasks.translation.model import Translator
from torchdefine.tasks.translation.programs import exportable
from torchdefine.tasks.translation.recipe import TranslationRecipe


class TranslationRun(Run):
    """A trained translator with its tokenizers, settings and result."""

    model: Translator
    recipe: TranslationRecipe
    tokenization: TokenizerPair
    score = staticmethod(score_translations)

    def translate(
        self,
        lines: Sequence[str],
        options: TranslationOptions | None = None,
        *,
        progress: Progress | None = None,
        on_long_line: OnLongLine | None = None,
    ) -> list[list[Translation]]:
        """The best translations of every line, as many lists as lines; without options, by the recipe's beam."""
        how, longest = options or self.options(self.recipe), self.recipe.data.max_length
        return translate_lines(
            self.model, self.tokenization, lines, longest, how, progress=progress, on_long_line=on_long_line
        )

    @staticmethod
    def options(
        recipe: TranslationRecipe, sampling: SamplingOptions | None = None, seed: int = 1, n_best: int = 1, **beam: Any
    ) -> TranslationOptions:
        """The recipe's way to translate, with changes to its beam, such as ``size=8``."""
        return TranslationOptions(BeamConfig.read({**to_plain(recipe.beam), **beam}, "beam"), sampling, seed, n_best)

    def evaluate(
        self, split: str = "test", *, data: str | Path | None = None, progress: Progress | None = None
    ) -> TranslationEvaluation:
        """Perplexity, BLEU and chrF on a split of the run's own bitext, or of another one."""
        check_split(split)
        return evaluate_translator(self.recipe, self.model, self.tokenization, split, data=data, progress=progress)

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
            predicted.protocol,
        ]
        return Measured(lines, found.to_dict())

    def exportable(self, model: Translator) -> Exportable:
        return exportable(model, self.tokenization)

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
