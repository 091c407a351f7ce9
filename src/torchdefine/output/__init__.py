"""Vectors → loss and log-probabilities, tied to the map's table."""

from torchdefine.output.adaptive import AdaptiveSoftmax
from torchdefine.output.layer import OutputLayer
from torchdefine.output.linear import FullSoftmax
from torchdefine.output.linear_cross_entropy import linear_cross_entropy

__all__ = ["AdaptiveSoftmax", "FullSoftmax", "OutputLayer", "linear_cross_entropy"]
