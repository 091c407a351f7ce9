"""Expand and Reduce: the deep part of DeFINE, and the variants that the paper compares."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from torchdefine.embedding.group_linear import GroupLinear
from torchdefine.embedding.plan import Plan, PlanRules
from torchdefine.errors import UserError
from torchdefine.ops import StackForm, StackLayer, group_stack, has_fused_kernels, is_plain
from torchdefine.ops.group_stack import ACTIVATIONS
from torchdefine.ops.residual_norm import WIDEST
from torchdefine.spelling import did_you_mean

Norm = Literal["none", "layer", "group"]

VARIANTS: dict[str, dict[str, Any]] = {
    "define": {},
    "define-no-mixer": {"skip": "concat"},
    "define-residual": {"skip": "residual"},
    "define-no-reduce": {"reduce": False},
    "hgt": {"skip": "none"},
    "glt": {"groups": "fixed", "skip": "none"},
    "glt-shuffle": {"groups": "fixed", "skip": "none", "shuffle": True},
    "linear": {"groups": "dense", "skip": "none"},
}
"""The rows of the paper's ablations by name: what each changes of the DeFINE unit."""


@dataclass(frozen=True)
class UnitOptions:
    """All settings of a unit except its sizes. ``UnitOptions.of("hgt", norm="layer")`` starts from a variant."""

    rules: PlanRules = field(default_factory=PlanRules)
    shuffle: bool = False
    """Deal the outputs of every expansion layer out over the groups (GLT + shuffle)."""
    norm: Norm = "none"
    """none; layer: over all features of an expansion layer; group: within each of its groups. Both are affine."""
    activation: str = "gelu"
    dropout: float = 0.0
    """After every expansion layer."""
    bias: bool = True
    """On the expansion layers; the reduce layer has none."""
    equalised: bool = False
    """Keep weights at unit variance and divide them by the root of their fan-in in use, so that they learn slowly."""

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise UserError(f"norm {self.norm!r} is unknown: use one of {', '.join(get_args(Norm))}.")
        if self.activation not in ACTIVATIONS:
            raise UserError(f"activation {self.activation!r} is unknown: use one of {', '.join(ACTIVATIONS)}.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}, but must be at least 0 and below 1: use 0.1, say.")

    @classmethod
    def of(cls, variant: str = "define", **changes: Any) -> UnitOptions:
        """A named variant with changes to any option or plan rule: ``of("glt", norm="layer", multiple_of=8)``."""
        if variant == "projection":
            raise UserError("One projection is a unit of depth 1: use depth=1, and no variant.")
        if variant not in VARIANTS:
            raise UserError(f"The variant {variant!r} is unknown{did_you_mean(variant, VARIANTS)}")
        settings = {**VARIANTS[variant], **changes}
        rule_names = {f.name for f in fields(PlanRules)}
        option_names = {f.name for f in fields(cls)} - {"rules"}
        for name in settings:
            if name not in rule_names | option_names:
                raise UserError(f"{name!r} is no option of a unit{did_you_mean(name, rule_names | option_names)}")
        rules = PlanRules(**{k: v for k, v in settings.items() if k in rule_names})
        return cls(rules=rules, **{k: v for k, v in settings.items() if k in option_names})

    @classmethod
    def read(cls, unit: UnitOptions | str) -> UnitOptions:
        """Options as a caller gives them: themselves, or the name of a variant."""
        if isinstance(unit, str):
            return cls.of(unit)
        if not isinstance(unit, UnitOptions):
            raise TypeError(f"A unit is UnitOptions or the name of a variant, not {unit!r}.")
        return unit

    def to_dict(self) -> dict[str, Any]:
        """Flat settings that ``UnitOptions.of("define", **settings)`` turns back into the same options."""
        settings = dataclasses.asdict(self)
        return {**settings.pop("rules"), **settings}


class ExpansionLayer(nn.Module):
    """Group-linear, then norm, activation and dropout."""

    def __init__(self, linear: GroupLinear, options: UnitOptions) -> None:
        super().__init__()
        self.linear = linear
        self.norm: nn.Module | None = None
        if options.norm == "layer":
            self.norm = nn.LayerNorm(linear.out_features)
        elif options.norm == "group":
            self.norm = nn.GroupNorm(linear.groups, linear.out_features)
        self.activation = options.activation
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if isinstance(self.norm, nn.GroupNorm):
            y = self.norm(y.reshape(-1, y.shape[-1])).reshape(y.shape)  # GroupNorm takes (T, features)
        elif self.norm is not None:
            y = self.norm(y)
        y = ACTIVATIONS[self.activation](y)
        return self.dropout(y) if self.dropout.p else y

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


