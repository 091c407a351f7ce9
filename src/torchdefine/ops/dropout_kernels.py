"""`relu_dropout` as Triton kernels, and the masks that kernels draw from a seed; none is ever stored."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchdefine.ops.dropout import BITS
from torchdefine.ops.sum_kernels import sum_rows

ROUNDS = tl.constexpr(7)
"""Philox rounds: the fewest that pass all of its authors' tests."""
TILE = {"tile_rows": 32, "tile_columns": 128, "num_warps": 8}
STRIP = {"strip": 128, "tile_rows": 8, "tile_columns": 128, "stages": 3, "num_warps": 4}
"""The rows that a backward program handles, the rows and columns of one tile, and how many tiles are in flight.

Tiles are small, so that all programs of a usual step run at the same time; two are loading while one is worked on.
"""


def dropped_steps(probability: float) -> int:
    """How many of the values that a feature's bits can take drop it, if ``probability`` is kept."""
    return round((1 - probability) * 2**BITS)


class ReluDropout(torch.autograd.Function):
    """Only the output is kept for backward: where it is above zero, the input was, and was kept by dropout."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor | None, seed: Tensor | None, probability: float) -> Tensor:
        z = z.contiguous()
        out, columns = torch.empty_like(z), z.shape[-1]
        rows = z.numel() // columns
        ctx.save_for_backward(out)
        ctx.probability, ctx.bias_dtype = probability, None if bias is None else bias.dtype
        kinds = {"biased": bias is not None, "masked": seed is not None}
        added, drawn_from = z if bias is None else bias, z if seed is None else seed  # z where nothing is read
        if rows:
            grid = (triton.cdiv(columns, TILE["tile_columns"]), triton.cdiv(rows, TILE["tile_rows"]))
            _relu_forward[grid](
                z, added, drawn_from, out, rows, columns, 1 / probability, dropped_steps(probability), **kinds, **TILE
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Strips of rows are summed on their own and then together, always in the same order."""
        (out,) = ctx.saved_tensors
        grad_z, columns, summed = torch.empty_like(out), out.shape[-1], ctx.bias_dtype is not None
        rows = out.numel() // columns
        strips = triton.cdiv(rows, STRIP["strip"])
        partial = torch.empty(strips if summed else 0, columns, dtype=torch.float32, device=out.device)
        if rows:
            _relu_backward[(triton.cdiv(columns, STRIP["tile_columns"]), strips)](
                gradient.contiguous(), out, grad_z, partial, rows, columns, 1 / ctx.probability, summed=summed, **STRIP
            )
        if not summed:
            return grad_z, None, None, None
        return grad_z, sum_rows(partial[None], partial.new_empty(1, columns))[0].to(ctx.bias_dtype), None, None


@triton.jit
def is_kept(seed, row, column, dropped):
    """(rows,) and (columns,) → whether each feature is kept, whichever tile it is part of.

    Eight neighbours in a row share the 128 bits that Philox computes from their place. The compiler sees this, and
    computes them once where one thread has all eight.
    """
    nothing = (tl.zeros_like(row)[:, None] + tl.zeros_like(column)[None, :]).to(tl.uint32)  # (rows, columns)
    eight = nothing + (column // 8).to(tl.uint32)[None, :]
    a, b, c, d = tl.philox(seed, eight, nothing + row.to(tl.uint32)[:, None], nothing, nothing, ROUNDS)
    which = (column % 8)[None, :]
    word = tl.where(which < 4, tl.where(which < 2, a, b), tl.where(which < 6, c, d))
    bits = tl.where(which % 2 == 0, word & 0xFFFF, word >> 16)
    return bits.to(tl.int32) >= dropped


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
