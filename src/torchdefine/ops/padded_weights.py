"""Attention weights with zeros where its heads are padded, made and cast to another dtype in one copy each.

The weights are padded rather than their outputs, which are larger. torch's own pad would fill, copy and cast in
separate passes, and the gradients would take as many.

Letters: H heads, D features of a head, P with padding, d features of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchdefine.ops.kernel_gate import kernels_run


def padded_inward(weight: Tensor, difference: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(4 · H · D, d) → (3 · H · P, d) to queries, keys and values, and (H · P, d) to distances.

    The first spare feature of a distance is the product of the others with ``difference`` (H, D).
    """
    padded: tuple[Tensor, Tensor] = _PaddedInward.apply(weight, difference, width, dtype)
    return padded


def padded_outward(weight: Tensor, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """(d, H · D) → (d, H · P)."""
    padded: Tensor = _PaddedOutward.apply(weight, heads, width, dtype)
    return padded


class _PaddedInward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, difference: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(weight, difference)
        with torch.autocast(weight.device.type, enabled=False):
            padded = _pads(weight)[0](weight.contiguous(), difference.contiguous(), width, dtype)
        return padded.tensor_split((3 * len(difference) * width,))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_inward: Tensor, grad_distances: Tensor) -> tuple[Tensor | None, ...]:
        given = (*ctx.saved_tensors, grad_inward, grad_distances)
        with torch.autocast(grad_inward.device.type, enabled=False):
            return *_pads(grad_inward)[1](*(tensor.contiguous() for tensor in given)), None, None


def _pads(like: Tensor) -> tuple[Any, Any]:
    if not like.is_cuda:
        return pad, unpad
    from torchdefine.ops import padding_kernels

    return padding_kernels.pad, padding_kernels.unpad


def pad(weight: Tensor, difference: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(4 · H · D, d) → (4 · H · P, d)."""
    heads, head_dim = difference.shape
    by_head = weight.view(4, heads, head_dim, -1)
    padded = weight.new_zeros(4, heads, width, weight.shape[1], dtype=dtype)
    padded[:, :, :head_dim] = by_head
    padded[3, :, head_dim] = torch.bmm(difference[:, None], by_head[3])[:, 0]
    return padded.flatten(0, 2)


def unpad(weight: Tensor, difference: Tensor, grad_inward: Tensor, grad_distances: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``weight`` and ``difference`` from those of the padded weights."""
    heads, head_dim = difference.shape
    gradient = torch.empty_like(weight).view(4, heads, head_dim, -1)
    gradient[:3] = grad_inward.view(3, heads, -1, weight.shape[1])[:, :, :head_dim]
    of_distances = grad_distances.view(heads, -1, weight.shape[1])  # (H, P, d)
    of_spare = of_distances[:, head_dim, None].to(weight.dtype)  # (H, 1, d)
    gradient[3] = of_distances[:, :head_dim] + difference[:, :, None] * of_spare
    of_difference = torch.bmm(weight.view_as(gradient)[3], of_spare.mT)[:, :, 0]  # (H, D)
    return gradient.view_as(weight), of_difference


class _PaddedOutward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, heads: int, width: int, dtype: torch.dtype) -> Tensor:
        ctx.heads, ctx.head_dim, ctx.dtype = heads, weight.shape[1] // heads, weight.dtype
        return _changes_width(weight)(weight.contiguous(), heads, width, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        changed = _changes_width(gradient)(gradient.contiguous(), ctx.heads, ctx.head_dim, ctx.dtype)
        return changed, None, None, None


def _changes_width(like: Tensor) -> Callable[[Tensor, int, int, torch.dtype], Tensor]:
    if not kernels_run(like):
        return change_width
    from torchdefine.ops import padding_kernels

    return padding_kernels.change_width


def change_width(weight: Tensor, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """(d, H · D) → (d, H · P), or back: narrower heads get zeros behind them, wider ones are cut."""
    by_head = weight.unflatten(1, (heads, -1))[:, :, :width]
    changed = weight.new_zeros(len(weight), heads, width, dtype=dtype)
    changed[:, :, : by_head.shape[2]] = by_head
    return changed.flatten(1)
