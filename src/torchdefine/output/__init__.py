"""Vectors → loss and log-probabilities, tied to the map's table."""

from torchdefine.output.adaptive import AdaptiveSoftmax
from torchdefine.output.layer import OutputLayer
from torchdefine.output.linear import FullSoftmax
from torchdefine.output.linear_cross_entropy import linear_cross_entropy
from torchdefine.output.mixture import MixtureSoftmax

__all__ = ["AdaptiveSoftmax", "FullSoftmax", "MixtureSoftmax", "OutputLayer", "linear_cross_entropy"]
