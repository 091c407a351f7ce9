"""Many tensors in another dtype in one launch; autocast would convert them, and their gradients, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def converted(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    copies: tuple[Tensor, ...] = _Converted.apply(dtype, *tensors)
    return copies


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
