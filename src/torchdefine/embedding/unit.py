"""Expand and Reduce: the deep part of DeFINE with its variants, and the natural baselines, one matrix or an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.config import MOST_WIDE, Config, setting
from torchdefine.embedding.group_linear import GroupLinear, UnitVariance
from torchdefine.embedding.unit_plan import Plan, UnitConfig, make_plan
from torchdefine.modes import Prepared, untouched
from torchdefine.ops import StackForm, StackLayer, group_stack, has_fused_kernels
from torchdefine.ops.group_stack import ACTIVATIONS
from torchdefine.ops.residual_norm import WIDEST


class ExpansionLayer(nn.Module):
    """Group-linear, then norm, activation and dropout."""

    def __init__(self, linear: GroupLinear, config: UnitConfig) -> None:
        super().__init__()
        self.linear = linear
        self.norm: nn.Module | None = None
        if config.norm == "layer":
            self.norm = nn.LayerNorm(linear.out_features)
        elif config.norm == "group":
            self.norm = nn.GroupNorm(linear.groups, linear.out_features)
        self.activation, self.dropout = config.activation, config.dropout

    def forward(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        """``kept`` says which features dropout keeps, where they are drawn already."""
        y = self.linear(x)
        if isinstance(self.norm, nn.GroupNorm):
            y = self.norm(y.reshape(-1, y.shape[-1])).reshape(y.shape)  # GroupNorm takes (T, features)
        elif self.norm is not None:
            y = self.norm(y)
        y = ACTIVATIONS[self.activation](y)
        if kept is not None:
            return y * kept / (1 - self.dropout)
        return F.dropout(y, self.dropout) if self.training and self.dropout else y

    def extra_repr(self) -> str:
        return f"activation={self.activation}" + (f", dropout={self.dropout:g}" if self.dropout else "")


class DefineUnit(Prepared):
    """Vectors of ``map_dim`` → vectors of ``config.embedding_dim``: expand, layer by layer, then reduce."""

    def __init__(self, map_dim: int, config: UnitConfig | None = None) -> None:
        super().__init__()
        self.plan: Plan = make_plan(map_dim, config)
        self.config = self.plan.config
        *expanding, last = ((layer.input_width, layer.output_width, layer.groups) for layer in self.plan)
        scaling = self.config.weight_scaling
        options = {"bias": self.config.bias, "shuffle": self.config.shuffle, "weight_scaling": scaling}
        self.expansions: Any = nn.ModuleList(
            ExpansionLayer(GroupLinear(*sizes, **options), self.config) for sizes in expanding
        )
        self.last = GroupLinear(*last, bias=False, weight_scaling=scaling)
        self.output_norm = nn.LayerNorm(self.plan.embedding_dim) if self.config.output_norm else None
        self._residuals = [
            self.config.skip == "residual" and 0 < index < len(expanding) and layer.input_width == layer.output_width
            for index, layer in enumerate(self.plan)
        ]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start every layer's pre-activations at unit variance for inputs of unit variance, whatever the depth.

        The mean square of what a layer sees is known at initialisation: 1 for the skipped input, the activation's own
        for the previous output. Dividing by it keeps signal and gradient alive at any depth without a norm.
        """
        mean, mean_square = activation_moments(self.config.activation)
        hidden_mean, hidden_square = 0.0, 1.0
        for index, linear in enumerate(self._linears()):
            seen, skipped = linear.in_features, self.plan.layers[index].skipped_width
            linear.reset_parameters(((seen - skipped) * hidden_square + skipped) / seen)
            if self._residuals[index]:
                hidden_square += 2 * hidden_mean * mean + mean_square
                hidden_mean += mean
            else:
                hidden_mean, hidden_square = mean, mean_square
        for norm in (*(layer.norm for layer in self.expansions), self.output_norm):
            if norm is not None:
                norm.reset_parameters()

    def _linears(self) -> list[GroupLinear]:
        return [*(layer.linear for layer in self.expansions), self.last]

    @torch.no_grad()
    def rescale_output(self, factor: float) -> None:
        """Multiply the weights that decide how large the unit's vectors are."""
        for weight in [self.last.weight] if self.output_norm is None else self.output_norm.parameters():
            weight.mul_(factor)

    @torch.no_grad()
    def rescale_input(self, factor: float) -> None:
        """Multiply all weights that see the unit's input, so that x gives what ``factor`` · x gave before."""
        for index, linear in enumerate(self._linears()):
            x = linear.weight.new_full((self.plan.map_dim,), factor)
            hidden = x if index == 0 else linear.weight.new_ones(self.plan.layers[index - 1].output_width)
            linear.weight.mul_(self._with_skip(x, hidden, index).view(linear.groups, -1, 1))

    def forward(self, x: Tensor, outputs: list[Tensor] | None = None, kept: Sequence[Tensor] = ()) -> Tensor:
        """(…, n) → (…, m); ``outputs`` collects what each layer gives; ``kept`` is what ``drawn`` gave."""
        if outputs is None and self.fused and has_fused_kernels(x) and not (self.training and self.config.dropout):
            stacked = group_stack(x, self._stack(), self._form(), torch.get_autocast_dtype(x.device.type))
            return stacked if self.output_norm is None else self.output_norm(stacked)
        hidden = x
        for index, layer in enumerate([*self.expansions, self.last]):
            output = layer(self._with_skip(x, hidden, index), *kept[index : index + 1])  # (…, width of this layer)
            hidden = output + hidden if self._residuals[index] else output
            if outputs is not None:
                outputs.append(hidden)
        if self.output_norm is not None:
            hidden = self.output_norm(hidden)
            if outputs is not None:
                outputs[-1] = hidden
        return hidden

    def drawn(self, rows: int, device: torch.device) -> list[Tensor]:
        """Which features dropout keeps in each layer, (rows, width), so that these can be computed a second time."""
        if not (self.training and self.config.dropout):
            return []
        widths = [layer.linear.out_features for layer in self.expansions]
        masks = [torch.empty(rows, width, dtype=torch.bool, device=device) for width in widths]
        return [mask.bernoulli_(1 - self.config.dropout) for mask in masks]

    def layer_outputs(self, x: Tensor) -> list[Tensor]:
        """What each layer gives, first to last; the last of them is the unit's vector."""
        outputs: list[Tensor] = []
        self.forward(x, outputs)
        return outputs

    def _with_skip(self, x: Tensor, hidden: Tensor, index: int) -> Tensor:
        """Split and mix: chunk i of the input stands before chunk i of the previous output, group by group."""
        layer = self.plan.layers[index]
        if not layer.skipped_width:
            return hidden
        if self.config.skip == "concat" or layer.groups == 1:
            return torch.cat((x, hidden), dim=-1)
        chunks = (x.unflatten(-1, (layer.groups, -1)), hidden.unflatten(-1, (layer.groups, -1)))
        return torch.cat(chunks, dim=-1).flatten(-2)  # (…, n + previous width)

    def prepare(self, on: bool = True) -> None:
        """All layers may run as one operation, unless an option needs them apart."""
        config, widest = self.config, max(layer.output_width for layer in self.plan)
        usual = config.norm != "group" and not config.shuffle and config.skip != "residual" and widest <= WIDEST
        self.fused = on and usual and untouched(self, ExpansionLayer, GroupLinear, nn.LayerNorm)

    def _stack(self) -> list[StackLayer]:
        norms = [*(layer.norm for layer in self.expansions), None]
        return [
            StackLayer(linear.used_weight(), linear.used_bias(), None if norm is None else (norm.weight, norm.bias))
            for linear, norm in zip(self._linears(), norms, strict=True)
        ]

    def _form(self) -> StackForm:
        skip, norms = self.config.skip, [layer.norm for layer in self.expansions if layer.norm is not None]
        skipped = self.plan.map_dim if skip in ("mix", "concat") else 0
        return StackForm(skipped, skip != "concat", self.config.activation, norms[0].eps if norms else 0.0)

    def extra_repr(self) -> str:
        return str(self.plan)


