"""Which dtype each operation computes in."""

from __future__ import annotations

import torch
from torch import Tensor


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
