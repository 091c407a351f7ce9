"""Translation as a task of the one loop: what it trains on, how it is measured, what its result says."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchdefine.build_translation import beam_options, open_bitext
from torchdefine.data import Bitext, BitextBatches, TokenizerPair, resolve_bitext
from torchdefine.data.bitext import one_line
from torchdefine.data.sources import find_bitext
from torchdefine.data.text_files import read_pairs
from torchdefine.decoding import (
    LongLine,
    Translation,
    TranslationOptions,
    TranslationScores,
    require_sacrebleu,
    score_translations,
    translate_lines,
)
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.models import Translator
from torchdefine.recipe import Recipe
from torchdefine.training import Evaluation, RunFolder
from torchdefine.training.distributed import Processes
from torchdefine.training.evaluate_pairs import evaluate_pairs
from torchdefine.training.pair_data import PairData
from torchdefine.training.result import describe_training
from torchdefine.training.run_state import Position

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


def check_translation_packages() -> None:
    """Check, before subwords are learnt, for the packages that the end of a run needs."""
    missing = [name for name in ("tokenizers", "sacrebleu") if not _can_be_imported(name)]
    if missing:
        raise UserError(
            f"Translation needs {' and '.join(missing)}, for subwords and BLEU: pip install 'torchdefine[mt]'."
        )


def _can_be_imported(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def pair_data(recipe: Recipe, bitext: Bitext, device: torch.device, processes: Processes) -> PairData:
    """The training pairs in the form that the loop expects."""
    batches = BitextBatches(
        bitext.splits["train"], bitext.tokenization, recipe.bitext.batch_tokens, device, recipe.train.seed
    )
    return PairData(batches, recipe.train, processes)


def pair_validation(recipe: Recipe, bitext: Bitext, model: Translator) -> Callable[[], Evaluation] | None:
    if "valid" not in bitext.splits:
        return None
    pairs, tokens = bitext.splits["valid"], recipe.bitext.batch_tokens
    return lambda: evaluate_pairs(model, pairs, bitext.tokenization, batch_tokens=tokens)


def describe_translation(
    recipe: Recipe,
    changes: Mapping[str, Any],
    model: Translator,
    bitext: Bitext,
    folder: RunFolder,
    position: Position,
) -> dict[str, Any]:
    """The result of a finished run, from the weights that were best on the validation pairs."""
    evaluations: dict[str, dict[str, Any]] = {}
    shown: dict[str, Any] = {}
    if "valid" in bitext.splits:
        valid = evaluate_pairs(
            model, bitext.splits["valid"], bitext.tokenization, batch_tokens=recipe.bitext.batch_tokens
        )
        evaluations["valid"] = valid.to_dict()
    if "test" in bitext.splits:
        test = evaluate_translator(recipe, model, bitext.tokenization, bitext)
        evaluations["test"] = test.to_dict()
        shown = {
            "test_bleu": test.scores.bleu,
            "test_chrf": test.scores.chrf,
            "decoded_sentences_per_second": test.sentences_per_second,
            "translations": test.examples,
        }
    return {
        **describe_training(recipe, changes, model.parameters_by_part(), folder, position),
        "data": {
            "corpus": bitext.name,
            "vocabulary_size": len(bitext.tokenization),
            "vocabulary_sha256": bitext.tokenization.sha256,
            "left_out_pairs": bitext.left_out,
            "splits": {
                name: {
                    "pairs": len(pairs),
                    "tokens": len(pairs.target),
                    "text_sha256": pairs.text_sha256,
                    "tokens_sha256": pairs.tokens_sha256,
                }
                for name, pairs in bitext.splits.items()
            },
        },
        **{f"{split}_perplexity": evaluation["perplexity"] for split, evaluation in evaluations.items()},
        **shown,
        "evaluation": evaluations,
    }


def evaluate_translator(
    recipe: Recipe,
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
        model, bitext.splits[split], tokenization, batch_tokens=recipe.bitext.batch_tokens, progress=progress
    )
    path = resolve_bitext(recipe.data.corpus if data is None else data)
    files = find_bitext(path, recipe.bitext.source, recipe.bitext.target, require_train=False)
    blocks = list(read_pairs(files[split]))
    sources = [one_line(line) for block in blocks for line in block.source]
    references = [one_line(line) for block in blocks for line in block.target]
    options = TranslationOptions(beam_options(recipe), batch_size=recipe.beam.batch_size)
    started = time.monotonic()
    found = translate_lines(model, tokenization, sources, recipe.bitext.max_length, options, progress=progress)
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


def translate_text(
    recipe: Recipe,
    model: Translator,
    tokenization: TokenizerPair,
    lines: Sequence[str],
    options: TranslationOptions | None = None,
    *,
    progress: Progress | None = None,
    on_long_line: Callable[[LongLine], None] | None = None,
) -> list[list[Translation]]:
    """The best translations of every line; without options, by the recipe's beam."""
    options = options or TranslationOptions(beam_options(recipe), batch_size=recipe.beam.batch_size)
    longest = recipe.bitext.max_length
    return translate_lines(model, tokenization, lines, longest, options, progress=progress, on_long_line=on_long_line)
