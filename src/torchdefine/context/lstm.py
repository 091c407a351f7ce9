"""Stacked LSTM layers with variational dropout and carried state."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.config import MOST_DEEP, MOST_WIDE, Config, rate, setting
from torchdefine.ops import has_kernel, locked_dropout, lstm

LSTMState = list[tuple[Tensor, Tensor]]
"""Hidden and cell state of every layer, each (1, B, width)."""


@dataclass(frozen=True)
class LSTMConfig(Config):
    """Stacked LSTM layers. Every dropout has one mask for all positions of a segment."""

    kind: str = "lstm"
    layers: int = setting(1, "How many layers.", at_least=1, at_most=MOST_DEEP)
    hidden_dim: int = setting(256, "Width of all layers but the last (see output_dim).", at_least=1, at_most=MOST_WIDE)
    output_dim: int | None = setting(
        None, "Width of the last layer; else hidden_dim, or map_dim if tied.", at_least=1, at_most=MOST_WIDE
    )
    input_dropout: float = rate("Dropout rate of the inputs of the first layer.")
    hidden_dropout: float = rate("Dropout rate between the layers.")
    recurrent_dropout: float = rate("Dropout rate of the recurrent weights of every layer.")
    state_dropout: float = rate("Fraction of streams whose state is reset at the start of a training segment.")

    def build(self, input_dim: int, tied_dim: int | None) -> LSTM:
        """The context model of a recipe; ``tied_dim`` is the width that a tied output layer compares with."""
        return LSTM(input_dim, self, self.output_dim or tied_dim)


class LSTMLayer(nn.LSTM):
    """One layer, (T, B, input) → (T, B, output), whose recurrent weights can be dropped in training.

    The mask is drawn in the forward pass and the weights themselves stay whole, so there is nothing to restore in
    evaluation or in a checkpoint. In half precision on a GPU the recurrence is a kernel of our own where one fits;
    otherwise cuDNN's, with dropped weights cast and packed into the one piece of memory that it needs.
    """

    def __init__(self, input_dim: int, output_dim: int, recurrent_dropout: float = 0.0) -> None:
        super().__init__(input_dim, output_dim)
        self.recurrent_dropout = recurrent_dropout

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # type: ignore[override]
        dropping = self.training and self.recurrent_dropout > 0
        if not (dropping or has_kernel(x, self.hidden_size)):
            return super().forward(x, state)  # with weights that cuDNN has packed already
        weights: list[Any] = list(self.all_weights[0])  # weight_ih, weight_hh, bias_ih, bias_hh
        if dropping:
            weights[1] = F.dropout(weights[1], self.recurrent_dropout)  # (4 · output, output)
        if x.is_cuda:
            y, h, c = lstm(x, *state, weights)
        else:  # called from here, since torch.compile leaves layers of this class whole but would trace our function
            y, h, c = torch._VF.lstm(x, state, weights, True, 1, 0.0, True, False, False)
        return y, (h, c)


class LSTM(nn.Module):
    """(B, T, input_dim) → (B, T, output_dim); the last layer is ``output_dim`` wide, the others ``hidden_dim``.

    Layers are separate single-layer LSTMs: dropout between them can hold one mask for all positions, and in half
    precision cuDNN runs single layers whose widths are multiples of 128 on its persistent kernels, 2–4 times faster.
    """

    reads_by_position = True
    """Vectors that lie in memory position by position, all rows of the first one first, are not copied."""
    step_length = 1

    def __init__(self, input_dim: int, config: LSTMConfig | None = None, output_dim: int | None = None) -> None:
        """``output_dim`` is the width of the last layer; by default as the settings say."""
        super().__init__()
        self.config = config = config or LSTMConfig()
        self.input_dim = input_dim
        self.output_dim = output_dim or config.output_dim or config.hidden_dim
        widths = [input_dim, *[config.hidden_dim] * (config.layers - 1), self.output_dim]
        self.layers: Any = nn.ModuleList(LSTMLayer(a, b, config.recurrent_dropout) for a, b in pairwise(widths))

    def initial_state(self, batch_size: int) -> LSTMState:
        zeros, shapes = next(self.parameters()).new_zeros, [(1, batch_size, layer.hidden_size) for layer in self.layers]
        return [(zeros(shape), zeros(shape)) for shape in shapes]

    def forward(self, x: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        """The outputs, and the state after the last position, cut off from the graph."""
        config, hidden = self.config, x.transpose(0, 1)  # (T, B, input_dim), the layout of cuDNN
        if self.training:
            hidden = locked_dropout(hidden, config.input_dropout, time_dim=0)
            state = self._begin_some_anew(state)
        after: LSTMState = []
        for index, (layer, (h, c)) in enumerate(zip(self.layers, state, strict=True)):
            if index and self.training:
                hidden = locked_dropout(hidden, config.hidden_dropout, time_dim=0)
            hidden, (last_h, last_c) = layer(hidden, (h.to(hidden.dtype), c.to(hidden.dtype)))  # (T, B, width)
            after.append((last_h.detach().to(h.dtype), last_c.detach().to(c.dtype)))
        return hidden.transpose(0, 1), after  # (B, T, output_dim)

    def step(self, x: Tensor, state: LSTMState) -> tuple[Tensor, LSTMState]:
        """One position, (B, 1, input_dim), as ``forward`` in evaluation; see ``ContextModel``."""
        hidden, after = x[:, 0], []  # (B, input_dim)
        for layer, (h, c) in zip(self.layers, state, strict=True):
            hidden, cell = torch.lstm_cell(hidden, (h[0], c[0]), *layer.all_weights[0])  # (B, width) each
            after.append((hidden[None], cell[None]))
        return hidden[:, None], after

    def state_tensors(self) -> dict[str, int]:
        return {f"{name}_{layer}": 1 for layer in range(len(self.layers)) for name in ("hidden", "cell")}

    def describe(self) -> str:
        return f"an LSTM of {len(self.layers)} layer{'s' if len(self.layers) > 1 else ''}"

    def _begin_some_anew(self, state: LSTMState) -> LSTMState:
        """A model trained only on carried states may do badly from an empty one, where evaluation begins."""
        if not self.config.state_dropout:
            return state
        first = state[0][0]
        begins = torch.rand(first.shape[1], 1, device=first.device) < self.config.state_dropout  # (B, 1)
        return [(h.masked_fill(begins, 0), c.masked_fill(begins, 0)) for h, c in state]
