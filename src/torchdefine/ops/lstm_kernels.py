"""A persistent LSTM layer: its recurrence is one Triton kernel, and another for the gradient.

Each program keeps sixteen hidden units for the whole segment; the products with the inputs and all sums for the
weights' gradients cover all positions at once, as large matrix products outside the kernel. Widths are padded with
units that stay zero, so that memory is read in whole lines.

All programs of a launch run at the same time, one on a multiprocessor. Those with the same rows meet after every
position: each adds one to that position's counter and waits until the others have done so too. Callers make sure that
all programs fit on the GPU at once.

Shapes: T positions, B rows, H hidden units, P of them with padding, D inputs; gates in the order i, f, g, o.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchdefine.ops.lstm import ROWS_PER_PROGRAM, UNITS_PER_PROGRAM, padded, row_blocks

ALIGNED_TO = 8  # inputs too are padded, so that matrix products take their fast kernels

OLDER_COMPILER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3)
"""Older compilers need more shared memory for the same work."""


class PersistentLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length, rows, ctx.input_dim = x.shape
        hidden_dim = h.shape[-1]
        width = padded(hidden_dim)
        with torch.autocast(x.device.type, enabled=False):  # the dtype is already chosen
            x = _widened(x, -(-ctx.input_dim // ALIGNED_TO) * ALIGNED_TO).contiguous()
            weight_ih, weight_hh = (weight.to(x.dtype).view(4, hidden_dim, -1) for weight in weights[:2])
            inward = _widened(weight_ih, x.shape[-1], width).reshape(4 * width, -1)  # (4P, D)
            recurrent = _widened(weight_hh, width, width).contiguous()  # (4, P, P)
            bias = _widened((weights[2] + weights[3]).to(x.dtype).view(4, hidden_dim), width).reshape(4 * width)
            from_inputs = torch.addmm(bias, x.view(length * rows, -1), inward.T).view(length, rows, 4, width)
            outputs = x.new_empty(length + 1, rows, width)
            cells = x.new_empty(length + 1, rows, width, dtype=torch.float32)
            outputs[0], cells[0] = _widened(h[0], width), _widened(c[0], width)  # the state before
            gates = torch.empty_like(from_inputs)
            grid, counters, sizes = _start(x, width)
            launch = FORWARD_LAUNCH[_block_rows(rows)]
            by_program = recurrent.view(4, grid[0], UNITS_PER_PROGRAM, width).transpose(0, 1).contiguous()
            given, made = (from_inputs, by_program), (outputs, cells, gates)
            _lstm_forward[grid](*given, *made, counters, length, rows, grid[0], **sizes, **launch)
        ctx.save_for_backward(x, inward, recurrent, outputs, cells, gates)
        ctx.hidden_dim, ctx.dtypes = hidden_dim, [weight.dtype for weight in weights]
        y = outputs[1:, :, :hidden_dim].contiguous()
        after_h, after_c = y[-1:].clone(), cells[-1:, :, :hidden_dim].to(c.dtype, copy=True)
        ctx.mark_non_differentiable(after_h, after_c)
        return y, after_h, after_c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, inward, recurrent, outputs, cells, gates = ctx.saved_tensors
        (length, rows, _), input_dim = x.shape, ctx.input_dim
        hidden_dim, width = ctx.hidden_dim, outputs.shape[-1]
        with torch.autocast(x.device.type, enabled=False):
            incoming = _widened(grad_y.to(x.dtype), width).contiguous()
            grad_gates = torch.empty_like(gates)  # (T, B, 4, P)
            grid, counters, sizes = _start(x, width)
            launch = BACKWARD_LAUNCH[_block_rows(rows)]
            given = (incoming, recurrent.permute(2, 0, 1).contiguous(), cells, gates)
            _lstm_backward[grid](*given, grad_gates, counters, length, rows, grid[0], **sizes, **launch)
            flat = grad_gates.view(length * rows, 4 * width)
            grad_x = (flat @ inward).view_as(x)[..., :input_dim] if ctx.needs_input_grad[0] else None
            grad_inward = (flat.T @ x.view(length * rows, -1)).view(4, width, -1)[:, :hidden_dim, :input_dim]
            before = outputs[:-1].reshape(length * rows, width)
            grad_recurrent = (flat.T @ before).view(4, width, width)[:, :hidden_dim, :hidden_dim]
            grad_bias = flat.sum(0, dtype=torch.float32).view(4, width)[:, :hidden_dim].reshape(-1)
        gradients = (
            grad_inward.reshape(4 * hidden_dim, input_dim),
            grad_recurrent.reshape(4 * hidden_dim, hidden_dim),
            grad_bias,
            grad_bias.clone(),  # separate tensors, so an in-place change affects only one
        )
        return grad_x, None, None, *(g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))


def _widened(tensor: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """Zeros added behind the last dimension, and behind the one before it; the same tensor if there are none to add."""
    added = (0, columns - tensor.shape[-1], *((0, rows - tensor.shape[-2]) if rows is not None else ()))
    return F.pad(tensor, added) if any(added) else tensor


def _start(given: Tensor, width: int) -> tuple[tuple[int, int], Tensor, dict[str, int]]:
    """The grid of programs, the counters by which they wait for each other, and what they are compiled for."""
    length, rows = given.shape[:2]
    counters = torch.zeros(row_blocks(rows), length, dtype=torch.int32, device=given.device)
    sizes = {"width": width, "units": UNITS_PER_PROGRAM}
    return (width // UNITS_PER_PROGRAM, row_blocks(rows)), counters, sizes


def _block_rows(rows: int) -> int:
    return min(max(16, triton.next_power_of_2(rows)), ROWS_PER_PROGRAM)


def _launch(block: int, columns: int, num_stages: int, num_warps: int) -> dict[str, int]:
    """Rows that a program takes, columns of a product that it loads at once, and how many loads run ahead."""
    return {"block": block, "columns": columns, "num_stages": num_stages, "num_warps": num_warps}


FORWARD_LAUNCH = {
    16: _launch(16, 64, 4, 4),
    32: _launch(32, 64, 4, 4),
    64: _launch(64, 64, 4, 4),
    128: _launch(128, 64, 2 if OLDER_COMPILER else 3, 8),
}
BACKWARD_LAUNCH = {
    16: _launch(16, 128, 4, 4),
    32: _launch(32, 128, 4, 4),
    64: _launch(64, 128, 5, 4),
    128: _launch(128, 128, 3, 8),
}
"""By the number of rows: among the fastest tried on an H200 for 32, 64 and 128; 16 is taken from 32, untried."""


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2 * _sigmoid(2 * x) - 1


@triton.jit
def _arrive(counter):
    """Say that this program has written what the others wait for."""
    tl.debug_barrier()  # every thread's writes come before the one that counts
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def _wait(counter, programs):
    """Go on when all programs have arrived, and see what they wrote.

    Poll with a plain load; atomics would delay arriving programs. No return value: Triton 3.2 rejects one inside an
    `if`.
    """
    arrived = 0
    while arrived < programs:
        arrived = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [counter], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def _lstm_forward(
    from_inputs,  # (T, B, 4, P)
    recurrent,  # (programs, 4, units of a program, P)
    outputs,  # (T + 1, B, P)
    cells,  # (T + 1, B, P)
    gates,  # (T, B, 4, P)
    counters,  # (blocks of rows, T)
    length,
    rows,
    programs,
    width: tl.constexpr,
    block: tl.constexpr,
    units: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.program_id(1) * block + tl.arange(0, block)
    counters += tl.program_id(1) * length
    unit = tl.program_id(0) * units + tl.arange(0, units)
    column = tl.arange(0, columns)
    there = (row < rows)[:, None]
    own = row[:, None] * width + unit[None, :]
    own_gates = row[:, None] * (4 * width) + unit[None, :]
    number = tl.program_id(0) * (4 * units) + tl.arange(0, 4 * units)  # of a gate of a unit, gate after gate
    weight = recurrent + number[None, :] * width + column[:, None]
    cell = tl.load(cells + own, mask=there, other=0.0)
    input_i, input_f, input_g, input_o = _load_gates(from_inputs + own_gates, there, width)
    for t in range(length):
        before = outputs + t * rows * width + row[:, None] * width + column[None, :]
        all_gates = tl.zeros((block, 4 * units), tl.float32)  # one product is faster than four narrow ones
        for start in range(0, width, columns):
            h = tl.load(before + start, mask=there, other=0.0, cache_modifier=".cg")  # others wrote it
            all_gates = tl.dot(h, tl.load(weight + start), all_gates)
        i, f, g, o = _take_apart(all_gates, block, units)
        i, f = _sigmoid(i + input_i), _sigmoid(f + input_f)
        g, o = _tanh(g + input_g), _sigmoid(o + input_o)
        cell = f * cell + i * g
        tl.store(outputs + (t + 1) * rows * width + own, o * _tanh(cell), mask=there)
        if t + 1 < length:
            _arrive(counters + t)  # no other program reads the rest
        tl.store(cells + (t + 1) * rows * width + own, cell, mask=there)
        kept = gates + t * rows * 4 * width + own_gates
        tl.store(kept, i, mask=there)
        tl.store(kept + width, f, mask=there)
        tl.store(kept + 2 * width, g, mask=there)
        tl.store(kept + 3 * width, o, mask=there)
        ahead = tl.minimum(t + 1, length - 1)  # prefetch data no other program writes while waiting
        here = from_inputs + ahead * rows * 4 * width + own_gates
        input_i, input_f, input_g, input_o = _load_gates(here, there, width)
        if t + 1 < length:
            _wait(counters + t, programs)


@triton.jit
def _load_gates(first, there, width: tl.constexpr):
    """The four gates of a program's units; ``first`` points to the first of them."""
    return (
        tl.load(first, mask=there, other=0.0),
        tl.load(first + width, mask=there, other=0.0),
        tl.load(first + 2 * width, mask=there, other=0.0),
        tl.load(first + 3 * width, mask=there, other=0.0),
    )


