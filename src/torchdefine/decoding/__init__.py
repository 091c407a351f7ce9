"""What trained models produce: continuations, translations, and probabilities that look back at the text."""

from torchdefine.decoding.beam import BeamOptions, Hypothesis, TargetTokens, beam_search, sample_targets
from torchdefine.decoding.neural_cache import NeuralCache, tune_neural_cache
from torchdefine.decoding.sampling import SamplingOptions, generate
from torchdefine.decoding.translation import (
    LongLine,
    Translation,
    TranslationOptions,
    TranslationScores,
    require_sacrebleu,
    score_translations,
    translate_lines,
)

__all__ = [
    "BeamOptions",
    "Hypothesis",
    "LongLine",
    "NeuralCache",
    "SamplingOptions",
    "TargetTokens",
    "Translation",
    "TranslationOptions",
    "TranslationScores",
    "beam_search",
    "generate",
    "require_sacrebleu",
    "sample_targets",
    "score_translations",
    "translate_lines",
    "tune_neural_cache",
]
