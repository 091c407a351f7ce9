"""Language models: every token of a text is predicted from those before it."""

from torchdefine.tasks.language.evaluate import evaluate
from torchdefine.tasks.language.generate import generate
from torchdefine.tasks.language.model import LanguageLossConfig, LanguageModel
from torchdefine.tasks.language.neural_cache import NeuralCache, tune_neural_cache
from torchdefine.tasks.language.recipe import LanguageRecipe
from torchdefine.tasks.language.run import LanguageRun
from torchdefine.tasks.language.task import LanguageTask, build_language_model, open_corpus
