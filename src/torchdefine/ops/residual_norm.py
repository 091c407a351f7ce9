"""A residual connection with its dropout and layer norm as one operation, and its gradient as another.

Under autocast torch adds, drops out, normalises and converts one after another, with tensors written and read between
them. Here x + dropout(update) and its norm are made in one pass, the norm in full precision and in the dtype of the
products that read it. Backward makes, in one pass, the gradients of x and of the update, and sums for the weights.

What kernels do exists in plain torch as well (`forward_rows`, `backward_rows`), with the same numbers.
Shapes: N rows of d features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchdefine.ops.dropout_mask import Kept, kept_features
from torchdefine.ops.dtypes import autocast_dtype, exact_dtype
from torchdefine.ops.kernel_gate import Impl, by_kernel, kernels_run

WIDEST = 4096
HALF = (torch.float16, torch.bfloat16)


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
    past, read = _ResidualNorm.apply(x, update, norm.weight, norm.bias, update_bias, *kept, norm.eps, pre, by_kernels)
    return past, read


class Given(NamedTuple):
    """What is added up."""

    x: Tensor  # (N, d)
    update: Tensor  # (N, d)
    update_bias: Tensor | None  # (d,)
    kept: Kept


class Statistics(NamedTuple):
    """What backward needs of a norm."""

    total: Tensor  # (N, d): what was normalised
    mean: Tensor  # (N,)
    scale: Tensor  # (N,): one over the standard deviation


class Incoming(NamedTuple):
    """The gradients of both outputs, of which one may be missing: N rows of d features, in any shape (…, d)."""

    past: Tensor | None
    read: Tensor | None


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        update: Tensor,
        weight: Tensor,
        bias: Tensor,
        update_bias: Tensor | None,
        kept_by: Tensor | None,
        share: float,
        eps: float,
        pre: bool,
        by_kernels: bool,
    ) -> tuple[Tensor, Tensor]:
        width, shape = x.shape[-1], x.shape
        x, update = x.reshape(-1, width).contiguous(), update.reshape(-1, width).contiguous()
        exact = exact_dtype(x)
        statistics = Statistics(
            torch.empty_like(x, dtype=exact), x.new_empty(len(x), dtype=exact), x.new_empty(len(x), dtype=exact)
        )
        normed, read = None if pre else torch.empty_like(statistics.total), torch.empty_like(update)
        given = Given(x, update, update_bias, Kept(kept_by, share))
        _rows(by_kernels)[0](given, weight, bias, eps, statistics, normed, read)
        ctx.save_for_backward(*statistics, weight, kept_by)
        ctx.share, ctx.pre, ctx.has_update_bias = share, pre, update_bias is not None
        ctx.dtypes, ctx.by_kernels = (x.dtype, update.dtype), by_kernels  # kernels read a seed, torch a mask
        ctx.set_materialize_grads(False)
        return (statistics.total if normed is None else normed).view(shape), read.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_past: Tensor | None, grad_read: Tensor | None) -> tuple[Tensor | None, ...]:
        some = grad_past if grad_read is None else grad_read
        if some is None:
            return (None,) * 10
        *saved, weight, kept_by = ctx.saved_tensors
        statistics, shape = Statistics(*saved), some.shape
        incoming = Incoming(grad_past, grad_read)
        grad_x, grad_update = (torch.empty_like(statistics.total, dtype=dtype) for dtype in ctx.dtypes)
        sums = _rows(ctx.by_kernels)[1](
            incoming, statistics, weight, Kept(kept_by, ctx.share), ctx.pre, grad_x, grad_update
        )  # (3, d)
        of_weight, of_bias, of_update = sums.to(weight.dtype).unbind()
        return (
            grad_x.view(shape),
            grad_update.view(shape),
            of_weight,
            of_bias,
            of_update if ctx.has_update_bias else None,
            *(None,) * 5,
        )


def _rows(by_kernels: bool) -> tuple[Any, Any]:
    if not by_kernels:
        return forward_rows, backward_rows
    from torchdefine.ops import residual_norm_kernels

    return residual_norm_kernels.forward_rows, residual_norm_kernels.backward_rows


def forward_rows(
    given: Given,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    statistics: Statistics,
    normed: Tensor | None,
    read: Tensor,
) -> None:
    """Fill the statistics, ``read`` and, if there is one, ``normed``; all (N, d)."""
    total, mean, scale = statistics
    update = given.update.to(total.dtype)
    update = update if given.update_bias is None else update + given.update_bias
    mask, share = given.kept
    dropped = update / share if mask is None else update * mask / share
    total.copy_(given.x.to(total.dtype) + dropped)
    mean.copy_(total.mean(1))
    centred = total - mean[:, None]
    scale.copy_((centred.square().mean(1) + eps).rsqrt())
    result = centred * scale[:, None] * weight + bias
    read.copy_(result)
    if normed is not None:
        normed.copy_(result)


def backward_rows(
    incoming: Incoming,
    statistics: Statistics,
    weight: Tensor,
    kept: Kept,
    pre: bool,
    grad_x: Tensor,
    grad_update: Tensor,
) -> Tensor:
    """Fill ``grad_x`` and ``grad_update`` (N, d); returns sums over rows for weight, bias and update, (3, d)."""
    total, mean, scale = statistics
    to_norm = torch.zeros_like(total)
    for gradient in (incoming.read, None if pre else incoming.past):
        if gradient is not None:
            to_norm += gradient.reshape(total.shape)
    hat = (total - mean[:, None]) * scale[:, None]
    weighted = to_norm * weight
    through = weighted - weighted.mean(1, keepdim=True) - hat * (weighted * hat).mean(1, keepdim=True)
    grad_total = through * scale[:, None]
    if pre and incoming.past is not None:
        grad_total += incoming.past.reshape(total.shape)
    grad_x.copy_(grad_total)
    dropped = grad_total / kept.share
    dropped = dropped if kept.by is None else dropped * kept.by
    grad_update.copy_(dropped)
    return torch.stack(((to_norm * hat).sum(0), to_norm.sum(0), dropped.sum(0)))
