"""Cross-entropy of a chunk of logits and its gradient, written over the logits where a kernel does it.

The kernel reads a row twice and writes it once, in the dtype of the products; torch, one operation after another, moves
several times as much. Statistics and losses are float32 in both (float64 for float64): the numbers are the same.

Shapes: t rows, V classes, P ≥ V columns. Columns after the classes pad rows to a length that suits matrix products;
they get no probability and no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdefine.ops.dtypes import exact_dtype
from torchdefine.ops.kernel_gate import Impl, by_kernel

SMALLEST_HIT = 1e-30
"""Far above where float32 begins to lose digits; nan fails the comparison too."""


class Classes(NamedTuple):
    """The targets of rows of logits, and how they are scored."""

    columns: Tensor
    """(t,) of the targets; any class where the row does not count."""
    counted: Tensor
    """(t,)"""
    number: int
    """V"""
    bias: Tensor | None = None
    """(P,): added to every row in full precision."""
    label_smoothing: float = 0.0


def softmax_loss(
    logits: Tensor, classes: Classes, with_gradient: bool, impl: Impl = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Losses (t,), zero where a row does not count, and if wanted their gradients for the logits, (t, P).

    The logits (t, P) are used up. Gradients of rows that do not count are finite and mean nothing.
    """
    if by_kernel(impl, logits):
        from torchdefine.ops import softmax_loss_kernels

        return softmax_loss_kernels.softmax_loss(logits, classes, with_gradient)
    exact, smoothing = exact_dtype(logits), classes.label_smoothing
    if classes.bias is not None:
        logits = logits.to(exact).add_(classes.bias)
    if classes.number < logits.shape[1]:
        logits[:, classes.number :] = -math.inf
    columns = classes.columns.unsqueeze(1)  # (t, 1)
    probabilities = torch.softmax(logits, dim=1, dtype=exact)  # (t, P)
    targets = logits.gather(1, columns).to(exact)  # (t, 1)
    normalisers = _normalisers(logits, probabilities, columns, targets)  # (t, 1)
    losses = (normalisers - targets).squeeze(1)
    if smoothing:
        mean = logits[:, : classes.number].mean(1, dtype=exact)
        losses = (1 - smoothing) * losses + smoothing * (normalisers.squeeze(1) - mean)
    losses = torch.where(classes.counted, losses, 0.0)
    if not with_gradient:
        return losses, None
    gradient = probabilities  # softmax less the smoothed target, written over what is not needed again
    if smoothing:
        gradient[:, : classes.number] -= smoothing / classes.number
    return losses, gradient.scatter_add_(1, columns, torch.full_like(columns, smoothing - 1, dtype=exact))


def _normalisers(logits: Tensor, probabilities: Tensor, columns: Tensor, targets: Tensor) -> Tensor:
    """log Σ exp of every row, (t, 1), from one logit and its probability, which must not be too small for a logarithm.

    The target's probability hardly ever is, which a CPU can check. The largest never is, but finding it takes two more
    passes.
    """
    if probabilities.device.type == "cpu" and not torch.compiler.is_compiling():
        hits = probabilities.gather(1, columns)  # (t, 1)
        if bool((hits > SMALLEST_HIT).all()):
            return targets - hits.log()
    return logits.amax(1, keepdim=True).to(probabilities.dtype) - probabilities.amax(1, keepdim=True).log()


def add_column_sums(total: Tensor, matrix: Tensor, weights: Tensor, impl: Impl = "auto") -> None:
    """Add Σ weights · rows to a total in full precision: (P,), (t, P) and (t,)."""
    if by_kernel(impl, matrix):
        from torchdefine.ops import softmax_loss_kernels

        softmax_loss_kernels.add_column_sums(total, matrix, weights)
    else:
        total.addmv_(matrix.T.to(total.dtype), weights.to(total.dtype))


def add_onto(total: Tensor, values: Tensor, impl: Impl = "auto") -> None:
    """total += values, of another dtype and both contiguous."""
    if by_kernel(impl, total):
        from torchdefine.ops import sum_kernels

        sum_kernels.add_onto(total, values)
    else:
        total += values


def taken_rows(rows: Tensor, places: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``rows`` (T, d) themselves, and ``rows.index_select(0, p)`` for each of the places.

    Left to autograd, each selection would fill a matrix of the size of ``rows`` with zeros and add it to the rest.
    """
    if not places:
        return (rows,)
    return _TakenRows.apply(rows, *places)


class _TakenRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *places: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*places)
        return rows.view_as(rows), *(rows.index_select(0, taken) for taken in places)

    @staticmethod
    def backward(ctx: Any, of_all: Tensor, *of_taken: Tensor) -> tuple[Tensor | None, ...]:
        total = of_all.clone()  # others may hold it too
        for taken, part in zip(ctx.saved_tensors, of_taken, strict=True):
            total.index_add_(0, taken, part)
        return (total, *(None for _ in of_taken))
