"""Models → text."""

from torchdefine.decoding.sampling import SamplingOptions, generate

__all__ = ["SamplingOptions", "generate"]