def activation_moments(activation: str) -> tuple[float, float]:
    """E[f(z)] and E[f(z)²] of an activation for a standard normal z, by the trapezoidal rule."""
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64, device="cpu")
    density = torch.exp(-z * z / 2)
    values = ACTIVATIONS[activation](z)
    return float((values * density).sum() / density.sum()), float((values**2 * density).sum() / density.sum())


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
    embedding_dim: int | None = setting(
        None, "Width of the output vectors; by default that of the map.", at_least=1, at_most=MOST_WIDE
    )
    weight_scaling: bool = setting(
        False,
        "Weight scaling: weights are divided by the square root of their fan-in when used (equalised learning rate).",
    )

    def build(self, input_dim: int) -> nn.Module:
        return DenseProjection(input_dim, self.embedding_dim or input_dim, self.weight_scaling)


@dataclass(frozen=True)
class MLPConfig(ProjectionConfig):
    """One hidden layer behind the map."""

    kind: str = "mlp"
    expand_dim: int = setting(1024, "Width of the hidden layer.", at_least=1, at_most=MOST_WIDE)

    def build(self, input_dim: int) -> nn.Module:
        return DenseMLP(input_dim, self.expand_dim, self.embedding_dim or input_dim, self.weight_scaling)


class DenseProjection(UnitVariance, nn.Linear):
    """One matrix without bias: a model then reads other vectors than those a tied softmax compares with.

    torch's own rule starts with a third of the variance, which would hold a baseline back beside the unit.
    """

    def __init__(self, input_dim: int, output_dim: int, weight_scaling: bool = False, bias: bool = False) -> None:
        self.fan_in = input_dim  # before the weights are drawn
        if weight_scaling:
            self.gain = input_dim**-0.5
        super().__init__(input_dim, output_dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.used_weight(), self.used_bias())

    def extra_repr(self) -> str:
        return super().extra_repr() + (", weight_scaling=True" if self.gain != 1.0 else "")


class DenseMLP(nn.Module):
    """One hidden layer with GELU, then a reduction without bias."""

    def __init__(self, input_dim: int, hidden_dim: int, output_dim: int, weight_scaling: bool = False) -> None:
        super().__init__()
        self.weight_scaling = weight_scaling
        self.expand = DenseProjection(input_dim, hidden_dim, weight_scaling, bias=True)
        self.reduce = DenseProjection(hidden_dim, output_dim, weight_scaling)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(F.gelu(self.expand(x)))

    def reset_parameters(self) -> None:
        self.expand.reset_parameters()
        self.reduce.reset_parameters(activation_moments("gelu")[1])
