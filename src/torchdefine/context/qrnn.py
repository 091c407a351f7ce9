"""Quasi-recurrent networks (Bradbury et al., 2017): gates from a convolution over positions, and a light recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.config import rate, setting
from torchdefine.context.recurrent import LayerState, RecurrentConfig, RecurrentStack
from torchdefine.ops import light_recurrence

WINDOWS: dict[str, Any] = {"at_least": 1, "at_most": 64}


@dataclass(frozen=True)
class QRNNConfig(RecurrentConfig):
    """Stacked QRNN layers. Dropout between layers has one mask for all positions of a segment."""

    kind: str = "qrnn"
    windows: tuple[int, ...] = setting(
        (2, 1),
        "Positions that the convolution of each layer reads; the last number holds for all later layers.",
        **WINDOWS,
    )
    output_gate: bool = setting(True, "Whether layers have an output gate (fo-pooling); otherwise f-pooling.")
    weight_dropout: float = rate("Dropout rate of the weights of every layer.")
    zoneout: float = rate("Probability that a cell keeps its value at a position, in training.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(bool(self.windows), "windows is empty: give at least one number, such as 1.")

    def build(self, input_dim: int, tied_dim: int | None) -> QRNN:
        """The context model of a recipe; ``tied_dim`` is the width that a tied output layer compares with."""
        return QRNN(input_dim, self, self.output_dim or tied_dim)

    def window(self, layer: int) -> int:
        return self.windows[min(layer, len(self.windows) - 1)]


class QRNNLayer(nn.Module):
    """One layer, (T, B, input) → (T, B, output).

    From the newest ``window`` inputs it makes candidates, forget gates and maybe output gates, all positions at once.
    Only the cells depend on the ones before, channel by channel. Its state is the cell and the last inputs.
    """

    def __init__(self, input_dim: int, output_dim: int, window: int, config: QRNNConfig) -> None:
        super().__init__()
        self.input_dim, self.output_dim, self.window = input_dim, output_dim, window
        self.weight_dropout, self.zoneout = config.weight_dropout, config.zoneout
        self.parts = 3 if config.output_gate else 2
        self.linear = nn.Linear(window * input_dim, self.parts * output_dim)

    def carried(self) -> dict[str, tuple[int, int]]:
        inputs = {"inputs": (self.window - 1, self.input_dim)} if self.window > 1 else {}
        return {"cell": (1, self.output_dim), **inputs}

    def forward(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        cell, *before = state
        inputs = torch.cat((*before, x))  # (window - 1 + T, B, input)
        candidates, forget, *gate = self._gates(inputs, len(x))
        cells = light_recurrence(forget, candidates, cell[0])  # (T, B, output)
        y = cells * gate[0] if gate else cells
        return y, (cells[-1:], *(inputs[len(x) :] for _ in before))

    def step(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        cell, *before = state
        inputs = torch.cat((*before, x[None]))  # (window, B, input)
        candidate, forget, *gate = self._gates(inputs, 1)  # (1, B, output)
        cell = candidate + forget * (cell - candidate)
        y = cell * gate[0] if gate else cell
        return y[0], (cell, *(inputs[1:] for _ in before))

    def _gates(self, inputs: Tensor, length: int) -> tuple[Tensor, ...]:
        """Candidates, forget gates and maybe output gates of the last ``length`` positions, (T, B, output) each."""
        newest_first = range(self.window - 1, -1, -1)
        seen = torch.cat([inputs[place : place + length] for place in newest_first], -1)  # (T, B, window · input)
        weight = F.dropout(self.linear.weight, self.weight_dropout, self.training)
        candidates, forget, *gate = F.linear(seen, weight, self.linear.bias).chunk(self.parts, -1)
        forget = forget.sigmoid()
        if self.zoneout:
            changed = torch.full_like(forget, 1 - self.zoneout)
            forget = 1 - (1 - forget) * (changed.bernoulli() if self.training else changed)
        return candidates.tanh(), forget, *(one.sigmoid() for one in gate)


class QRNN(RecurrentStack):
    """(B, T, input_dim) → (B, T, output_dim); the last layer is ``output_dim`` wide, the others ``hidden_dim``."""

    noun = "a QRNN"

    def __init__(self, input_dim: int, config: QRNNConfig | None = None, output_dim: int | None = None) -> None:
        """``output_dim`` is the width of the last layer; by default as the settings say."""
        settings = config or QRNNConfig()
        super().__init__(input_dim, settings, output_dim, lambda a, b, i: QRNNLayer(a, b, settings.window(i), settings))
