"""Dropout: locked over a segment, with masks that kernels draw for themselves, and after a ReLU.

What dropout keeps is a mask that torch draws, or the seed of one that kernels draw. Either comes from torch's
generator, on the device: seeds make runs repeatable, and a CUDA graph draws anew whenever it is replayed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchdefine.ops.dtypes import exact_dtype
from torchdefine.ops.kernel_gate import Impl, by_kernel

BITS = 16
"""Random bits a kernel draws per feature."""


def locked_dropout(x: Tensor, p: float, time_dim: int) -> Tensor:
    """Variational dropout: zero a fraction ``p`` of a row's features, the same at every position of ``time_dim``."""
    if p == 0:
        return x
    shape = list(x.shape)
    shape[time_dim] = 1
    kept = torch.empty(shape, device=x.device, dtype=x.dtype).bernoulli_(1 - p)
    return x * (kept / (1 - p))


class Kept(NamedTuple):
    by: Tensor | None
    """True for each feature that is kept, (N, d), or for kernels a seed, (1,); None if all are kept."""
    probability: float
    """The probability that a feature is kept; kept features are divided by it."""


def kept_features(like: Tensor, p: float, by_kernels: bool) -> Kept:
    """Drop (…, d) features with probability ``p``. Kernels use the nearest one that their bits can tell apart."""
    if not by_kernels:
        rows = like.reshape(-1, like.shape[-1])
        mask = torch.empty(rows.shape, dtype=torch.bool, device=like.device).bernoulli_(1 - p) if p else None
        return Kept(mask, 1 - p)
    dropped = min(round(p * 2**BITS), 2**BITS - 1)
    if dropped == 0:
        return Kept(None, 1.0)
    return Kept(torch.empty(1, dtype=torch.int64, device=like.device).random_(), 1 - dropped / 2**BITS)


def relu_dropout(z: Tensor, dropout: float = 0.0, bias: Tensor | None = None, impl: Impl = "auto") -> Tensor:
    """dropout(relu(z + bias)), (…, n), in the dtype of ``z``; as a kernel, the bias (n,) and its gradient are free."""
    by_kernels = by_kernel(impl, z)
    kept = kept_features(z, dropout, by_kernels)
    if not by_kernels:
        return plain_relu_dropout(z, bias, kept)
    from torchdefine.ops.dropout_kernels import ReluDropout

    return ReluDropout.apply(z, bias, *kept)


def plain_relu_dropout(z: Tensor, bias: Tensor | None, kept: Kept) -> Tensor:
    exact = z.to(exact_dtype(z))
    passed = (exact if bias is None else exact + bias).relu()
    dropped = passed / kept.probability if kept.by is None else passed * kept.by.view(z.shape) / kept.probability
    return dropped.to(z.dtype)
