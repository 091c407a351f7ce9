"""Vectors → loss and log-probabilities, tied to the map's table."""

from torchdefine.config import Kinds
from torchdefine.output.adaptive import AdaptiveSoftmax, AdaptiveSoftmaxConfig, BandedSoftmax
from torchdefine.output.adaptive_table import AdaptiveTableConfig, AdaptiveTableSoftmax
from torchdefine.output.full import FullConfig, FullSoftmax
from torchdefine.output.layer import HostHint, LossConfig, Losses, OutputConfig, OutputLayer
from torchdefine.output.linear_cross_entropy import linear_cross_entropy
from torchdefine.output.mixture import MixtureConfig, MixtureSoftmax

OUTPUTS = Kinds("output layer", FullConfig, AdaptiveSoftmaxConfig, AdaptiveTableConfig, MixtureConfig)
register_output = OUTPUTS.register

__all__ = [
    "OUTPUTS",
    "AdaptiveSoftmax",
    "AdaptiveSoftmaxConfig",
    "AdaptiveTableConfig",
    "AdaptiveTableSoftmax",
    "BandedSoftmax",
    "FullConfig",
    "FullSoftmax",
    "HostHint",
    "LossConfig",
    "Losses",
    "MixtureConfig",
    "MixtureSoftmax",
    "OutputConfig",
    "OutputLayer",
    "linear_cross_entropy",
    "register_output",
]
