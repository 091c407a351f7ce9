"""Translation: every token of a target sentence is predicted from its source and the tokens before it."""

from torchdefine.tasks.translation.beam import BeamConfig, TargetTokens, beam_search
from torchdefine.tasks.translation.lines import Translation, TranslationOptions, TranslationScores, score_translations
from torchdefine.tasks.translation.model import Translator
from torchdefine.tasks.translation.recipe import TranslationRecipe, TranslationTrainConfig
from torchdefine.tasks.translation.run import TranslationEvaluation, TranslationRun, evaluate_pairs
from torchdefine.tasks.translation.task import PairData, TranslationTask, build_translator

__all__ = [
    "BeamConfig",
    "PairData",
    "TargetTokens",
    "Translation",
    "TranslationEvaluation",
    "TranslationOptions",
    "TranslationRecipe",
    "TranslationRun",
    "TranslationScores",
    "TranslationTask",
    "TranslationTrainConfig",
    "Translator",
    "beam_search",
    "build_translator",
    "evaluate_pairs",
    "score_translations",
]
