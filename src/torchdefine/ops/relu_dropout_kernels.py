"""The two passes of `relu_dropout` as Triton kernels; see there for what they compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = {"tile_rows": 32, "tile_columns": 128, "num_warps": 8}
STRIP = {"strip": 128, "tile_rows": 16, "tile_columns": 128, "num_warps": 4}
"""Rows that a program of backward takes, and how many at once, by the columns that it takes."""


def forward_pass(z: Tensor, bias: Tensor | None, mask: Tensor | None, keep: float, out: Tensor) -> None:
    rows, columns = z.shape
    if z.numel():
        _forward[(triton.cdiv(columns, TILE["tile_columns"]), triton.cdiv(rows, TILE["tile_rows"]))](
            z,
            z if bias is None else bias,
            z if mask is None else mask,
            out,
            rows,
            columns,
            1 / keep,
            biased=bias is not None,
            masked=mask is not None,
            **TILE,
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
def _forward(
    z,  # (N, n)
    bias,  # (n,)
    mask,  # (N, n)
    out,  # (N, n)
    rows,
    columns,
    inverse_keep,
    biased: tl.constexpr,
    masked: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    row = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    given = tl.load(z + place, mask=there, other=0.0).to(tl.float32)
    if biased:
        given += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    passed = tl.where(given < 0, 0.0, given) * inverse_keep  # what is not a number stays so
    if masked:
        passed = tl.where(tl.load(mask + place, mask=there, other=0) != 0, passed, 0.0)
    tl.store(out + place, passed.to(out.dtype.element_ty), mask=there)


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
