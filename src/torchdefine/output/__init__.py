"""Vectors → loss and log-probabilities, tied to the map's table."""

from torchdefine.output.adaptive import AdaptiveSoftmax, BandedSoftmax
from torchdefine.output.adaptive_table import AdaptiveTableSoftmax
from torchdefine.output.layer import OutputLayer
from torchdefine.output.linear import FullSoftmax
from torchdefine.output.linear_cross_entropy import linear_cross_entropy
from torchdefine.output.mixture import MixtureSoftmax

__all__ = [
    "AdaptiveSoftmax",
    "AdaptiveTableSoftmax",
    "BandedSoftmax",
    "FullSoftmax",
    "MixtureSoftmax",
    "OutputLayer",
    "linear_cross_entropy",
]
