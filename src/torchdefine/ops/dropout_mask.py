"""Which features dropout keeps, as a tensor of its own: drawn by torch, read by kernels and by plain torch alike."""

from __future__ import annotations

import torch
from torch import Tensor


def dropout_mask(like: Tensor, p: float) -> Tensor | None:
    """True for the share 1 - p of the features that are kept; None if all are. One byte each, from torch's generator,
    so that a recorded step draws new ones whenever it is replayed."""
    if p == 0:
        return None
    return torch.empty(like.shape, dtype=torch.bool, device=like.device).bernoulli_(1 - p)
