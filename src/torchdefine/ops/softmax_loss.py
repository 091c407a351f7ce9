"""Cross-entropy of a chunk of logits and its gradient, written over the logits where a kernel does it.

The kernel reads a row twice and writes it once, in the dtype of the products; torch, one operation after another, moves
several times as much. Statistics and losses are float32 in both (float64 for float64): the numbers are the same.

Shapes: t rows, V classes, P ≥ V columns. Columns after the classes pad rows to a length that suits matrix products;
they get no probability and no gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

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
        from torchdefine.ops import softmax_kernels

        return softmax_kernels.softmax_loss(logits, classes, with_gradient)
    return plain_softmax_loss(logits, classes, with_gradient)


def add_column_sums(total: Tensor, matrix: Tensor, weights: Tensor, impl: Impl = "auto") -> None:
    """Add Σ weights · rows to a total in full precision: (P,), (t, P) and (t,)."""
    if by_kernel(impl, matrix):
        from torchdefine.ops import softmax_kernels

        softmax_kernels.add_column_sums(total, matrix, weights)
    else:
        plain_add_column_sums(total, matrix, weights)


def add_onto(total: Tensor, values: Tensor, impl: Impl = "auto") -> None:
    """total += values, of another dtype and both contiguous."""
    if by_kernel(impl, total):
        from torchdefine.ops import sum_kernels

        sum_kernels.add_onto(total, values)
    else:
        total += values


def plain_softmax_loss(logits: Tensor, classes: Classes, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The same in torch; the gradient has full precision."""
    exact = exact_dtype(logits)
    if classes.bias is not None:
        logits = logits.to(exact).add_(classes.bias)
    if classes.number < logits.shape[1]:
        logits[:, classes.number :] = -math.inf
    columns = classes.columns.unsqueeze(1)  # (t, 1)
    probabilities = torch.softmax(logits, dim=1, dtype=exact)  # (t, P)
    losses = _losses(logits, probabilities, columns, classes)
    gradient = _logit_gradient(probabilities, columns, classes) if with_gradient else None
    return torch.where(classes.counted, losses, 0.0), gradient


def _losses(logits: Tensor, probabilities: Tensor, columns: Tensor, classes: Classes) -> Tensor:
    """(t,)"""
    exact, smoothing = probabilities.dtype, classes.label_smoothing
    targets = logits.gather(1, columns).to(exact)  # (t, 1)
    normalisers = _normalisers(logits, probabilities, columns, targets)  # (t, 1)
    losses = (normalisers - targets).squeeze(1)
    if smoothing:
        mean = logits[:, : classes.number].mean(1, dtype=exact)
        losses = (1 - smoothing) * losses + smoothing * (normalisers.squeeze(1) - mean)
    return losses


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


def _logit_gradient(probabilities: Tensor, columns: Tensor, classes: Classes) -> Tensor:
    """Softmax less the smoothed target, written over the probabilities, which are not needed again."""
    gradient, smoothing = probabilities, classes.label_smoothing
    if smoothing:
        gradient[:, : classes.number] -= smoothing / classes.number
    hit = torch.full_like(columns, smoothing - 1, dtype=gradient.dtype)  # (t, 1)
    return gradient.scatter_add_(1, columns, hit)


def plain_add_column_sums(total: Tensor, matrix: Tensor, weights: Tensor) -> None:
    total.addmv_(matrix.T.to(total.dtype), weights.to(total.dtype))
