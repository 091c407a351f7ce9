"""Operations on tensors that torch does not have in this form."""

from torchdefine.ops.cudnn_lstm import cudnn_lstm
from torchdefine.ops.locked_dropout import locked_dropout
from torchdefine.ops.persistent_lstm import has_kernel, persistent_lstm

__all__ = ["cudnn_lstm", "has_kernel", "locked_dropout", "persistent_lstm"]
