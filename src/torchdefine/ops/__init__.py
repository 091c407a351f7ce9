"""Operations on tensors that torch does not have in this form."""

from torchdefine.ops.cudnn_lstm import cudnn_lstm
from torchdefine.ops.locked_dropout import locked_dropout

__all__ = ["cudnn_lstm", "locked_dropout"]
