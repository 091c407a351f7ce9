"""From a model and a text to a trained model: the loop and what it is built on."""

from torchdefine.training.evaluate import Evaluation, evaluate, unigram_perplexity
from torchdefine.training.loop import Diverged, Interrupted, Trainer
from torchdefine.training.run_folder import RunFolder

__all__ = ["Diverged", "Evaluation", "Interrupted", "RunFolder", "Trainer", "evaluate", "unigram_perplexity"]
