"""Which features dropout keeps: a mask that torch draws, or the seed of one that kernels draw for themselves.

Either comes from torch's generator, on the device: seeds make runs repeatable, and a recorded step draws anew whenever
it is replayed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BITS = 16
"""Random bits a kernel draws per feature."""


class Kept(NamedTuple):
    by: Tensor | None
    """True for each feature that is kept, (N, d), or for kernels a seed, (1,); None if all are kept."""
    share: float
    """The share of features kept, on average; kept features are divided by it."""


def kept_features(like: Tensor, p: float, by_kernels: bool) -> Kept:
    """Drop the share ``p`` of (…, d) features. Kernels drop the nearest share that their bits can tell apart."""
    if not by_kernels:
        return Kept(dropout_mask(like.reshape(-1, like.shape[-1]), p), 1 - p)
    dropped = min(round(p * 2**BITS), 2**BITS - 1)
    if dropped == 0:
        return Kept(None, 1.0)
    return Kept(torch.empty(1, dtype=torch.int64, device=like.device).random_(), 1 - dropped / 2**BITS)


def dropout_mask(like: Tensor, p: float) -> Tensor | None:
    """True for the share 1 - p of the features that are kept; None if all are. One byte each."""
    if p == 0:
        return None
    return torch.empty(like.shape, dtype=torch.bool, device=like.device).bernoulli_(1 - p)
