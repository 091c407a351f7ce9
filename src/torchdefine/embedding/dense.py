"""The natural baselines of a unit: one matrix, or one hidden layer. They start as a unit's layers do."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.embedding.unit import activation_moments


class DenseProjection(nn.Linear):
    """One matrix without bias: it unties what a model reads from what a tied softmax compares with."""

    def __init__(self, input_dim: int, output_dim: int) -> None:
        super().__init__(input_dim, output_dim, bias=False)

    def reset_parameters(self) -> None:
        start_at_unit_variance(self)


class DenseMLP(nn.Module):
    """One hidden layer with GELU, then a reduction without bias."""

    def __init__(self, input_dim: int, hidden_dim: int, output_dim: int) -> None:
        super().__init__()
        self.expand = nn.Linear(input_dim, hidden_dim)
        self.reduce = nn.Linear(hidden_dim, output_dim, bias=False)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(F.gelu(self.expand(x)))

    def reset_parameters(self) -> None:
        start_at_unit_variance(self.expand)
        start_at_unit_variance(self.reduce, activation_moments("gelu")[1])


def start_at_unit_variance(linear: nn.Linear, input_second_moment: float = 1.0) -> None:
    """Draw weights that give outputs of unit variance for inputs whose mean square is ``input_second_moment``.

    torch's own rule starts with a third of that variance, which would hold a baseline back beside the unit.
    """
    nn.init.normal_(linear.weight, std=(linear.in_features * input_second_moment) ** -0.5)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
