"""Vectors → vectors in context, and what a language model asks of a context model."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from torchdefine.config import Kinds
from torchdefine.context.lstm import LSTM, LSTMConfig
from torchdefine.context.qrnn import QRNN, QRNNConfig
from torchdefine.context.recurrent import RecurrentStack, RecurrentState
from torchdefine.context.sru import SRU, SRUConfig
from torchdefine.context.transformer import DecoderState, Transformer, TransformerConfig
from torchdefine.context.transformer_xl import TransformerXL, TransformerXLConfig, TransformerXLState

CONTEXTS = Kinds("context model", LSTMConfig, QRNNConfig, SRUConfig, TransformerXLConfig)
register_context = CONTEXTS.register

State = Any
"""What a context model carries from one segment to the next; tensors in lists, tuples or dicts."""


class ContextModel(Protocol):
    """Vectors → vectors in context."""

    input_dim: int
    output_dim: int

    def initial_state(self, batch_size: int) -> State:
        """The state at the start of a text; nothing of it is learned."""

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]: ...


class SteppingModel(ContextModel, Protocol):
    """A context model that continues a text fast and can be exported. It may offer ``step_notes``, for the card."""

    step_length: int | None
    """How many positions ``step`` takes; None: any number."""

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """What the model itself gives in evaluation, in operations of torch that can be traced and exported."""

    def state_tensors(self) -> dict[str, int]:
        """Names for the tensors of its state, in order; whole numbers among them must be smaller than the value."""


__all__ = [
    "CONTEXTS",
    "LSTM",
    "QRNN",
    "SRU",
    "ContextModel",
    "DecoderState",
    "LSTMConfig",
    "QRNNConfig",
    "RecurrentStack",
    "RecurrentState",
    "SRUConfig",
    "State",
    "SteppingModel",
    "Transformer",
    "TransformerConfig",
    "TransformerXL",
    "TransformerXLConfig",
    "TransformerXLState",
    "register_context",
]
