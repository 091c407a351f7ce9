"""Operations on tensors that torch does not have in this form."""

from torchdefine.ops.converted import converted
from torchdefine.ops.dtypes import autocast_dtype, exact_dtype, product_dtype
from torchdefine.ops.group_stack import StackForm, StackLayer, group_stack
from torchdefine.ops.kernel_gate import Impl, plain_torch
from torchdefine.ops.locked_dropout import locked_dropout
from torchdefine.ops.lstm import lstm
from torchdefine.ops.padded_weights import padded_inward, padded_outward
from torchdefine.ops.persistent_lstm import has_kernel
from torchdefine.ops.relative_attention import Scoring, has_attention_kernel, relative_attention
from torchdefine.ops.relu_dropout import relu_dropout
from torchdefine.ops.residual_norm import has_fused_kernels, residual_norm
from torchdefine.ops.softmax_loss import add_column_sums, softmax_loss
from torchdefine.ops.taken_rows import taken_rows
