"""Vectors → vectors in context."""

from torchdefine.config import Kinds
from torchdefine.context.lstm import LSTM, LSTMConfig, LSTMState
from torchdefine.context.model import ContextModel, State, SteppingModel
from torchdefine.context.transformer import DecoderState, Transformer, TransformerConfig
from torchdefine.context.transformer_xl import TransformerXL, TransformerXLConfig, TransformerXLState

CONTEXTS = Kinds("context model", LSTMConfig, TransformerXLConfig)
register_context = CONTEXTS.register
