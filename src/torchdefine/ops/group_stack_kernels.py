"""The seams of `group_stack` as Triton kernels; see there for what they compute and for the letters.

A program handles whole tokens, so a norm's sums need no other program. Sizes are arguments rather than constants:
a deep unit has ten seams of different sizes, and few kernels serve them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchdefine.ops.group_stack import ALIGNED, Finish, Seam
from torchdefine.ops.sum_kernels import sum_rows

TILE = 2048
"""Values of each tensor that a forward program handles at once."""
BACKWARD_TILE = 512
"""The same for backward. Programs stall on every tile, so tiles are small and many programs run at once."""
MULTIPROCESSORS = 132
"""Of an H200. Each backward program sums a part of the gradients, so no more are started than run at once."""


def forward_seam(leaving: Tensor, finish: Finish, x: Tensor, seam: Seam) -> tuple[Tensor, Tensor, Tensor]:
    """(g, T, room) and (T, n) → what enters the next product, (g', T, next_room), and of the norm the means (T,) and
    one over the standard deviations (T,)."""
    tokens, launch = leaving.shape[1], _launch(seam, TILE, 8)
    mean, scale = (x.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    entering = leaving.new_empty(seam.next_groups, tokens, seam.next_room)
    given, kinds = _given(finish, seam, mean)
    numbers = (tokens, *_sizes(seam), seam.form.eps)
    if tokens:
        grid = (triton.cdiv(tokens, launch["tile_tokens"]),)
        _seam_forward[grid](leaving, *given, x, mean, scale, entering, *numbers, **kinds, **launch)
    return entering, mean, scale


def backward_seam(
    of_entering: Tensor,
    leaving: Tensor,
    finish: Finish,
    seam: Seam,
    statistics: Sequence[Tensor],
    fresh: bool,
    grad_x: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradient of ``leaving``, and those of the product's bias and of the norm's weight and bias, (3, width).

    Adds to ``grad_x``, or fills it if it is ``fresh``. Partial sums are added up in a fixed order, so that the same
    inputs always give the same bits.
    """
    tokens, launch = leaving.shape[1], _launch(seam, BACKWARD_TILE, 4)
    given, kinds = _given(finish, seam, statistics[0])
    tiles, most = triton.cdiv(tokens, launch["tile_tokens"]), MULTIPROCESSORS * (48 // launch["num_warps"])
    programs = triton.cdiv(tiles, triton.cdiv(tiles, most)) if tiles else 0  # equal shares
    partial = torch.empty(3, programs, seam.width, dtype=torch.float32, device=leaving.device)
    made, sizes = (torch.empty_like(leaving), grad_x, partial), _sizes(seam)
    if tiles:
        _seam_backward[(programs,)](
            of_entering, leaving, *given, *statistics, *made, tokens, *sizes, fresh=fresh, **kinds, **launch
        )
    return made[0], sum_rows(partial, partial.new_empty(3, seam.width))


@lru_cache(maxsize=256)
def _launch(seam: Seam, tile: int, numbers: int) -> dict[str, int]:
    """Each program handles ``tile`` values (at least one token), each thread ``numbers`` of them."""
    columns = triton.next_power_of_2(seam.width)
    tokens = min(max(tile // columns, 1), 16)
    return {
        "tile_tokens": tokens,
        "tile_columns": columns,
        "seen_columns": triton.next_power_of_2(max(seam.form.skipped, 1)),
        "spare_columns": triton.next_power_of_2(ALIGNED * max(seam.groups, seam.next_groups)),
        "num_warps": min(max(tokens * columns // (32 * numbers), 1), 16),
    }


@lru_cache(maxsize=256)
def _sizes(seam: Seam) -> tuple[int, ...]:
    """The seam's own, and where its parts go: the features of x and of the previous output that a group has, and where
    the latter begin in it. Unless ``mixed``: the size of a group twice, and where they begin in the whole row."""
    *sizes, form = seam
    if not form.mixed:
        return *sizes, form.skipped, seam.next_chunk, seam.next_chunk, form.skipped
    share = form.skipped // seam.next_groups
    return *sizes, form.skipped, max(share, 1), seam.width // seam.next_groups, share


def _given(finish: Finish, seam: Seam, instead: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """Bias and norm, with a tensor even for those that will not be read, and what the kernel is compiled for."""
    bias, weight, _ = finish
    kinds: dict[str, Any] = {"biased": bias is not None, "normed": weight is not None, "sees": seam.form.skipped > 0}
    kinds |= {"mixed": seam.form.mixed, "activation": seam.form.activation}
    return [instead if tensor is None else tensor for tensor in finish], kinds


@triton.jit
def _activated(x, activation: tl.constexpr):
    if activation == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif activation == "relu":
        result = tl.where(x < 0, 0.0, x)
    elif activation == "silu":
        result = x * tl.sigmoid(x)
    elif activation == "tanh":
        result = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    else:
        result = x
    return result


@triton.jit
def _slope(x, activation: tl.constexpr):
    if activation == "gelu":
        slope = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif activation == "relu":
        slope = tl.where(x > 0, 1.0, 0.0)
    elif activation == "silu":
        gate = tl.sigmoid(x)
        slope = gate * (1.0 + x * (1.0 - gate))
    elif activation == "tanh":
        squashed = 2.0 * tl.sigmoid(2.0 * x) - 1.0
        slope = 1.0 - squashed * squashed
    else:
        slope = tl.zeros_like(x) + 1.0
    return slope


@triton.jit
def _next_places(feature, tokens, next_room, share, start, mixed: tl.constexpr):
    """Where features stand among the inputs of the next product, relative to a token's row.

    If ``mixed``, ``start`` is where they begin in a group; otherwise, where they begin in the whole row.
    """
    if mixed:
        group, within = feature // share, start + feature % share
    else:
        group, within = (feature + start) // share, (feature + start) % share
    return group.to(tl.int64) * tokens * next_room + within


@triton.jit
def _spare_places(tokens, groups, chunk, room, spare_columns: tl.constexpr):
    """The places that pad a row of groups, and which of them exist: at most eight in a group."""
    spare = tl.arange(0, spare_columns)
    group, within = spare // 8, chunk + spare % 8
    return group.to(tl.int64) * tokens * room + within, (group < groups) & (within < room)


@triton.jit
def _seam_forward(
    leaving,  # (g, T, room)
    bias,  # (width,)
    weight,  # (width,)
    norm_bias,  # (width,)
    x,  # (T, n)
    mean,  # (T,)
    scale,  # (T,)
    entering,  # (g', T, next_room)
    tokens,
    groups,
    chunk,
    room,
    next_groups,
    next_chunk,
    next_room,
    seen,
    seen_share,
    hidden_share,
    hidden_start,
    eps,
    biased: tl.constexpr,
    normed: tl.constexpr,
    sees: tl.constexpr,
    mixed: tl.constexpr,
    activation: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_columns: tl.constexpr,
    seen_columns: tl.constexpr,
    spare_columns: tl.constexpr,
):
    width = groups * chunk
    token = tl.program_id(0) * tile_tokens + tl.arange(0, tile_tokens)
    feature = tl.arange(0, tile_columns)
    real, present = feature < width, token < tokens
    there = present[:, None] & real[None, :]
    long = token[:, None].to(tl.int64)
    place = ((feature // chunk).to(tl.int64) * tokens * room + feature % chunk)[None, :] + long * room
    total = tl.load(leaving + place, mask=there, other=0.0).to(tl.float32)
    if biased:
        total += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)[None, :]
    if normed:
        middle = tl.sum(tl.where(there, total, 0.0), 1) / width
        centred = tl.where(there, total - middle[:, None], 0.0)
        narrow = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
        tl.store(mean + token, middle, mask=present)
        tl.store(scale + token, narrow, mask=present)
        w = tl.load(weight + feature, mask=real, other=0.0).to(tl.float32)
        b = tl.load(norm_bias + feature, mask=real, other=0.0).to(tl.float32)
        total = centred * narrow[:, None] * w[None, :] + b[None, :]
    kind = entering.dtype.element_ty
    to = _next_places(feature, tokens, next_room, hidden_share, hidden_start, mixed)[None, :] + long * next_room
    tl.store(entering + to, _activated(total, activation).to(kind), mask=there)
    if sees:
        again = tl.arange(0, seen_columns)
        held = present[:, None] & (again < seen)[None, :]
        vectors = tl.load(x + long * seen + again[None, :], mask=held, other=0.0)
        to = _next_places(again, tokens, next_room, seen_share, 0, mixed)[None, :] + long * next_room
        tl.store(entering + to, vectors.to(kind), mask=held)
    spare, is_spare = _spare_places(tokens, next_groups, next_chunk, next_room, spare_columns)
    nothing = tl.zeros((tile_tokens, spare_columns), kind)
    tl.store(entering + spare[None, :] + long * next_room, nothing, mask=present[:, None] & is_spare[None, :])


@triton.jit
def _seam_backward(
    of_entering,  # (g', T, next_room)
    leaving,  # (g, T, room)
    bias,  # (width,)
    weight,  # (width,)
    norm_bias,  # (width,)
    mean,  # (T,)
    scale,  # (T,)
    of_leaving,  # (g, T, room)
    grad_x,  # (T, n)
    partial,  # (3, programs, width)
    tokens,
    groups,
    chunk,
    room,
    next_groups,
    next_chunk,
    next_room,
    seen,
    seen_share,
    hidden_share,
    hidden_start,
    fresh: tl.constexpr,
    biased: tl.constexpr,
    normed: tl.constexpr,
    sees: tl.constexpr,
    mixed: tl.constexpr,
    activation: tl.constexpr,
    tile_tokens: tl.constexpr,
    tile_columns: tl.constexpr,
    seen_columns: tl.constexpr,
    spare_columns: tl.constexpr,
):
    width = groups * chunk
    feature, again = tl.arange(0, tile_columns), tl.arange(0, seen_columns)
    real = feature < width
    own_place = (feature // chunk).to(tl.int64) * tokens * room + feature % chunk
    next_place = _next_places(feature, tokens, next_room, hidden_share, hidden_start, mixed)
    seen_place = _next_places(again, tokens, next_room, seen_share, 0, mixed)
    spare, is_spare = _spare_places(tokens, groups, chunk, room, spare_columns)
    nothing = tl.zeros((tile_tokens, spare_columns), of_leaving.dtype.element_ty)
    if normed:
        w = tl.load(weight + feature, mask=real, other=0.0).to(tl.float32)
        b = tl.load(norm_bias + feature, mask=real, other=0.0).to(tl.float32)
    of_bias = tl.zeros((tile_tokens, tile_columns), tl.float32)
    of_weight = tl.zeros((tile_tokens, tile_columns), tl.float32)
    of_norm_bias = tl.zeros((tile_tokens, tile_columns), tl.float32)
    for start in range(tl.program_id(0) * tile_tokens, tokens, tl.num_programs(0) * tile_tokens):
        token = start + tl.arange(0, tile_tokens)
        present = token < tokens
        there = present[:, None] & real[None, :]
        long = token[:, None].to(tl.int64)
        gradient = tl.load(of_entering + next_place[None, :] + long * next_room, mask=there, other=0.0).to(tl.float32)
        ready = tl.load(leaving + own_place[None, :] + long * room, mask=there, other=0.0).to(tl.float32)
        if biased:
            ready += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)[None, :]
        if normed:
            narrow = tl.load(scale + token, mask=present, other=0.0)
            hat = (ready - tl.load(mean + token, mask=present, other=0.0)[:, None]) * narrow[:, None]
            hat = tl.where(there, hat, 0.0)
            gradient *= _slope(hat * w[None, :] + b[None, :], activation)
            of_weight += gradient * hat
            of_norm_bias += gradient
            weighted = gradient * w[None, :]
            level, slope = tl.sum(weighted, 1) / width, tl.sum(weighted * hat, 1) / width
            gradient = tl.where(there, (weighted - level[:, None] - hat * slope[:, None]) * narrow[:, None], 0.0)
        else:
            gradient *= _slope(ready, activation)
        of_bias += gradient
        kind = of_leaving.dtype.element_ty
        tl.store(of_leaving + own_place[None, :] + long * room, gradient.to(kind), mask=there)
        tl.store(of_leaving + spare[None, :] + long * room, nothing, mask=present[:, None] & is_spare[None, :])
        if sees:
            held = present[:, None] & (again < seen)[None, :]
            more = tl.load(of_entering + seen_place[None, :] + long * next_room, mask=held, other=0.0).to(tl.float32)
            summed = grad_x + long * seen + again[None, :]
            if not fresh:
                more += tl.load(summed, mask=held, other=0.0)
            tl.store(summed, more, mask=held)
    programs = tl.num_programs(0)
    mine = partial + tl.program_id(0) * width + feature
    tl.store(mine, tl.sum(of_bias, 0), mask=real)
    tl.store(mine + programs * width, tl.sum(of_weight, 0), mask=real)
    tl.store(mine + 2 * programs * width, tl.sum(of_norm_bias, 0), mask=real)
