"""In which dtype operations compute what."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_dtype(like: Tensor) -> torch.dtype:
    """That of sums, statistics, losses and log-probabilities: float32, or float64 for float64."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def product_dtype(like: Tensor) -> torch.dtype:
    """That of matrix products: autocast's where it is on, which leaves float64 as it is."""
    device = like.device.type
    if torch.is_autocast_enabled(device) and like.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return like.dtype
