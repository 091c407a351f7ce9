"""Operations on tensors that torch does not have in this form."""

from torchdefine.ops.dropout import locked_dropout, relu_dropout
from torchdefine.ops.dtypes import autocast_dtype, converted, exact_dtype, product_dtype
from torchdefine.ops.group_stack import StackForm, StackLayer, group_stack
from torchdefine.ops.kernel_gate import Impl, only_values, plain_torch
from torchdefine.ops.light_recurrence import light_recurrence
from torchdefine.ops.lstm import has_kernel, lstm
from torchdefine.ops.products import group_linear, product
from torchdefine.ops.relative_attention import (
    Scoring,
    has_attention_kernel,
    padded_inward,
    padded_outward,
    relative_attention,
)
from torchdefine.ops.residual_norm import has_fused_kernels, residual_norm
from torchdefine.ops.softmax_loss import add_column_sums, add_onto, softmax_loss, taken_rows

__all__ = [
    "Impl",
    "Scoring",
    "StackForm",
    "StackLayer",
    "add_column_sums",
    "add_onto",
    "autocast_dtype",
    "converted",
    "exact_dtype",
    "group_linear",
    "group_stack",
    "has_attention_kernel",
    "has_fused_kernels",
    "has_kernel",
    "light_recurrence",
    "locked_dropout",
    "lstm",
    "only_values",
    "padded_inward",
    "padded_outward",
    "plain_torch",
    "product",
    "product_dtype",
    "relative_attention",
    "relu_dropout",
    "residual_norm",
    "softmax_loss",
    "taken_rows",
]
