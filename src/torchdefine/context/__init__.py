"""Vectors → vectors in context."""

from torchdefine.context.lstm import LSTM, LSTMDropout, LSTMState
from torchdefine.context.transformer_xl import LayerSizes, Reach, TransformerDropout, TransformerXL, TransformerXLState

__all__ = [
    "LSTM",
    "LSTMDropout",
    "LSTMState",
    "LayerSizes",
    "Reach",
    "TransformerDropout",
    "TransformerXL",
    "TransformerXLState",
]
