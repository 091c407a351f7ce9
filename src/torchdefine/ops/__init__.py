"""Operations on tensors that torch does not have in this form."""

from torchdefine.ops.cudnn_lstm import cudnn_lstm
from torchdefine.ops.locked_dropout import locked_dropout
from torchdefine.ops.padded_weights import padded_inward, padded_outward
from torchdefine.ops.persistent_lstm import has_kernel, persistent_lstm
from torchdefine.ops.relative_attention import Scoring, has_attention_kernel, relative_attention

__all__ = [
    "Scoring",
    "cudnn_lstm",
    "has_attention_kernel",
    "has_kernel",
    "locked_dropout",
    "padded_inward",
    "padded_outward",
    "persistent_lstm",
    "relative_attention",
]
