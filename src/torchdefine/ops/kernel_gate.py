"""Whether Triton kernels run where a tensor lies; the only question that the rest of the library asks about them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

OLDEST_CAPABILITY = 8  # bfloat16, and what Triton still compiles for


def kernels_run(like: Tensor) -> bool:
    """Whether kernels take tensors like this one. Under torch.compile they do not: it makes its own."""
    if not like.is_cuda or torch.compiler.is_compiling():
        return False
    return like.device.index == torch.cuda.current_device() and _kernels_on(like.device)  # Triton starts them there


@lru_cache(maxsize=16)
def _kernels_on(device: torch.device) -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.get_device_properties(device).major >= OLDEST_CAPABILITY
