"""`softmax_loss` and its column sums as Triton kernels; see there for what they compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchdefine.ops.softmax_loss import Classes
from torchdefine.ops.sum_kernels import sum_rows

MOST_COLUMNS_AT_ONCE = 4096
ROWS_A_STRIP = 256


def softmax_loss(logits: Tensor, classes: Classes, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient is written over the logits, in their dtype, with zeros where rows do not count."""
    rows, padded = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    at_once = min(MOST_COLUMNS_AT_ONCE, triton.next_power_of_2(padded))
    targets, added = (classes.columns, classes.counted), losses if classes.bias is None else classes.bias
    numbers = (classes.number, padded, logits.stride(0), classes.label_smoothing)
    kinds = {
        "has_bias": classes.bias is not None,
        "smoothed": classes.label_smoothing > 0,
        "with_gradient": with_gradient,
    }
    launch = {"columns_at_once": at_once, "num_warps": min(max(at_once // 512, 1), 8)}
    if rows:
        _softmax_loss[(rows,)](logits, added, *targets, losses, *numbers, **kinds, **launch)
    return losses, logits if with_gradient else None


def add_column_sums(total: Tensor, matrix: Tensor, weights: Tensor) -> None:
    """Strips of rows are summed on their own and then together, always in the same order."""
    rows, columns = matrix.shape
    strips = triton.cdiv(rows, ROWS_A_STRIP)
    partial = torch.empty(strips, columns, dtype=torch.float32, device=matrix.device)
    if rows:
        _column_sums[(triton.cdiv(columns, 64), strips)](
            matrix, weights, partial, rows, columns, matrix.stride(0), strip=ROWS_A_STRIP, tile_rows=32, tile_columns=64
        )
    sum_rows(partial[None], total[None], onto=True)


@triton.jit
def _softmax_loss(
    logits,  # (t, P)
    bias,  # (P,)
    targets,  # (t,)
    counted,  # (t,)
    losses,  # (t,)
    classes,
    padded,
    stride,
    smoothing,
    has_bias: tl.constexpr,
    smoothed: tl.constexpr,
    with_gradient: tl.constexpr,
    columns_at_once: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    counts = tl.load(counted + row) != 0
    seen = tl.where(counts, classes, 0)
    target = tl.load(targets + row)
    mine = logits + row * stride
    column = tl.arange(0, columns_at_once)
    hit = tl.load(mine + target).to(tl.float32)
    if has_bias:
        hit += tl.load(bias + target).to(tl.float32)

    largest = -float("inf")
    summed = 0.0
    of_all = 0.0
    for start in range(0, seen, columns_at_once):
        here = start + column
        inside = here < classes
        x = tl.load(mine + here, mask=here < padded, other=0.0).to(tl.float32)  # a mask of whole lines: wide loads
        if has_bias:
            x += tl.load(bias + here, mask=here < padded, other=0.0).to(tl.float32)
        x = tl.where(inside, x, -float("inf"))
        if smoothed:
            of_all += tl.sum(tl.where(inside, x, 0.0), 0)
        before = largest
        largest = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(largest == -float("inf"), 0.0, largest)  # -inf while every class so far is forbidden
        summed = summed * tl.exp(before - base) + tl.sum(tl.exp(x - base), 0)
    normaliser = largest + tl.log(summed)
    loss = normaliser - hit
    if smoothed:
        loss = (1 - smoothing) * loss + smoothing * (normaliser - of_all / classes)
    tl.store(losses + row, tl.where(counts, loss, 0.0))

    if with_gradient:
        tl.debug_barrier()  # the target's logit was read by all
        for start in range(0, padded, columns_at_once):
            here = start + column
            x = tl.load(mine + here, mask=here < padded, other=0.0).to(tl.float32)
            if has_bias:
                x += tl.load(bias + here, mask=here < padded, other=0.0).to(tl.float32)
            gradient = tl.exp(x - normaliser)
            if smoothed:
                gradient -= smoothing / classes
            gradient += tl.where(here == target, smoothing - 1, 0.0)
            gradient = tl.where(here < seen, gradient, 0.0)
            tl.store(mine + here, gradient.to(logits.dtype.element_ty), mask=here < padded)


@triton.jit
def _column_sums(
    matrix,  # (t, P)
    weights,  # (t,)
    partial,  # (strips, P)
    rows,
    columns,
    stride,
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
        values = tl.load(matrix + row[:, None].to(tl.int64) * stride + column[None, :], mask=there, other=0.0)
        weight = tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
        sums += values.to(tl.float32) * weight[:, None]
    tl.store(partial + tl.program_id(1) * columns + column, tl.sum(sums, 0), mask=column < columns)
