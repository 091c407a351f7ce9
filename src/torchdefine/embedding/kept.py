"""Values that follow from tensors alone, kept while these stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Kept:
    """A value made from tensors. It holds until one of them is written to or replaced."""

    def __init__(self) -> None:
        self._made: tuple[list[tuple[Tensor, int | None]], Any] | None = None

    def __reduce__(self) -> Any:
        return Kept, ()  # a copy has other tensors

    def of(self, make: Callable[[], Any], *tensors: Tensor) -> Any:
        """The value for these tensors as they are now; ``make`` is called only if they are not those of before."""
        if self._made is not None and len(self._made[0]) == len(tensors):
            for (before, version), now in zip(self._made[0], tensors, strict=True):
                if before is not now or (version is not None and version != now._version):
                    break
            else:
                return self._made[1]
        with torch.inference_mode(False):  # it outlives the context, and is then an ordinary tensor
            value = make()
        self._made = [(tensor, _version(tensor)) for tensor in tensors], value
        return value


def _version(tensor: Tensor) -> int | None:
    """How often it has been written to; nobody counts it for tensors of inference mode."""
    return None if tensor.is_inference() else tensor._version
