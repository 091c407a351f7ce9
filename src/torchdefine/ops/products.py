"""A linear layer for each group of features; on a CPU by oneDNN, in training too.

torch takes MKL for float32, which leaves half of some processors unused, and oneDNN only when it compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchdefine.ops.kernel_gate import only_gradients, only_values

_onednn: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
FEWEST_PRODUCTS = 1 << 20
"""oneDNN takes some ten microseconds to begin."""
FEWEST_TO_LEARN = 1 << 23
MANY_TOKENS = 1024
"""In training it pays where there are so many products, or so many tokens: smaller steps stay bit for bit torch's."""
NARROW = 64
"""Groups that are together no wider are multiplied as one matrix with zeros, since each would leave registers empty."""


def group_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, gain: float = 1.0) -> Tensor:
    """(…, g · a), (g, a, w) and (g · w,) → (…, g · w): group i by matrix i, all of it times ``gain``."""
    groups, entering, leaving = weight.shape
    tokens = x.numel() // (groups * entering)
    if gain != 1.0:
        few = type(tokens) is int and tokens < entering  # fewer numbers than the weight has
        if few and x.is_cpu and only_values(x, weight, bias):
            return group_linear(x, weight, bias).mul_(gain)
        weight, bias = weight * gain, None if bias is None else bias * gain
    learners = (x, weight) if bias is None else (x, weight, bias)
    learns = torch.is_grad_enabled() and any(one.requires_grad for one in learners)
    known = type(tokens) is int  # and no symbol, of which an exporter would keep what is asked
    pays = known and (not learns or tokens >= MANY_TOKENS or tokens * weight.numel() >= FEWEST_TO_LEARN)
    takes = pays and x.is_cpu and x.dtype is weight.dtype is torch.float32 and _large(tokens, weight)
    if takes and only_gradients(*learners):
        rows = x.reshape(tokens, groups * entering)
        y = _ByOneDNN.apply(rows, weight, bias) if learns else _by_onednn(rows, weight, bias)
        return y.view(*x.shape[:-1], groups * leaving)
    if groups == 1:
        y = x @ weight[0]  # (…, w)
    else:
        chunks = x.reshape(-1, groups, entering).transpose(0, 1)  # (g, T, a)
        y = torch.bmm(chunks, weight).transpose(0, 1)  # (T, g, w)
        y = y.reshape(*x.shape[:-1], groups * leaving)
    return y if bias is None else y + bias


class _ByOneDNN(torch.autograd.Function):
    """(T, g · a) → (T, g · w) with gradients, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _by_onednn(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        return (
            _ByOneDNN.apply(gradient, weight.mT, None) if of_rows else None,
            _of_weight(rows, gradient, weight) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def _of_weight(rows: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """(T, g · a) and (T, g · w) → (g, a, w)."""
    groups = len(weight)
    if torch.is_grad_enabled() or _narrow(weight):  # differentiable, or too small to be turned for oneDNN
        chunks = gradient.unflatten(1, (groups, -1)).transpose(0, 1)  # (g, T, w)
        return torch.bmm(rows.unflatten(1, (groups, -1)).permute(1, 2, 0), chunks)
    pairs = zip(rows.chunk(groups, 1), gradient.chunk(groups, 1), strict=True)
    return torch.stack([_product(entered.T, left.contiguous().T) for entered, left in pairs])  # strides would be slow


def _by_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _narrow(weight):
        weight = torch.block_diag(*weight).unsqueeze(0)
    parts = [
        _product(chunk, matrix.T, own)  # (T, w)
        for chunk, matrix, own in zip(rows.chunk(len(weight), 1), weight, _each(bias, len(weight)), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """(…, a) times (a, w)."""
    if x.is_cpu and only_values(x, weight) and x.dtype is weight.dtype is torch.float32:
        rows = x.reshape(-1, len(weight))
        if _large(len(rows), weight.unsqueeze(0)):
            return _product(rows, weight.T).view(*x.shape[:-1], weight.shape[1])
    return x @ weight


def _product(rows: Tensor, turned: Tensor, bias: Tensor | None = None) -> Tensor:
    """(T, a) and (w, a) → (T, w)."""
    found: Tensor = _onednn(rows, turned, bias, "none", [], "")
    return found


def _large(tokens: int, weight: Tensor) -> bool:
    """Whether oneDNN is worth its beginning for (tokens, g · a) times (g, a, w), for each of its products."""
    groups, entering, leaving = weight.shape
    at_once = groups if _narrow(weight) else 1
    return _onednn is not None and tokens * entering * leaving * at_once**2 >= FEWEST_PRODUCTS


def _narrow(weight: Tensor) -> bool:
    """Whether all groups are multiplied at once."""
    groups, entering, leaving = weight.shape
    return groups > 1 and groups * min(entering, leaving) <= NARROW


def _each(bias: Tensor | None, groups: int) -> Sequence[Tensor | None]:
    return [None] * groups if bias is None else bias.chunk(groups)
