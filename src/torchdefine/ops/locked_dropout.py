"""Dropout whose mask stays the same for all positions of a segment, also called variational."""

from __future__ import annotations

import torch
from torch import Tensor


def locked_dropout(x: Tensor, p: float, time_dim: int) -> Tensor:
    """Zero a share ``p`` of the features of every row, the same ones at every position along ``time_dim``."""
    if p == 0:
        return x
    shape = list(x.shape)
    shape[time_dim] = 1
    kept = torch.empty(shape, device=x.device, dtype=x.dtype).bernoulli_(1 - p)
    return x * (kept / (1 - p))