class DefineUnit(nn.Module):
    """Vectors of ``plan.map_dim`` → vectors of ``plan.embedding_dim``: expand, layer by layer, then reduce."""

    def __init__(self, plan: Plan, options: UnitOptions | str = "define") -> None:
        super().__init__()
        options = UnitOptions.read(options)
        self.plan, self.options = plan, dataclasses.replace(options, rules=plan.rules)
        *expanding, last = plan.layers
        self.expansions = nn.ModuleList(
            ExpansionLayer(
                GroupLinear(
                    *(p.input_width, p.output_width, p.groups),
                    bias=options.bias,
                    shuffle=options.shuffle,
                    equalised=options.equalised,
                ),
                options,
            )
            for p in expanding
        )
        self.last = GroupLinear(
            *(last.input_width, last.output_width, last.groups), bias=False, equalised=options.equalised
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start every layer's pre-activations at unit variance for inputs of unit variance, whatever the depth.

        The mean square of what a layer sees is known at initialisation: 1 for the skipped input, the activation's own
        for the previous output. Dividing by it keeps signal and gradient alive at any depth without a norm.
        """
        mean, mean_square = activation_moments(self.options.activation)
        hidden_mean, hidden_square = 0.0, 1.0
        for index, layer in enumerate([*self.expansions, self.last]):
            linear = layer.linear if isinstance(layer, ExpansionLayer) else layer
            again = self.plan.layers[index].skipped_width
            seen = linear.in_features
            linear.reset_parameters(((seen - again) * hidden_square + again) / seen)
            if isinstance(layer, ExpansionLayer) and layer.norm is not None:
                layer.norm.reset_parameters()  # type: ignore[operator]
            if self._adds_residual(index):
                hidden_square += 2 * hidden_mean * mean + mean_square
                hidden_mean += mean
            else:
                hidden_mean, hidden_square = mean, mean_square

    @torch.no_grad()
    def rescale_input(self, factor: float) -> None:
        """Multiply all weights that see the unit's input, so that x gives what ``factor`` · x gave before."""
        for index, layer in enumerate([*self.expansions, self.last]):
            linear: GroupLinear = layer.linear if isinstance(layer, ExpansionLayer) else layer
            x = linear.weight.new_full((self.plan.map_dim,), factor)
            hidden = x if index == 0 else linear.weight.new_ones(self.plan.layers[index - 1].output_width)
            linear.weight.mul_(self._see_again(x, hidden, index).view(linear.groups, -1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(…, n) → (…, m)."""
        if self._in_one(x):
            return group_stack(x, self._stack(), self._form(), torch.get_autocast_dtype(x.device.type))
        hidden = x
        for index in range(self.plan.depth):
            hidden = self._step(x, hidden, index)
        return hidden

    def layer_outputs(self, x: Tensor) -> list[Tensor]:
        """What each layer gives, first to last; the last of them is the finished vector."""
        outputs = [x]
        for index in range(self.plan.depth):
            outputs.append(self._step(x, outputs[-1], index))
        return outputs[1:]

    def _step(self, x: Tensor, hidden: Tensor, index: int) -> Tensor:
        layer = self.expansions[index] if index < len(self.expansions) else self.last
        output = layer(self._see_again(x, hidden, index))  # (…, width of this layer)
        return output + hidden if self._adds_residual(index) else output

    def _adds_residual(self, index: int) -> bool:
        layers = self.plan.layers
        return (
            self.plan.rules.skip == "residual"
            and 0 < index < len(layers) - 1
            and layers[index].input_width == layers[index].output_width
        )

    def _see_again(self, x: Tensor, hidden: Tensor, index: int) -> Tensor:
        """Split and mix: chunk i of the input stands before chunk i of the previous output, group by group."""
        layer = self.plan.layers[index]
        if not layer.skipped_width:
            return hidden
        if self.plan.rules.skip == "concat" or layer.groups == 1:
            return torch.cat((x, hidden), dim=-1)
        chunks = (x.unflatten(-1, (layer.groups, -1)), hidden.unflatten(-1, (layer.groups, -1)))
        return torch.cat(chunks, dim=-1).flatten(-2)  # (…, n + previous width)

    def _in_one(self, x: Tensor) -> bool:
        """Whether all layers run as one operation: on a newer GPU under autocast, unless an option needs them apart."""
        options = self.options
        usual = options.norm != "group" and not options.shuffle and options.rules.skip != "residual"
        return (
            has_fused_kernels(x)
            and usual
            and not (self.training and options.dropout)
            and max(layer.output_width for layer in self.plan.layers) <= WIDEST
            and x.shape[-1] == self.plan.map_dim
            and self._layers_are_plain()
        )

    def _layers_are_plain(self) -> bool:
        """Whether all layers are ours, without hooks or wrappers."""
        layers: list[Any] = list(self.expansions)
        return is_plain(self.last, GroupLinear) and all(
            is_plain(layer, ExpansionLayer)
            and is_plain(layer.linear, GroupLinear)
            and (layer.norm is None or is_plain(layer.norm, nn.LayerNorm))
            for layer in layers
        )

    def _stack(self) -> list[StackLayer]:
        layers = []
        for layer in self.expansions:
            norm: Any = layer.norm
            of_norm = None if norm is None else (norm.weight, norm.bias)
            linear: Any = layer.linear
            layers.append(StackLayer(linear.used_weight(), linear.used_bias(), of_norm))
        return [*layers, StackLayer(self.last.used_weight())]

    def _form(self) -> StackForm:
        skip = self.plan.rules.skip
        eps = next((layer.norm.eps for layer in self.expansions if layer.norm is not None), 0.0)  # type: ignore[union-attr]
        seen = self.plan.map_dim if skip in ("mix", "concat") else 0
        return StackForm(seen, skip != "concat", self.options.activation, eps)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return str(self.plan)


def activation_moments(activation: str) -> tuple[float, float]:
    """E[f(z)] and E[f(z)²] of an activation for a standard normal z, by the trapezoidal rule."""
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64, device="cpu")
    density = torch.exp(-z * z / 2)
    values = ACTIVATIONS[activation](z)
    return float((values * density).sum() / density.sum()), float((values**2 * density).sum() / density.sum())