@triton.jit
def _take_apart(all_gates, block: tl.constexpr, units: tl.constexpr):
    """(block, 4 · units), gate after gate → four times (block, units)."""
    pairs = tl.permute(tl.reshape(all_gates, (block, 2, 2, units)), (0, 3, 1, 2))  # tl.split takes the last two apart
    even, odd = tl.split(pairs)
    i, g = tl.split(even)
    f, o = tl.split(odd)
    return i, f, g, o


@triton.jit
def _lstm_backward(
    incoming,  # (T, B, P)
    transposed,  # (P, 4, P): unit, gate, the row of the recurrent weights
    cells,  # (T + 1, B, P)
    gates,  # (T, B, 4, P)
    grad_gates,  # (T, B, 4, P)
    counters,  # (blocks of rows, T)
    length,
    rows,
    programs,
    width: tl.constexpr,
    block: tl.constexpr,
    units: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.program_id(1) * block + tl.arange(0, block)
    counters += tl.program_id(1) * length
    unit = tl.program_id(0) * units + tl.arange(0, units)
    column = tl.arange(0, columns)
    there = (row < rows)[:, None]
    own = row[:, None] * width + unit[None, :]
    own_gates = row[:, None] * (4 * width) + unit[None, :]
    weight = transposed + unit[None, :] * (4 * width) + column[:, None]  # (columns, units)
    grad_cell = tl.zeros((block, units), tl.float32)
    last = length - 1
    cell_after = tl.load(cells + length * rows * width + own, mask=there, other=0.0)
    cell = tl.load(cells + last * rows * width + own, mask=there, other=0.0)
    grad = tl.load(incoming + last * rows * width + own, mask=there, other=0.0)
    kept_i, kept_f, kept_g, kept_o = _load_gates(gates + last * rows * 4 * width + own_gates, there, width)
    for step in range(length):
        t = length - 1 - step
        total = tl.zeros((block, units), tl.float32)
        if step > 0:
            after = grad_gates + (t + 1) * rows * 4 * width + row[:, None] * (4 * width) + column[None, :]
            for start in range(0, 4 * width, columns):  # all gates are one long row
                d = tl.load(after + start, mask=there, other=0.0, cache_modifier=".cg")
                total = tl.dot(d, tl.load(weight + start), total)
        total += grad.to(tl.float32)
        i, f, g, o = kept_i.to(tl.float32), kept_f.to(tl.float32), kept_g.to(tl.float32), kept_o.to(tl.float32)
        squashed = _tanh(cell_after)
        grad_cell += total * o * (1 - squashed * squashed)
        made = grad_gates + t * rows * 4 * width + own_gates
        tl.store(made, grad_cell * g * i * (1 - i), mask=there)
        tl.store(made + width, grad_cell * cell * f * (1 - f), mask=there)
        tl.store(made + 2 * width, grad_cell * i * (1 - g * g), mask=there)
        tl.store(made + 3 * width, total * squashed * o * (1 - o), mask=there)
        grad_cell *= f
        if step + 1 < length:
            _arrive(counters + t)
        ahead = tl.maximum(t - 1, 0)  # prefetch data no other program writes while waiting
        cell_after = cell
        cell = tl.load(cells + ahead * rows * width + own, mask=there, other=0.0)
        grad = tl.load(incoming + ahead * rows * width + own, mask=there, other=0.0)
        kept_i, kept_f, kept_g, kept_o = _load_gates(gates + ahead * rows * 4 * width + own_gates, there, width)
        if step + 1 < length:
            _wait(counters + t, programs)
