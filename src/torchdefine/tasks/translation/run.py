"""What can be done with a trained translator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchdefine.config import to_plain
from torchdefine.data import BitextBatches, Tokenization, TokenizerPair
from torchdefine.data.bitext import Bitext, SentencePairs, encode_bitext, one_line
from torchdefine.data.sources import find_bitext, resolve_corpus
from torchdefine.data.text_files import read_pairs
from torchdefine.export import Exportable
from torchdefine.files import Progress
from torchdefine.modes import reading
from torchdefine.run.run import Measured, Run, Sample, check_split
from torchdefine.tasks.sampling import SamplingOptions
from torchdefine.tasks.translation.beam import BeamConfig
from torchdefine.tasks.translation.lines import (
    Translation,
    TranslationOptions,
    TranslationScores,
    cut_sentence,
    joined,
    require_packages,
    score_translations,
    translate_pieces,
)
from torchdefine.tasks.translation.model import Translator
from torchdefine.tasks.translation.programs import exportable
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


class TranslationRun(Run):
    """A trained translator with its tokenizers, settings and result."""

    model: Translator
    recipe: TranslationRecipe
    tokenization: TokenizerPair
    score = staticmethod(score_translations)

    @staticmethod
    def options(
        recipe: TranslationRecipe, sampling: SamplingOptions | None = None, seed: int = 1, n_best: int = 1, **beam: Any
    ) -> TranslationOptions:
        """The recipe's way to translate, with changes to its beam, such as ``size=8``."""
        return TranslationOptions(BeamConfig.read({**to_plain(recipe.beam), **beam}, "beam"), sampling, seed, n_best)

    def translate(
        self,
        lines: Sequence[str],
        options: TranslationOptions | None = None,
        *,
        progress: Progress | None = None,
        on_long_line: Callable[[int, int, int], None] | None = None,
    ) -> list[list[Translation]]:
        """The ``n_best`` translations of every line, best first, as many lists as lines; an empty line's is empty.

        Lines longer than those of the training text are cut, after a sentence's end or between words where possible,
        and their pieces translated one by one; ``on_long_line`` is told the line's number, its tokens and its pieces.
        """
        options, pair = options or self.options(self.recipe), self.tokenization
        encoded = pair.source.encode_sentences([one_line(line) for line in lines])
        cut = [cut_sentence(ids, self.recipe.data.max_length, pair.source) for ids in encoded]
        for number, (ids, pieces) in enumerate(zip(encoded, cut, strict=True), start=1):
            if len(pieces) > 1 and on_long_line is not None:
                on_long_line(number, len(ids), len(pieces))
        found = iter(translate_pieces(self.model, pair, [ids for pieces in cut for ids in pieces], options, progress))
        return [joined([next(found) for _ in pieces], pair.target, options.n_best) for pieces in cut]

    def evaluate(
        self,
        split: str = "test",
        *,
        data: str | Path | None = None,
        bitext: Bitext | None = None,
        progress: Progress | None = None,
    ) -> TranslationEvaluation:
        """Perplexity, BLEU and chrF on a split of the run's own bitext, which may be open already, or of another."""
        check_split(split)
        require_packages()
        recipe, pair = self.recipe, self.tokenization
        path = resolve_corpus(recipe.data.corpus if data is None else data, parallel=True)
        bitext = bitext or encode_bitext(path, recipe.data, tokenization=pair, split=split, progress=progress)
        pairs, batch_tokens = bitext.splits[split], recipe.train.batch_tokens
        predicted = evaluate_pairs(self.model, pairs, pair, batch_tokens=batch_tokens, progress=progress)
        files = find_bitext(path, recipe.data.source, recipe.data.target, require_train=False)
        sides = zip(*read_pairs(files[split]), strict=True)
        sources, references = ([one_line(line) for block in side for line in block] for side in sides)
        search = f"translations by a beam of {recipe.beam.size}, length penalty {recipe.beam.length_penalty:g}"
        started = time.monotonic()
        found = self.translate(sources, progress=progress)
        seconds = time.monotonic() - started
        texts = [best[0].text for best in found]
        shown = range(0, len(texts), max(1, len(texts) // SHOWN_TRANSLATIONS))[:SHOWN_TRANSLATIONS]
        return TranslationEvaluation(
            replace(predicted, protocol=f"{predicted.protocol}; {search}"),
            score_translations(texts, references),
            round(len(texts) / max(seconds, 1e-9), 2),
            [{"source": sources[at], "translation": texts[at], "reference": references[at]} for at in shown],
        )

    def measure(
        self, split: str = "test", *, data: str | Path | None = None, progress: Progress | None = None
    ) -> Measured:
        """Perplexity, BLEU and chrF with their signatures, in lines and as facts."""
        found = self.evaluate(split, data=data, progress=progress)
        predicted, scores = found.predicted, found.scores
        lines = [
            f"{split} perplexity {predicted.perplexity:,.4f} (loss {predicted.loss:.5f} nats)",
            *scores.lines(),
            f"{predicted.tokens:,} target tokens, {found.sentences_per_second:,.1f} sentences a second",
            predicted.protocol,
        ]
        return Measured(lines, found.to_dict())

    def sample(self, prompt: str, length: int, seed: int) -> Sample:
        """Sentences of the test text as the finished run translated them."""
        shown = self.result.get("translations", []) if self.folder.result.exists() else []
        if not shown:
            return Sample(note="The run has not translated a test text yet.")
        header = ("source", "translation", "reference")
        return Sample(table=(header, [[item[name] for name in header] for item in shown]))

    def exportable(self, model: Translator) -> Exportable:
        return exportable(model, self.tokenization)

    @property
    def names_of_tokens(self) -> Tokenization:
        return self.tokenization.target


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
    with reading(model) as model:
        for number in range(batches.per_epoch):
            batch = batches.batch(number)
            hint = model.host_hint(batch.host_targets)
            losses, _ = model(batch.source, batch.inputs, batch.targets, None, reduction="sum", hint=hint)
            total += losses.cross_entropy.double()
            if progress is not None:
                progress(number + 1, batches.per_epoch)
    protocol = "every target token predicted once from its source and the true tokens before it, ends of sentences "
    return Evaluation.of(float(total), pairs.target.header, f"{protocol}included, {arithmetic(model)}")
