"""Vectors → vectors in context."""

from torchdefine.context.lstm import LSTM, LSTMDropout, LSTMState

__all__ = ["LSTM", "LSTMDropout", "LSTMState"]
