"""Stacked LSTM layers with variational dropout and carried state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.config import rate
from torchdefine.context.recurrent import LayerState, RecurrentConfig, RecurrentStack
from torchdefine.ops import has_kernel, lstm


@dataclass(frozen=True)
class LSTMConfig(RecurrentConfig):
    """Stacked LSTM layers. Every dropout has one mask for all positions of a segment."""

    kind: str = "lstm"
    recurrent_dropout: float = rate("Dropout rate of the recurrent weights of every layer.")

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

    def carried(self) -> dict[str, tuple[int, int]]:
        return {"hidden": (1, self.hidden_size), "cell": (1, self.hidden_size)}

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

    def step(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        hidden, cell = torch.lstm_cell(x, (state[0][0], state[1][0]), *self.all_weights[0])  # (B, output) each
        return hidden, (hidden[None], cell[None])


class LSTM(RecurrentStack):
    """(B, T, input_dim) → (B, T, output_dim); the last layer is ``output_dim`` wide, the others ``hidden_dim``.

    Layers are separate single-layer LSTMs: dropout between them can hold one mask for all positions, and in half
    precision cuDNN runs single layers whose widths are multiples of 128 on its persistent kernels, 2–4 times faster.
    """

    noun = "an LSTM"

    def __init__(self, input_dim: int, config: LSTMConfig | None = None, output_dim: int | None = None) -> None:
        """``output_dim`` is the width of the last layer; by default as the settings say."""
        config = config or LSTMConfig()
        dropout = config.recurrent_dropout
        super().__init__(input_dim, config, output_dim, lambda a, b, _: LSTMLayer(a, b, dropout))
