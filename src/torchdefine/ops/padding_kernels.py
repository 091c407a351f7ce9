"""The padding of `padded_inward` and `padded_outward` and their gradients as Triton kernels.

Inward, there is one program for each head of each projection.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

COLUMNS = 128
WARPS = 8
ROWS = 8


class PaddedInward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, difference: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, difference)
        padded = pad(weight.contiguous(), difference.contiguous(), width, dtype)
        return padded.tensor_split((3 * len(difference) * width,))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_inward: Tensor, grad_distances: Tensor) -> tuple[Tensor | None, ...]:
        given = [tensor.contiguous() for tensor in (*ctx.saved_tensors, grad_inward, grad_distances)]
        weight, difference, *_ = given
        of_weight, of_difference = torch.empty_like(weight), torch.empty_like(difference)
        grid, sizes = _launch(weight, difference, len(grad_distances) // len(difference))
        _unpad[grid](*given, of_weight, of_difference, weight.shape[1], **sizes)
        return of_weight, of_difference, None, None


def pad(weight: Tensor, difference: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(4 · H · D, d) → (4 · H · P, d)."""
    padded = weight.new_empty(4 * len(difference) * width, weight.shape[1], dtype=dtype)
    grid, sizes = _launch(weight, difference, width)
    _pad[grid](weight, difference, padded, weight.shape[1], **sizes)
    return padded


def _launch(weight: Tensor, difference: Tensor, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    heads, head_dim = difference.shape
    sizes = {"heads": heads, "head_dim": head_dim, "width": width, "block": triton.next_power_of_2(width)}
    return (4 * heads, triton.cdiv(weight.shape[1], COLUMNS)), {**sizes, "columns": COLUMNS, "num_warps": WARPS}


class PaddedOutward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, heads: int, width: int, dtype: torch.dtype) -> Tensor:
        ctx.before = heads, weight.shape[1] // heads, weight.dtype
        return _with_width(weight.contiguous(), heads, width, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _with_width(gradient.contiguous(), *ctx.before), None, None, None


def _with_width(weight: Tensor, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """(d, H · D) → (d, H · P), or back: narrower heads get zeros behind them, wider ones are cut."""
    rows, columns = len(weight), heads * width
    changed = weight.new_empty(rows, columns, dtype=dtype)
    _change_width[(triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS))](
        weight, changed, rows, columns, weight.shape[1] // heads, width, tile_rows=ROWS, tile_columns=COLUMNS
    )
    return changed


@triton.jit
def _pad(
    weight,  # (4, H, D, d)
    difference,  # (H, D)
    padded,  # (4, H, P, d)
    dim,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    columns: tl.constexpr,
):
    part = tl.program_id(0)
    feature, column = tl.arange(0, block), tl.program_id(1) * columns + tl.arange(0, columns)
    real, there = feature < head_dim, (column < dim)[None, :]
    at = feature[:, None] * dim + column[None, :]
    values = tl.load(weight + part * head_dim * dim + at, mask=real[:, None] & there, other=0.0).to(tl.float32)
    if part >= 3 * heads:
        factor = tl.load(difference + (part - 3 * heads) * head_dim + feature, mask=real, other=0.0).to(tl.float32)
        spare = tl.sum(values * factor[:, None], 0)
        values = tl.where((feature == head_dim)[:, None], spare[None, :], values)
    tl.store(padded + part * width * dim + at, values, mask=(feature < width)[:, None] & there)


@triton.jit
def _unpad(
    weight,  # (4, H, D, d)
    difference,  # (H, D)
    grad_inward,  # (3, H, P, d)
    grad_distances,  # (H, P, d)
    grad_weight,  # (4, H, D, d)
    grad_difference,  # (H, D)
    dim,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    columns: tl.constexpr,
):
    part = tl.program_id(0)
    feature = tl.arange(0, block)
    real = feature < head_dim
    own = part * head_dim * dim + feature[:, None] * dim
    if part < 3 * heads:
        column = tl.program_id(1) * columns + tl.arange(0, columns)
        there = real[:, None] & (column < dim)[None, :]
        at = part * width * dim + feature[:, None] * dim + column[None, :]
        tl.store(grad_weight + own + column[None, :], tl.load(grad_inward + at, mask=there), mask=there)
    elif tl.program_id(1) == 0:  # one program has all columns, since it sums over them
        head = part - 3 * heads
        factor = tl.load(difference + head * head_dim + feature, mask=real, other=0.0).to(tl.float32)
        total = tl.zeros((block,), tl.float32)
        for start in range(0, dim, columns):
            column = start + tl.arange(0, columns)
            there = real[:, None] & (column < dim)[None, :]
            of_head = grad_distances + head * width * dim
            gradient = tl.load(of_head + feature[:, None] * dim + column[None, :], mask=there, other=0.0)
            spare = tl.load(of_head + head_dim * dim + column, mask=column < dim, other=0.0).to(tl.float32)
            values = tl.load(weight + own + column[None, :], mask=there, other=0.0).to(tl.float32)
            total += tl.sum(values * spare[None, :], 1)
            tl.store(
                grad_weight + own + column[None, :],
                gradient.to(tl.float32) + factor[:, None] * spare[None, :],
                mask=there,
            )
        tl.store(grad_difference + head * head_dim + feature, total, mask=real)


@triton.jit
def _change_width(
    weight,  # (d, H, before)
    changed,  # (d, H, after)
    rows,
    columns,
    before: tl.constexpr,
    after: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    row = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    head, feature = column // after, column % after
    at = (row * (columns // after * before))[:, None] + (head * before + feature)[None, :]
    values = tl.load(weight + at, mask=there & (feature < before)[None, :], other=0.0)
    tl.store(changed + row[:, None] * columns + column[None, :], values.to(changed.dtype.element_ty), mask=there)
