"""Which dtype each operation computes in, and many tensors converted to one in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def exact_dtype(like: Tensor) -> torch.dtype:
    """The dtype of sums, statistics, losses and log-probabilities: float32, or float64 for float64."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def product_dtype(like: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is on, else that of ``like``."""
    return autocast_dtype(like) or like.dtype


def autocast_dtype(like: Tensor) -> torch.dtype | None:
    """The dtype autocast computes products in; None where it is off or does not apply, as for float64."""
    device = like.device.type
    if device == "meta" or like.dtype == torch.float64 or not torch.is_autocast_enabled(device):  # meta has no autocast
        return None
    return torch.get_autocast_dtype(device)


def converted(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The tensors in another dtype; autocast would convert them, and their gradients, one by one."""
    return _Converted.apply(dtype, *tensors)


class _Converted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return _copied(tensors, [dtype] * len(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_copied(gradients, ctx.dtypes)


def _copied(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    torch._foreach_copy_(copies, list(tensors))
    return tuple(copies)
