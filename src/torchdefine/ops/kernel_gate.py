"""Whether Triton kernels run where a tensor lies, and how to do without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

OLDEST_CAPABILITY = 8  # bfloat16, and what Triton still compiles for

_allowed = True


@contextmanager
def plain_torch() -> Iterator[None]:
    """Within it no kernel of ours runs, in no thread: to compare with torch's own operations, or to find a fault."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


def kernels_allowed() -> bool:
    """Whether kernels may run at all. Under torch.compile they may not: it makes its own."""
    return _allowed and not torch.compiler.is_compiling()


def kernels_run(like: Tensor) -> bool:
    """Whether kernels take tensors like this one."""
    if not like.is_cuda or not kernels_allowed():
        return False
    return like.device.index == torch.cuda.current_device() and _kernels_on(like.device)  # Triton starts them there


@lru_cache(maxsize=16)
def _kernels_on(device: torch.device) -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.get_device_properties(device).major >= OLDEST_CAPABILITY
