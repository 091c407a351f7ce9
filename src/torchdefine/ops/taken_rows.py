"""Several row selections of one matrix whose gradients share a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def taken_rows(rows: Tensor, places: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``rows`` (T, d) themselves, and ``rows.index_select(0, p)`` for each of the places.

    Left to autograd, each selection would fill a matrix of the size of ``rows`` with zeros and add it to the rest.
    """
    if not places:
        return (rows,)
    given: tuple[Tensor, ...] = _TakenRows.apply(rows, *places)
    return given


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
