"""Sums that gradients are made of, as Triton kernels: over a few hundred rows, and onto a running total.

Every sum has an order that depends on shapes alone: the same inputs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS_AT_ONCE = 1024
TILE = 8192
"""Values that a program handles at once: enough that most sums take one turn, since they mostly wait for memory."""
VALUES_AT_ONCE = 2048


def sum_rows(parts: Tensor, totals: Tensor, *, onto: bool = False) -> Tensor:
    """Fill ``totals`` (G, n), of any dtype, with the sums of ``parts`` (G, R, n), or add these to them."""
    groups, rows, columns = parts.shape
    tile_rows = min(triton.next_power_of_2(max(rows, 1)), MOST_ROWS_AT_ONCE)
    tile_columns = min(TILE // tile_rows, 128)
    tile = {"tile_rows": tile_rows, "tile_columns": tile_columns, "num_warps": max(tile_rows * tile_columns // 1024, 1)}
    _sum_rows[(triton.cdiv(columns, tile_columns), groups)](parts, totals, rows, columns, onto=onto, **tile)
    return totals


def add_onto(total: Tensor, values: Tensor) -> None:
    """total += values, of the same shape and both contiguous; torch itself is slow where their dtypes differ."""
    _add_onto[(triton.cdiv(total.numel(), VALUES_AT_ONCE),)](
        total, values, total.numel(), at_once=VALUES_AT_ONCE, num_warps=8
    )


@triton.jit
def _sum_rows(
    parts,  # (G, R, n)
    totals,  # (G, n)
    rows,
    columns,
    onto: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    group = tl.program_id(1)
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    parts += group.to(tl.int64) * rows * columns
    sums = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(0, rows, tile_rows):
        row = start + tl.arange(0, tile_rows)
        there = (row < rows)[:, None] & (column < columns)[None, :]
        sums += tl.load(parts + row[:, None] * columns + column[None, :], mask=there, other=0.0)
    total = tl.sum(sums, 0)
    mine = totals + group * columns + column
    if onto:
        total += tl.load(mine, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(mine, total.to(totals.dtype.element_ty), mask=column < columns)


@triton.jit
def _add_onto(
    total,  # (n,)
    values,  # (n,)
    number,
    at_once: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * at_once + tl.arange(0, at_once)
    there = at < number
    added = tl.load(values + at, mask=there, other=0.0).to(tl.float32)
    before = tl.load(total + at, mask=there, other=0.0).to(tl.float32)
    tl.store(total + at, (before + added).to(total.dtype.element_ty), mask=there)
