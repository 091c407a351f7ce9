"""In which dtype operations compute what."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_dtype(like: Tensor) -> torch.dtype:
    """That of sums, statistics, losses and log-probabilities: float32, or float64 for float64."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def product_dtype(like: Tensor) -> torch.dtype:
    """That of matrix products: autocast's where it is on, or else their own."""
    return autocast_dtype(like) or like.dtype


def autocast_dtype(like: Tensor) -> torch.dtype | None:
    """That in which autocast has products computed; None where it is off or leaves them alone, as it does float64."""
    device = like.device.type
    if device == "meta" or like.dtype == torch.float64 or not torch.is_autocast_enabled(device):  # meta has no autocast
        return None
    return torch.get_autocast_dtype(device)
