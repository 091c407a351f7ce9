"""The natural baselines of a unit: one matrix, or one hidden layer. They start as a unit's layers do."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.config import Config, setting
from torchdefine.embedding.group_linear import UnitVariance
from torchdefine.embedding.unit import activation_moments


@dataclass(frozen=True)
class NoUnitConfig(Config):
    """The map's vectors as they are."""

    kind: str = "none"

    def build(self, input_dim: int) -> None:
        return None


@dataclass(frozen=True)
class ProjectionConfig(Config):
    """One matrix behind the map."""

    kind: str = "projection"
    embedding_dim: int | None = setting(None, "Width of the output; the map's by default.", at_least=1)
    equalised: bool = setting(False, "Weight scaling (equalised learning rate): divide weights by √fan-in in use.")

    def build(self, input_dim: int) -> nn.Module:
        return DenseProjection(input_dim, self.embedding_dim or input_dim, self.equalised)


@dataclass(frozen=True)
class MLPConfig(ProjectionConfig):
    """One hidden layer behind the map."""

    kind: str = "mlp"
    expand_dim: int = setting(1024, "Width of the hidden layer.", at_least=1)

    def build(self, input_dim: int) -> nn.Module:
        return DenseMLP(input_dim, self.expand_dim, self.embedding_dim or input_dim, self.equalised)


class DenseProjection(UnitVariance, nn.Linear):
    """One matrix without bias: a model then reads other vectors than those a tied softmax compares with.

    torch's own rule starts with a third of the variance, which would hold a baseline back beside the unit.
    """

    def __init__(self, input_dim: int, output_dim: int, equalised: bool = False, bias: bool = False) -> None:
        self.fan_in = input_dim  # before the weights are drawn
        if equalised:
            self.gain = input_dim**-0.5
        super().__init__(input_dim, output_dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.used_weight(), self.used_bias())

    def extra_repr(self) -> str:
        return super().extra_repr() + (", equalised" if self.gain != 1.0 else "")


class DenseMLP(nn.Module):
    """One hidden layer with GELU, then a reduction without bias."""

    def __init__(self, input_dim: int, hidden_dim: int, output_dim: int, equalised: bool = False) -> None:
        super().__init__()
        self.equalised = equalised
        self.expand = DenseProjection(input_dim, hidden_dim, equalised, bias=True)
        self.reduce = DenseProjection(hidden_dim, output_dim, equalised)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(F.gelu(self.expand(x)))

    def reset_parameters(self) -> None:
        self.expand.reset_parameters()
        self.reduce.reset_parameters(activation_moments("gelu")[1])
