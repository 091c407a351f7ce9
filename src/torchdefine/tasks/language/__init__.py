"""Language models: every token of a text is predicted from those before it."""

from torchdefine.tasks.language.evaluate import evaluate
from torchdefine.tasks.language.model import LanguageLossConfig, LanguageModel
from torchdefine.tasks.language.neural_cache import CachedModel, NeuralCache
from torchdefine.tasks.language.recipe import LanguageRecipe, LanguageTrainConfig
from torchdefine.tasks.language.run import LanguageRun, generate
from torchdefine.tasks.language.task import LanguageTask, TextBatches, build_language_model, open_corpus

__all__ = [
    "CachedModel",
    "LanguageLossConfig",
    "LanguageModel",
    "LanguageRecipe",
    "LanguageRun",
    "LanguageTask",
    "LanguageTrainConfig",
    "NeuralCache",
    "TextBatches",
    "build_language_model",
    "evaluate",
    "generate",
    "open_corpus",
]
