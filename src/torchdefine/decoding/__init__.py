"""What trained models are asked for: continuations, and probabilities that look back at the text."""

from torchdefine.decoding.neural_cache import NeuralCache, tune_neural_cache
from torchdefine.decoding.sampling import SamplingOptions, generate

__all__ = ["NeuralCache", "SamplingOptions", "generate", "tune_neural_cache"]
