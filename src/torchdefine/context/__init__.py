"""Vectors → vectors in context."""

from torchdefine.context.lstm import LSTM, LSTMDropout, LSTMState
from torchdefine.context.transformer import DecoderState, Transformer, TransformerShape

__all__ = ["LSTM", "DecoderState", "LSTMDropout", "LSTMState", "Transformer", "TransformerShape"]
