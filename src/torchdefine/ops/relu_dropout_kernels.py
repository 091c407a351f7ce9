"""The two passes of `relu_dropout` as Triton kernels; see there for what they compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
STRIP = {"strip": 128, "tile_rows": 16, "tile_columns": 128, "num_warps": 4}
"""Rows that a program takes, and how many at once, by the columns that it takes."""


def forward_pass(z: Tensor, mask: Tensor | None, keep: float, out: Tensor) -> None:
    if z.numel():
        _forward[(triton.cdiv(z.numel(), BLOCK),)](
            z, z if mask is None else mask, out, z.numel(), 1 / keep, masked=mask is not None, block=BLOCK, num_warps=8
        )


def backward_pass(gradient: Tensor, out: Tensor, keep: float, grad_z: Tensor, summed: bool) -> Tensor | None:
    """Strips of rows are summed on their own and then together, always in the same order."""
    rows, columns = out.shape
    strips = triton.cdiv(rows, STRIP["strip"])
    partial = torch.empty(strips if summed else 0, columns, dtype=torch.float32, device=out.device)
    if out.numel():
        _backward[(triton.cdiv(columns, STRIP["tile_columns"]), strips)](
            gradient, out, grad_z, partial, rows, columns, 1 / keep, summed=summed, **STRIP
        )
    return partial.sum(0) if summed else None


@triton.jit
def _forward(z, mask, out, count, inverse_keep, masked: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = place < count
    given = tl.load(z + place, mask=there, other=0.0).to(tl.float32)
    kept = tl.where(given < 0, 0.0, given) * inverse_keep  # what is not a number stays so
    if masked:
        kept = tl.where(tl.load(mask + place, mask=there, other=0) != 0, kept, 0.0)
    tl.store(out + place, kept.to(out.dtype.element_ty), mask=there)


@triton.jit
def _backward(
    gradient,  # (N, n)
    out,  # (N, n)
    grad_z,  # (N, n)
    partial,  # (strips, n)
    rows,
    columns,
    inverse_keep,
    summed: tl.constexpr,
    strip: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    first = tl.program_id(1) * strip
    sums = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(first, tl.minimum(first + strip, rows), tile_rows):
        row = start + tl.arange(0, tile_rows)
        there = (row < rows)[:, None] & (column < columns)[None, :]
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        given = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
        passed = tl.load(out + place, mask=there, other=0.0).to(tl.float32) > 0
        through = tl.where(passed, given * inverse_keep, 0.0)
        tl.store(grad_z + place, through.to(grad_z.dtype.element_ty), mask=there)
        if summed:
            sums += through
    if summed:
        tl.store(partial + tl.program_id(1) * columns + column, tl.sum(sums, 0), mask=column < columns)
