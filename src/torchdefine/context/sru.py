"""Simple recurrent units (Lei et al., 2018): gates that see the past of their own channel alone, and a highway."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdefine.config import setting
from torchdefine.context.recurrent import LayerState, RecurrentConfig, RecurrentStack
from torchdefine.ops import light_recurrence


@dataclass(frozen=True)
class SRUConfig(RecurrentConfig):
    """Stacked SRU layers. Every dropout has one mask for all positions of a segment."""

    kind: str = "sru"
    highway_bias: float = setting(
        0.0,
        "Initial bias of the reset gates; below 0, more of a layer's input passes through.",
        at_least=-10,
        at_most=10,
    )

    def build(self, input_dim: int, tied_dim: int | None) -> SRU:
        """The context model of a recipe; ``tied_dim`` is the width that a tied output layer compares with."""
        return SRU(input_dim, self, self.output_dim or tied_dim)


class SRULayer(nn.Module):
    """One layer, (T, B, input) → (T, B, output).

    The forget gate f and the reset gate r see the input and, weighed by a vector each, the cell before. The output is
    r · cell + (1 - r) · highway. The highway is the input, or a linear map of it where widths differ; there is none
    with ``highway`` false.
    """

    def __init__(self, input_dim: int, output_dim: int, highway: bool = True, highway_bias: float = 0.0) -> None:
        super().__init__()
        self.output_dim = output_dim
        self.highway, self.mapped = highway, highway and input_dim != output_dim
        self.highway_bias = highway_bias
        self.parts = 4 if self.mapped else 3
        self.linear = nn.Linear(input_dim, self.parts * output_dim, bias=False)
        self.peepholes = nn.Parameter(torch.empty(2, output_dim))  # of the forget and the reset gate
        self.biases = nn.Parameter(torch.empty(2, output_dim))
        self.reset_parameters()

    @property
    def scale(self) -> float:
        """Of the highway, for outputs whose variance is that of the inputs."""
        return math.sqrt(1 + 2 * math.exp(self.highway_bias))

    def reset_parameters(self) -> None:
        """As the paper derives them: a variance of one over the inputs for candidates, and half of that for gates."""
        bound = math.sqrt(3 / self.linear.in_features)
        candidates, *gates_and_highway = self.linear.weight.chunk(self.parts)
        nn.init.uniform_(candidates, -bound, bound)
        for part, scale in zip(gates_and_highway, (math.sqrt(0.5), math.sqrt(0.5), self.scale), strict=False):
            nn.init.uniform_(part, -scale * bound, scale * bound)
        nn.init.uniform_(self.peepholes, -math.sqrt(1.5), math.sqrt(1.5))
        nn.init.zeros_(self.biases)
        nn.init.constant_(self.biases[1], self.highway_bias)

    def carried(self) -> dict[str, tuple[int, int]]:
        return {"cell": (1, self.output_dim)}

    def forward(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        candidates, forget, reset, *mapped = self.linear(x).chunk(self.parts, -1)  # (T, B, output) each
        cells = light_recurrence(forget + self.biases[0], candidates, state[0][0], self.peepholes[0])
        before = torch.cat((state[0].to(cells.dtype), cells[:-1]))
        return self._output(x, cells, before, reset, mapped), (cells[-1:],)

    def step(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        (before,) = state[0]  # (B, output)
        candidate, forget, reset, *mapped = self.linear(x).chunk(self.parts, -1)
        gate = (forget + self.biases[0] + self.peepholes[0] * before).sigmoid()
        cell = candidate + gate * (before - candidate)
        return self._output(x, cell, before, reset, mapped), (cell[None],)

    def _output(self, x: Tensor, cells: Tensor, before: Tensor, reset: Tensor, mapped: list[Tensor]) -> Tensor:
        gates = (reset + self.biases[1] + self.peepholes[1] * before).sigmoid()
        if not self.highway:
            return gates * cells
        around = mapped[0] if mapped else self.scale * x
        return around + gates * (cells - around)


class SRU(RecurrentStack):
    """(B, T, input_dim) → (B, T, output_dim); the last layer is ``output_dim`` wide, the others ``hidden_dim``."""

    noun = "an SRU"

    def __init__(self, input_dim: int, config: SRUConfig | None = None, output_dim: int | None = None) -> None:
        """``output_dim`` is the width of the last layer; by default as the settings say."""
        config = config or SRUConfig()
        bias = config.highway_bias
        super().__init__(input_dim, config, output_dim, lambda a, b, _: SRULayer(a, b, highway_bias=bias))
