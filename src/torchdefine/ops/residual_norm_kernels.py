"""The two passes of `residual_norm` as Triton kernels; see there for what they compute."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchdefine.ops.dropout_kernels import dropped_steps, is_kept
from torchdefine.ops.sum_kernels import sum_rows

TILE = 2048
"""Values of each tensor that a forward program handles at once."""
BACKWARD_TILE = 512
"""The same for backward: four for each thread, so that single and half precision lie in the same threads."""
STAGES = 3
"""Backward tiles that are worked on or loading; wide ones go one at a time, for lack of shared memory."""
MOST_PROGRAMS = 792
"""Backward programs, each of which sums the weights' gradients over its rows: six per multiprocessor of an H200."""


class ResidualNorm(torch.autograd.Function):
    """N rows of d features; for what is not given a kernel gets another tensor, which it does not read."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        update: Tensor,
        weight: Tensor,
        bias: Tensor,
        update_bias: Tensor | None,
        seed: Tensor | None,
        probability: float,
        eps: float,
        pre: bool,
    ) -> tuple[Tensor, Tensor]:
        x, update = x.contiguous(), update.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        total, read = torch.empty_like(x, dtype=torch.float32), torch.empty_like(update)
        normed, mean, scale = total if pre else torch.empty_like(total), total.new_empty(rows), total.new_empty(rows)
        kinds = {"biased": update_bias is not None, "masked": seed is not None, "exact_too": not pre}
        added, drawn_from = weight if update_bias is None else update_bias, x if seed is None else seed
        numbers, launch = (rows, width, 1 / probability, dropped_steps(probability), eps), forward_launch(width)
        given, made = (x, update, added, drawn_from, weight, bias), (total, mean, scale, normed, read)
        if rows:
            _norm_forward[(triton.cdiv(rows, launch["tile_rows"]),)](*given, *made, *numbers, **kinds, **launch)
        ctx.save_for_backward(total, mean, scale, weight, seed)
        ctx.probability, ctx.pre, ctx.biased = probability, pre, update_bias is not None
        ctx.dtypes = x.dtype, update.dtype
        ctx.set_materialize_grads(False)
        return normed, read

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, past: Tensor | None, read: Tensor | None) -> tuple[Tensor | None, ...]:
        """Partial sums are added up in a fixed order, so that the same inputs always give the same bits."""
        if past is None and read is None:
            return (None,) * 9
        total, mean, scale, weight, seed = ctx.saved_tensors
        grad_x, grad_update = (torch.empty_like(total, dtype=dtype) for dtype in ctx.dtypes)
        rows, width = len(mean), total.shape[-1]
        launch = backward_launch(width)
        tiles = triton.cdiv(rows, launch["tile_rows"])
        programs = triton.cdiv(tiles, triton.cdiv(tiles, MOST_PROGRAMS)) if tiles else 0  # equal shares
        partial = torch.empty(3, programs, width, dtype=torch.float32, device=total.device)
        if tiles:
            kinds = {"has_past": past is not None, "has_read": read is not None, "masked": seed is not None}
            read, *places = _where_it_lies(grad_x if read is None else read)
            past, drawn_from = grad_x if past is None else past.contiguous(), grad_x if seed is None else seed
            given, made = (past, read, total, mean, scale, weight, drawn_from), (grad_x, grad_update, partial)
            numbers = (rows, width, *places, 1 / ctx.probability, dropped_steps(ctx.probability))
            _norm_backward[(programs,)](*given, *made, *numbers, pre=ctx.pre, **kinds, **launch)
        of_weight, of_bias, of_update = sum_rows(partial, partial.new_empty(3, width)).to(weight.dtype).unbind()
        return grad_x, grad_update, of_weight, of_bias, of_update if ctx.biased else None, *(None,) * 4


def _where_it_lies(gradient: Tensor) -> tuple[Tensor, int, int]:
    """The rows, how many lie together, and the stride between such runs: part of a longer segment is not copied."""
    if gradient.ndim == 3 and gradient.stride(2) == 1 and gradient.stride(1) == gradient.shape[2]:
        return gradient, gradient.shape[1], gradient.stride(0)
    rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
    return rows, len(rows), 0


def forward_launch(width: int) -> dict[str, int]:
    return _launch(width, TILE, 512)


def backward_launch(width: int) -> dict[str, int]:
    launch = _launch(width, BACKWARD_TILE, 128)
    return {**launch, "stages": STAGES if launch["tile_columns"] <= 2048 else 1}


def _launch(width: int, tile: int, values_per_warp: int) -> dict[str, int]:
    """A program handles whole rows, so a row's sums need no other program."""
    columns = triton.next_power_of_2(width)
    rows = max(tile // columns, 1)
    warps = min(max(rows * columns // values_per_warp, 1), 16)
    return {"tile_rows": min(rows, 16), "tile_columns": columns, "num_warps": warps}


@triton.jit
def _norm_forward(
    x,  # (N, d)
    update,  # (N, d)
    update_bias,  # (d,)
    seed,  # (1,)
    weight,  # (d,)
    bias,  # (d,)
    total,  # (N, d)
    mean,  # (N,)
    scale,  # (N,)
    normed,  # (N, d)
    read,  # (N, d)
    rows,
    width,
    inverse_share,
    dropped,
    eps,
    biased: tl.constexpr,
    masked: tl.constexpr,
    exact_too: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.arange(0, tile_columns)
    there = (row < rows)[:, None] & (column < width)[None, :]
    place = row[:, None].to(tl.int64) * width + column[None, :]
    added = tl.load(update + place, mask=there, other=0.0).to(tl.float32)
    if biased:
        added += tl.load(update_bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    added *= inverse_share
    if masked:
        added = tl.where(is_kept(tl.load(seed), row, column, dropped), added, 0.0)
    sums = tl.load(x + place, mask=there, other=0.0).to(tl.float32) + added
    tl.store(total + place, sums, mask=there)
    middle = tl.sum(sums, 1) / width
    centred = tl.where(there, sums - middle[:, None], 0.0)
    narrow = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    tl.store(mean + row, middle, mask=row < rows)
    tl.store(scale + row, narrow, mask=row < rows)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    result = centred * narrow[:, None] * w[None, :] + b[None, :]
    tl.store(read + place, result.to(read.dtype.element_ty), mask=there)
    if exact_too:
        tl.store(normed + place, result, mask=there)


@triton.jit
def _norm_backward(
    past,  # (N, d)
    read,  # (N / together, together, d), with ``apart`` from one to the next
    total,  # (N, d)
    mean,  # (N,)
    scale,  # (N,)
    weight,  # (d,)
    seed,  # (1,)
    grad_x,  # (N, d)
    grad_update,  # (N, d)
    partial,  # (3, programs, d)
    rows,
    width,
    together,
    apart,
    inverse_share,
    dropped,
    has_past: tl.constexpr,
    has_read: tl.constexpr,
    masked: tl.constexpr,
    pre: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    stages: tl.constexpr,
):
    programs = tl.num_programs(0)
    column = tl.arange(0, tile_columns)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if masked:
        drawn_from = tl.load(seed)
    of_weight = tl.zeros((tile_rows, tile_columns), tl.float32)
    of_bias = tl.zeros((tile_rows, tile_columns), tl.float32)
    of_update = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in tl.range(tl.program_id(0) * tile_rows, rows, programs * tile_rows, num_stages=stages):
        row = start + tl.arange(0, tile_rows)
        there = (row < rows)[:, None] & (column < width)[None, :]
        place = row[:, None].to(tl.int64) * width + column[None, :]
        to_norm = tl.zeros((tile_rows, tile_columns), tl.float32)
        if has_read:
            begins = (row // together).to(tl.int64) * apart + (row % together) * width
            to_norm += tl.load(read + begins[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
        if has_past and not pre:
            to_norm += tl.load(past + place, mask=there, other=0.0).to(tl.float32)
        middle = tl.load(mean + row, mask=row < rows, other=0.0)
        narrow = tl.load(scale + row, mask=row < rows, other=0.0)
        hat = (tl.load(total + place, mask=there, other=0.0) - middle[:, None]) * narrow[:, None]
        hat = tl.where(there, hat, 0.0)
        weighted = to_norm * w[None, :]
        level = tl.sum(weighted, 1) / width
        slope = tl.sum(weighted * hat, 1) / width
        gradient = (weighted - level[:, None] - hat * slope[:, None]) * narrow[:, None]
        if has_past and pre:
            gradient += tl.load(past + place, mask=there, other=0.0).to(tl.float32)
        tl.store(grad_x + place, gradient.to(grad_x.dtype.element_ty), mask=there)
        through = gradient * inverse_share
        if masked:
            through = tl.where(is_kept(drawn_from, row, column, dropped), through, 0.0)
        tl.store(grad_update + place, through.to(grad_update.dtype.element_ty), mask=there)
        of_weight += to_norm * hat
        of_bias += to_norm
        of_update += tl.where(there, through, 0.0)
    mine = partial + tl.program_id(0) * width + column
    tl.store(mine, tl.sum(of_weight, 0), mask=column < width)
    tl.store(mine + programs * width, tl.sum(of_bias, 0), mask=column < width)
    tl.store(mine + 2 * programs * width, tl.sum(of_update, 0), mask=column < width)
