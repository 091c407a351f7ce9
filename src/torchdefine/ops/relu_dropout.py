"""ReLU and dropout as one operation, whose gradient needs nothing but its output.

Where the output is above zero, the input was above zero and was kept. The output is stored anyway, for the product that
reads it, so neither the input nor a mask needs to be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchdefine.ops.dropout_mask import Kept, kept_features
from torchdefine.ops.dtypes import exact_dtype
from torchdefine.ops.kernel_gate import Impl, by_kernel


def relu_dropout(z: Tensor, dropout: float = 0.0, bias: Tensor | None = None, impl: Impl = "auto") -> Tensor:
    """dropout(relu(z + bias)), (…, n), in the dtype of ``z``; the bias (n,) and its gradient cost nothing here."""
    by_kernels = by_kernel(impl, z)
    result: Tensor = _ReluDropout.apply(z, bias, *kept_features(z, dropout, by_kernels), by_kernels)
    return result


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, bias: Tensor | None, kept_by: Tensor | None, share: float, by_kernels: bool
    ) -> Tensor:
        z, width = z.contiguous(), z.shape[-1]
        out = torch.empty_like(z)
        _passes(by_kernels)[0](z.view(-1, width), bias, Kept(kept_by, share), out.view(-1, width))
        ctx.save_for_backward(out)
        ctx.share, ctx.by_kernels, ctx.bias_dtype = share, by_kernels, None if bias is None else bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        width = out.shape[-1]
        grad_z = torch.empty_like(out)
        summed = ctx.bias_dtype is not None
        sums = _passes(ctx.by_kernels)[1](
            gradient.reshape(-1, width).contiguous(), out.view(-1, width), ctx.share, grad_z.view(-1, width), summed
        )
        return grad_z, None if sums is None else sums.to(ctx.bias_dtype), None, None, None


def _passes(by_kernels: bool) -> tuple[Any, Any]:
    if not by_kernels:
        return forward_pass, backward_pass
    from torchdefine.ops import relu_dropout_kernels

    return relu_dropout_kernels.forward_pass, relu_dropout_kernels.backward_pass


def forward_pass(z: Tensor, bias: Tensor | None, kept: Kept, out: Tensor) -> None:
    """Fill ``out`` (N, n)."""
    exact = z.to(exact_dtype(z))
    passed = (exact if bias is None else exact + bias).relu()
    out.copy_(passed / kept.share if kept.by is None else passed * kept.by / kept.share)


def backward_pass(gradient: Tensor, out: Tensor, share: float, grad_z: Tensor, summed: bool) -> Tensor | None:
    """Fill ``grad_z`` (N, n), and return its sums over rows (n,) in full precision if ``summed``."""
    through = torch.where(out > 0, gradient.to(exact_dtype(out)) / share, 0.0)
    grad_z.copy_(through)
    return through.sum(0) if summed else None
