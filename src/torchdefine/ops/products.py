"""A linear layer for each group of features; on a CPU, in inference, by oneDNN.

torch takes MKL for float32, which leaves half of some processors unused, and oneDNN only when it compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchdefine.ops.kernel_gate import only_values

_onednn: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
FEWEST_PRODUCTS = 1 << 20
"""oneDNN takes some ten microseconds to begin."""


def group_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gain: float = 1.0) -> Tensor:
    """(…, g · a), (g, a, w) and (g · w,) → (…, g · w): group i by matrix i, all of it times ``gain``."""
    groups, entering, leaving = weight.shape
    only = x.device.type == "cpu" and only_values(x, weight, bias)
    tokens = x.numel() // (groups * entering)
    if gain != 1.0:
        if only and tokens < entering:  # fewer numbers than the weight has
            return group_linear(x, weight, bias).mul_(gain)
        weight, bias = weight * gain, None if bias is None else bias * gain
    if only and _large(tokens, weight[0]) and x.dtype is weight.dtype is torch.float32:
        rows, biases = x.reshape(tokens, groups, entering), _each(bias, groups)
        parts = [
            _onednn(rows[:, group], weight[group].T, biases[group], "none", [], "")  # (T, w)
            for group in range(groups)
        ]
        return (parts[0] if groups == 1 else torch.cat(parts, 1)).view(*x.shape[:-1], groups * leaving)
    if groups == 1:
        y = x @ weight[0]  # (…, w)
    else:
        chunks = x.reshape(-1, groups, entering).transpose(0, 1)  # (g, T, a)
        y = torch.bmm(chunks, weight).transpose(0, 1)  # (T, g, w)
        y = y.reshape(*x.shape[:-1], groups * leaving)
    return y if bias is None else y + bias


def product(x: Tensor, weight: Tensor) -> Tensor:
    """(…, a) times (a, w)."""
    if x.is_cpu and only_values(x, weight) and x.dtype is weight.dtype is torch.float32:
        rows = x.reshape(-1, len(weight))
        if _large(len(rows), weight):
            return _onednn(rows, weight.T, None, "none", [], "").view(*x.shape[:-1], weight.shape[1])
    return x @ weight


def _large(tokens: int, weight: Tensor) -> bool:
    """Whether oneDNN is worth its beginning for (tokens, a) times (a, w)."""
    return _onednn is not None and tokens * weight.numel() >= FEWEST_PRODUCTS


def _each(bias: Tensor | None, groups: int) -> Sequence[Tensor | None]:
    return [None] * groups if bias is None else bias.chunk(groups)
