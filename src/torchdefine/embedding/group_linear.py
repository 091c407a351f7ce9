"""F_G, the paper's group transformation: the input is split into groups and each has a matrix of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.errors import UserError, check_count
from torchdefine.ops import group_linear


class UnitVariance(nn.Module):
    """A linear layer whose outputs start with unit variance, with or without weight scaling.

    Weight scaling keeps weights of unit variance and multiplies them by 1 / sqrt(fan-in) when it uses them: the
    equalised learning rate of Karras et al. (2018). The layer starts as the same function, but an optimiser, whose
    steps do not depend on the fan-in, moves it far less.
    """

    weight: Any
    bias: Any
    fan_in: int
    gain = 1.0

    def reset_parameters(self, input_second_moment: float = 1.0) -> None:
        """Draw weights that give outputs of unit variance for inputs whose mean square is ``input_second_moment``."""
        nn.init.normal_(self.weight, std=(self.fan_in * input_second_moment) ** -0.5 / self.gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def used_weight(self) -> Tensor:
        """The weight that the input is multiplied by."""
        return self.weight if self.gain == 1.0 else self.weight * self.gain

    def used_bias(self) -> Tensor | None:
        return self.bias if self.bias is None or self.gain == 1.0 else self.bias * self.gain


class GroupLinear(UnitVariance):
    """``groups`` linear layers side by side, run as one batched matrix product.

    Group i takes the i-th chunk of the input to the i-th chunk of the output, so there are
    ``in_features * out_features / groups`` weights; one group is an ordinary linear layer. With ``shuffle`` the
    outputs are dealt out afterwards, so that every following group receives a part of every group here.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        groups: int = 1,
        *,
        bias: bool = True,
        shuffle: bool = False,
        weight_scaling: bool = False,
    ) -> None:
        super().__init__()
        check_count("groups", groups)
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            check_count(name, value)
            if value % groups:
                lower = value // groups * groups
                options = f"{lower} or {lower + groups}" if lower else f"{groups}"
                raise UserError(f"{name} {value} is not divisible by {groups} groups: use {options}.")
        self.in_features, self.out_features, self.groups, self.shuffle = in_features, out_features, groups, shuffle
        self.fan_in = in_features // groups
        self.gain = self.fan_in**-0.5 if weight_scaling else 1.0
        self.weight = nn.Parameter(torch.empty(groups, self.fan_in, out_features // groups))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_features) → (…, out_features)."""
        if x.shape[-1] != self.in_features:
            raise UserError(f"The input is {x.shape[-1]} wide, but this layer takes {self.in_features}.")
        y = group_linear(x, self.weight, self.bias, self.gain)
        if self.shuffle:
            y = y.unflatten(-1, (self.groups, -1)).transpose(-1, -2).flatten(-2)
        return y

    def extra_repr(self) -> str:
        shuffle = ", shuffle=True" if self.shuffle else ""
        gain = f", gain={self.gain:.4g}" if self.gain != 1.0 else ""
        sizes = f"{self.in_features}, {self.out_features}, groups={self.groups}"
        return f"{sizes}, bias={self.bias is not None}{shuffle}{gain}"
