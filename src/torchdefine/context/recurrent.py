"""What stacks of recurrent layers share: their dropouts, which are locked, and the state they carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.config import MOST_DEEP, MOST_WIDE, Config, rate, setting
from torchdefine.ops import locked_dropout

LayerState = tuple[Tensor, ...]
"""What one layer carries, each (n, B, width)."""
RecurrentState = list[LayerState]
"""What every layer carries."""


@dataclass(frozen=True)
class RecurrentConfig(Config):
    """Stacked recurrent layers. Every dropout has one mask for all positions of a segment."""

    kind: str = ""
    layers: int = setting(1, "Number of layers.", at_least=1, at_most=MOST_DEEP)
    hidden_dim: int = setting(
        256, "Width of every layer but the last; output_dim is that of the last.", at_least=1, at_most=MOST_WIDE
    )
    output_dim: int | None = setting(
        None,
        "Width of the last layer; by default hidden_dim, or map_dim if the output is tied.",
        at_least=1,
        at_most=MOST_WIDE,
    )
    input_dropout: float = rate("Dropout rate of the inputs of the first layer.")
    hidden_dropout: float = rate("Dropout rate between the layers.")
    state_dropout: float = rate("Fraction of streams whose state is reset at the start of a training segment.")


class RecurrentStack(nn.Module):
    """(B, T, input_dim) → (B, T, output_dim); the last layer is ``output_dim`` wide, the others ``hidden_dim``."""

    reads_by_position = True
    """Vectors that lie in memory position by position, all rows of the first one first, are not copied."""
    step_length = 1
    noun: str
    """What it is called in descriptions."""

    def __init__(
        self,
        input_dim: int,
        config: RecurrentConfig,
        output_dim: int | None,
        layer: Callable[[int, int, int], nn.Module],
    ) -> None:
        """``layer`` makes a layer, (T, B, input) → (T, B, output), of both widths and its index.

        Its ``carried()`` names the parts of its state, each with its n and width. ``step`` takes one position,
        (B, input) → (B, output), in evaluation and by operations that can be exported.
        """
        super().__init__()
        self.config = config
        self.input_dim = input_dim
        self.output_dim = output_dim or config.output_dim or config.hidden_dim
        widths = [input_dim, *[config.hidden_dim] * (config.layers - 1), self.output_dim]
        self.layers: Any = nn.ModuleList(layer(a, b, index) for index, (a, b) in enumerate(pairwise(widths)))

    def initial_state(self, batch_size: int) -> RecurrentState:
        zeros = next(self.parameters()).new_zeros
        return [tuple(zeros(n, batch_size, width) for n, width in one.carried().values()) for one in self.layers]

    def forward(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """The outputs, and the state after the last position, cut off from the graph."""
        config, hidden = self.config, x.transpose(0, 1)  # (T, B, input_dim), the layout of cuDNN
        if self.training:
            hidden = locked_dropout(hidden, config.input_dropout, time_dim=0)
            state = self._begin_some_anew(state)
        after: RecurrentState = []
        for index, (layer, before) in enumerate(zip(self.layers, state, strict=True)):
            if index and self.training:
                hidden = locked_dropout(hidden, config.hidden_dropout, time_dim=0)
            hidden, last = layer(hidden, tuple(part.to(hidden.dtype) for part in before))  # (T, B, width)
            after.append(tuple(new.detach().to(old.dtype) for new, old in zip(last, before, strict=True)))
        return hidden.transpose(0, 1), after  # (B, T, output_dim)

    def step(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """One position, (B, 1, input_dim), as ``forward`` in evaluation; see ``ContextModel``."""
        hidden, after = x[:, 0], []  # (B, input_dim)
        for layer, before in zip(self.layers, state, strict=True):
            hidden, last = layer.step(hidden, before)  # (B, width)
            after.append(last)
        return hidden[:, None], after

    def state_tensors(self) -> dict[str, int]:
        return {f"{name}_{index}": 1 for index, layer in enumerate(self.layers) for name in layer.carried()}

    def describe(self) -> str:
        return f"{self.noun} of {len(self.layers)} layer{'s' if len(self.layers) > 1 else ''}"

    def _begin_some_anew(self, state: RecurrentState) -> RecurrentState:
        """A model trained only on carried states may do badly from an empty one, where evaluation begins."""
        if not self.config.state_dropout:
            return state
        first = state[0][0]
        begins = torch.rand(first.shape[1], 1, device=first.device) < self.config.state_dropout  # (B, 1)
        return [tuple([part.masked_fill(begins, 0) for part in one]) for one in state]
