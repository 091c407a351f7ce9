"""A residual connection with its dropout and layer norm as one operation, and its gradient as another.

Under autocast torch adds, drops out, normalises and converts one after another, with tensors written and read between
them. Here x + dropout(update) and its norm are made in one pass, the norm in full precision and in the dtype of the
products that read it. Backward makes, in one pass, the gradients of x and of the update, and sums for the weights.

What kernels do exists in plain torch as well (`plain_residual_norm`), with the same numbers up to rounding.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.ops.dropout import Kept, kept_features
from torchdefine.ops.dtypes import HALF, autocast_dtype, exact_dtype
from torchdefine.ops.kernel_gate import Impl, by_kernel, kernels_run

WIDEST = 4096


def has_fused_kernels(x: Tensor) -> bool:
    """Whether the operations around the products run as kernels for vectors like ``x``: autocast on a newer GPU."""
    return kernels_run(x) and autocast_dtype(x) in HALF and x.shape[-1] <= WIDEST


def residual_norm(
    x: Tensor,
    update: Tensor,
    norm: nn.LayerNorm,
    dropout: float = 0.0,
    *,
    pre: bool = False,
    update_bias: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Returns the residual stream in full precision and the next sub-layer's input in the update's dtype.

    Both are LayerNorm(x + dropout(update + update_bias)); with ``pre``, they are the sum and its norm.

    Args:
        x: (…, d), of any dtype.
        update: (…, d), in the dtype of the products.
        norm: a norm over the last dimension, with weight and bias.
        update_bias: (d,), the bias of the product that made the update; adding it here, and its gradient, is free.
    """
    by_kernels = by_kernel(impl, x)
    kept = kept_features(update, dropout, by_kernels)
    if not by_kernels:
        return plain_residual_norm(x, update, norm, pre, update_bias, kept)
    from torchdefine.ops.residual_norm_kernels import ResidualNorm

    return ResidualNorm.apply(x, update, norm.weight, norm.bias, update_bias, *kept, norm.eps, pre)


def plain_residual_norm(
    x: Tensor, update: Tensor, norm: nn.LayerNorm, pre: bool, update_bias: Tensor | None, kept: Kept
) -> tuple[Tensor, Tensor]:
    exact = exact_dtype(x)
    added = update.to(exact) if update_bias is None else update.to(exact) + update_bias
    added = added / kept.probability if kept.by is None else added * kept.by.view(x.shape) / kept.probability
    total = x.to(exact) + added
    normed = F.layer_norm(total, total.shape[-1:], norm.weight.to(exact), norm.bias.to(exact), norm.eps)
    return total if pre else normed, normed.to(update.dtype)
