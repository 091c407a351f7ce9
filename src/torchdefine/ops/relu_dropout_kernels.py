"""The two passes of `relu_dropout` as Triton kernels; see there for what they compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchdefine.ops.dropout_kernels import dropped_steps, is_kept
from torchdefine.ops.dropout_mask import Kept
from torchdefine.ops.sum_kernels import sum_rows

TILE = {"tile_rows": 32, "tile_columns": 128, "num_warps": 8}
STRIP = {"strip": 128, "tile_rows": 8, "tile_columns": 128, "stages": 3, "num_warps": 4}
"""The rows that a backward program handles, the rows and columns of one tile, and how many tiles are in flight.

Tiles are small, so that all programs of a usual step run at the same time; two are loading while one is worked on.
"""


def forward_pass(z: Tensor, bias: Tensor | None, kept: Kept, out: Tensor) -> None:
    rows, columns = z.shape
    if z.numel():
        _relu_forward[(triton.cdiv(columns, TILE["tile_columns"]), triton.cdiv(rows, TILE["tile_rows"]))](
            z,
            z if bias is None else bias,
            z if kept.by is None else kept.by,
            out,
            rows,
            columns,
            1 / kept.share,
            dropped_steps(kept.share),
            biased=bias is not None,
            masked=kept.by is not None,
            **TILE,
        )


def backward_pass(gradient: Tensor, out: Tensor, share: float, grad_z: Tensor, summed: bool) -> Tensor | None:
    """Strips of rows are summed on their own and then together, always in the same order."""
    rows, columns = out.shape
    strips = triton.cdiv(rows, STRIP["strip"])
    partial = torch.empty(strips if summed else 0, columns, dtype=torch.float32, device=out.device)
    if out.numel():
        _relu_backward[(triton.cdiv(columns, STRIP["tile_columns"]), strips)](
            gradient, out, grad_z, partial, rows, columns, 1 / share, summed=summed, **STRIP
        )
    return sum_rows(partial[None], partial.new_empty(1, columns))[0] if summed else None


@triton.jit
def _relu_forward(
    z,  # (N, n)
    bias,  # (n,)
    seed,  # (1,)
    out,  # (N, n)
    rows,
    columns,
    inverse_share,
    dropped,
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
    passed = tl.where(given < 0, 0.0, given) * inverse_share  # nan stays nan
    if masked:
        passed = tl.where(is_kept(tl.load(seed), row, column, dropped), passed, 0.0)
    tl.store(out + place, passed.to(out.dtype.element_ty), mask=there)


@triton.jit
def _relu_backward(
    gradient,  # (N, n)
    out,  # (N, n)
    grad_z,  # (N, n)
    partial,  # (strips, n)
    rows,
    columns,
    inverse_share,
    summed: tl.constexpr,
    strip: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    stages: tl.constexpr,
):
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    first = tl.program_id(1) * strip
    sums = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in tl.range(first, tl.minimum(first + strip, rows), tile_rows, num_stages=stages):
        row = start + tl.arange(0, tile_rows)
        there = (row < rows)[:, None] & (column < columns)[None, :]
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        given = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
        passed = tl.load(out + place, mask=there, other=0.0).to(tl.float32) > 0
        through = tl.where(passed, given * inverse_share, 0.0)
        tl.store(grad_z + place, through.to(grad_z.dtype.element_ty), mask=there)
        if summed:
            sums += through
    if summed:
        tl.store(partial + tl.program_id(1) * columns + column, tl.sum(sums, 0), mask=column < columns)
