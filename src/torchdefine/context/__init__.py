"""Vectors → vectors in context."""

from torchdefine.context.lstm import LSTM, LSTMDropout, LSTMState
from torchdefine.context.model import ContextModel, State, SteppingModel
from torchdefine.context.transformer import DecoderState, Transformer, TransformerShape
from torchdefine.context.transformer_xl import LayerSizes, Reach, TransformerDropout, TransformerXL, TransformerXLState

__all__ = [
    "LSTM",
    "ContextModel",
    "DecoderState",
    "LSTMDropout",
    "LSTMState",
    "LayerSizes",
    "Reach",
    "State",
    "SteppingModel",
    "Transformer",
    "TransformerDropout",
    "TransformerShape",
    "TransformerXL",
    "TransformerXLState",
]
