"""Vectors → vectors in context."""

from torchdefine.config import Kinds
from torchdefine.context.lstm import LSTM, LSTMConfig, LSTMState
from torchdefine.context.transformer import DecoderState, Transformer, TransformerConfig
from torchdefine.context.transformer_xl import TransformerXL, TransformerXLConfig, TransformerXLState

CONTEXTS = Kinds("context model", LSTMConfig, TransformerXLConfig)

__all__ = [
    "CONTEXTS",
    "LSTM",
    "DecoderState",
    "LSTMConfig",
    "LSTMState",
    "Transformer",
    "TransformerConfig",
    "TransformerXL",
    "TransformerXLConfig",
    "TransformerXLState",
]
