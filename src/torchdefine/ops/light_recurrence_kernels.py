"""The two passes of `light_recurrence` as Triton kernels: a program has a block of channels and walks all positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCH = {"tile": 256, "stages": 4, "num_warps": 4}
"""Channels of a program, two for each thread, and positions that are worked on or loading."""


def forward(forget: Tensor, candidates: Tensor, start: Tensor, peephole: Tensor | None) -> Tensor:
    forget, candidates, start = forget.contiguous(), candidates.contiguous(), start.contiguous()
    cells = torch.empty_like(candidates)
    given = (forget, candidates, start, start if peephole is None else peephole, cells)
    _forward[(_programs(start),)](*given, *_sizes(candidates), peeps=peephole is not None, **LAUNCH)
    return cells


def backward(
    upstream: Tensor, forget: Tensor, candidates: Tensor, start: Tensor, peephole: Tensor | None, cells: Tensor
) -> list[Tensor]:
    upstream, forget, candidates = upstream.contiguous(), forget.contiguous(), candidates.contiguous()
    start = start.contiguous()
    found = [torch.empty_like(given) for given in (forget, candidates, start)]
    of_peephole = torch.empty(start.shape, dtype=torch.float32, device=start.device)  # of each row by itself, (B, H)
    given = (upstream, forget, candidates, start, start if peephole is None else peephole, cells)
    made = (*found, of_peephole)
    _backward[(_programs(start),)](*given, *made, *_sizes(candidates), peeps=peephole is not None, **LAUNCH)
    return found if peephole is None else [*found, of_peephole.sum(0).to(peephole.dtype)]


def _programs(start: Tensor) -> int:
    return triton.cdiv(start.numel(), LAUNCH["tile"])


def _sizes(candidates: Tensor) -> tuple[int, int, int]:
    length, rows, width = candidates.shape
    return length, rows * width, width


@triton.jit
def _forward(
    forget,  # (T, B, H)
    candidates,  # (T, B, H)
    start,  # (B, H)
    peephole,  # (H,)
    cells,  # (T, B, H)
    length,
    channels,  # B · H
    width,
    peeps: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
):
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    there = place < channels
    cell = tl.load(start + place, mask=there, other=0.0).to(tl.float32)
    if peeps:
        weight = tl.load(peephole + place % width, mask=there, other=0.0).to(tl.float32)
    forget += place
    candidates += place
    cells += place
    for _ in tl.range(0, length, num_stages=stages):
        gate = tl.load(forget, mask=there, other=0.0).to(tl.float32)
        new = tl.load(candidates, mask=there, other=0.0).to(tl.float32)
        if peeps:
            gate = tl.sigmoid(gate + weight * cell)
        cell = new + gate * (cell - new)
        tl.store(cells, cell.to(cells.dtype.element_ty), mask=there)
        forget += channels
        candidates += channels
        cells += channels


@triton.jit
def _backward(
    upstream,  # (T, B, H)
    forget,  # (T, B, H)
    candidates,  # (T, B, H)
    start,  # (B, H)
    peephole,  # (H,)
    cells,  # (T, B, H)
    grad_forget,  # (T, B, H)
    grad_candidates,  # (T, B, H)
    grad_start,  # (B, H)
    grad_peephole,  # (B, H)
    length,
    channels,  # B · H
    width,
    peeps: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
):
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    there = place < channels
    begin = tl.load(start + place, mask=there, other=0.0).to(tl.float32)
    of_peephole = tl.zeros((tile,), tl.float32)
    if peeps:
        weight = tl.load(peephole + place % width, mask=there, other=0.0).to(tl.float32)
    last = place + (length - 1).to(tl.int64) * channels
    upstream += last
    forget += last
    candidates += last
    before = cells + last - channels
    grad_forget += last
    grad_candidates += last
    carried = tl.zeros((tile,), tl.float32)
    for step in tl.range(0, length, num_stages=stages):
        follows = step + tl.zeros((tile,), tl.int32) < length - 1
        cell = tl.load(before, mask=there & follows, other=0.0).to(tl.float32)
        cell = tl.where(follows, cell, begin)
        new = tl.load(candidates, mask=there, other=0.0).to(tl.float32)
        gate = tl.load(forget, mask=there, other=0.0).to(tl.float32)
        total = tl.load(upstream, mask=there, other=0.0).to(tl.float32) + carried
        slope = cell - new
        decay = gate
        if peeps:
            gate = tl.sigmoid(gate + weight * cell)
            slope *= gate * (1 - gate)
            decay = gate + slope * weight
            of_peephole += total * slope * cell
        tl.store(grad_forget, (total * slope).to(grad_forget.dtype.element_ty), mask=there)
        tl.store(grad_candidates, (total - total * gate).to(grad_candidates.dtype.element_ty), mask=there)
        carried = total * decay
        upstream -= channels
        forget -= channels
        candidates -= channels
        before -= channels
        grad_forget -= channels
        grad_candidates -= channels
    tl.store(grad_start + place, carried.to(grad_start.dtype.element_ty), mask=there)
    if peeps:
        tl.store(grad_peephole + place, of_peephole, mask=there)
