"""Whether Triton kernels run where a tensor lies, and how to do without them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

log = logging.getLogger(__name__)

OLDEST_CAPABILITY = 8  # has bfloat16, and Triton still compiles for it

Impl = Literal["auto", "kernel", "torch"]
"""How an operation runs: as a kernel where one takes the tensors, as one in any case, or in plain torch."""

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_allowed = True


@contextmanager
def plain_torch() -> Iterator[None]:
    """Within it, in every thread, operations run in plain torch: to compare with that, or to find a fault."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


def kernels_allowed() -> bool:
    """Whether kernels may run at all. Under torch.compile they may not: it generates its own."""
    return _allowed and not torch.compiler.is_compiling()


def only_values(*tensors: Tensor | None) -> bool:
    """Whether nothing but values is asked of operations on these: no gradient, and nobody follows what is done.

    Then they may run by ways that autograd, autocast, compilers, exporters and torch.func know nothing of.
    """
    if _is_followed():
        return False
    learning = torch.is_grad_enabled()
    for tensor in tensors:  # a few microseconds of Python are as long as a look-up
        if tensor is not None and (type(tensor) not in _PLAIN or (learning and tensor.requires_grad)):
            return False
    return True


def only_gradients(*tensors: Tensor) -> bool:
    """The same, but autograd may ask for gradients, in reverse."""
    if _is_followed() or forward_ad._current_level >= 0:
        return False
    return all(type(tensor) in _PLAIN for tensor in tensors)


def _is_followed() -> bool:
    if not _allowed or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    if torch._C._get_tracing_state() is not None:
        return True
    return torch._C._functorch.maybe_current_level() is not None or torch.is_autocast_enabled("cpu")


def by_kernel(impl: Impl, like: Tensor) -> bool:
    """Whether an operation on tensors like this one runs as a kernel; there are none for float64."""
    return kernels_run(like) and like.dtype != torch.float64 if impl == "auto" else impl == "kernel"


def kernels_run(like: Tensor) -> bool:
    """Whether kernels take tensors like this one, which must be on the current GPU: Triton starts them there."""
    if not like.is_cuda or not kernels_allowed():
        return False
    return like.device.index == torch.cuda.current_device() and gpu_takes_kernels(like.device)


@lru_cache(maxsize=16)
def gpu_takes_kernels(device: torch.device) -> bool:
    """Whether a device runs our kernels; tried once with the smallest one, and logged if it fails."""
    try:
        facts = torch.cuda.get_device_properties(device)
        if facts.major < OLDEST_CAPABILITY:
            raise RuntimeError(f"{facts.name} is older than compute capability {OLDEST_CAPABILITY}.0")
        from torchdefine.ops import padding_kernels

        weight = torch.zeros(4, 1, device=device)
        with torch.cuda.device_of(weight):
            padding_kernels.pad(weight, weight[:1], 8, torch.float16)
    except Exception as error:  # no compiler, for example; training goes on in any case
        reason = "Triton is not installed" if isinstance(error, ImportError) else error
        effect = "Torch's own operations replace our kernels, so half precision is slower"
        log.warning("%s: %s.", effect, reason)
        return False
    return True
