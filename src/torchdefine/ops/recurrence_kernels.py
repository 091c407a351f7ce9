"""The two loops over positions of `persistent_lstm` as Triton kernels; see there for what they compute.

All programs of a launch run at the same time, one on a multiprocessor, and meet after every position: each adds one
to that position's counter and waits until the others have done so too. Whoever calls makes sure that they all fit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchdefine.ops.persistent_lstm import UNITS_PER_PROGRAM


def forward_loop(from_inputs: Tensor, recurrent: Tensor, outputs: Tensor, cells: Tensor, gates: Tensor) -> None:
    length, rows, _, width = from_inputs.shape
    programs = width // UNITS_PER_PROGRAM
    _lstm_forward[(programs,)](
        from_inputs,
        recurrent,
        outputs,
        cells,
        gates,
        _counters(from_inputs),
        length,
        rows,
        programs,
        width=width,
        units=UNITS_PER_PROGRAM,
        **FORWARD_LAUNCH[_block_rows(rows)],
    )


def backward_loop(incoming: Tensor, transposed: Tensor, cells: Tensor, gates: Tensor, grad_gates: Tensor) -> None:
    length, rows, width = incoming.shape
    programs = width // UNITS_PER_PROGRAM
    _lstm_backward[(programs,)](
        incoming,
        transposed,
        cells,
        gates,
        grad_gates,
        _counters(incoming),
        length,
        rows,
        programs,
        width=width,
        units=UNITS_PER_PROGRAM,
        **BACKWARD_LAUNCH[_block_rows(rows)],
    )


def _counters(like: Tensor) -> Tensor:
    return torch.zeros(len(like), dtype=torch.int32, device=like.device)


def _block_rows(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def _launch(block: int, columns: int, num_stages: int, num_warps: int) -> dict[str, int]:
    """Rows that a program takes, columns of a product that it loads at once, and how many loads run ahead."""
    return {"block": block, "columns": columns, "num_stages": num_stages, "num_warps": num_warps}


FORWARD_LAUNCH = {
    16: _launch(16, 128, 3, 4),
    32: _launch(32, 128, 3, 4),
    64: _launch(64, 64, 3, 4),
    128: _launch(128, 64, 3, 8),
}
BACKWARD_LAUNCH = {
    16: _launch(16, 128, 3, 4),
    32: _launch(32, 128, 3, 4),
    64: _launch(64, 64, 3, 4),
    128: _launch(128, 64, 3, 4),
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
    """Go on when all programs have arrived, and see what they wrote."""
    while _read(counter) < programs:  # reads, since atomics would hold up those who arrive
        pass
    tl.debug_barrier()


@triton.jit
def _read(counter):
    """The counter's present value; whatever was written before it got there can be read afterwards."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [counter], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _lstm_forward(
    from_inputs,  # (T, B, 4, P)
    recurrent,  # (4, P, P): gate, unit, column
    outputs,  # (T + 1, B, P)
    cells,  # (T + 1, B, P)
    gates,  # (T, B, 4, P)
    counters,  # (T,)
    length,
    rows,
    programs,
    width: tl.constexpr,
    block: tl.constexpr,
    units: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.arange(0, block)
    unit = tl.program_id(0) * units + tl.arange(0, units)
    column = tl.arange(0, columns)
    there = (row < rows)[:, None]
    own = row[:, None] * width + unit[None, :]
    own_gates = row[:, None] * (4 * width) + unit[None, :]
    weight = recurrent + unit[None, :] * width + column[:, None]  # (columns, units) of the first gate
    cell = tl.load(cells + own, mask=there, other=0.0)
    for t in range(length):
        before = outputs + t * rows * width + row[:, None] * width + column[None, :]
        here = from_inputs + t * rows * 4 * width + own_gates
        i = tl.load(here, mask=there, other=0.0).to(tl.float32)
        f = tl.load(here + width, mask=there, other=0.0).to(tl.float32)
        g = tl.load(here + 2 * width, mask=there, other=0.0).to(tl.float32)
        o = tl.load(here + 3 * width, mask=there, other=0.0).to(tl.float32)
        for start in range(0, width, columns):
            h = tl.load(before + start, mask=there, other=0.0, cache_modifier=".cg")  # others wrote it
            w = weight + start
            i = tl.dot(h, tl.load(w), i)
            f = tl.dot(h, tl.load(w + width * width), f)
            g = tl.dot(h, tl.load(w + 2 * width * width), g)
            o = tl.dot(h, tl.load(w + 3 * width * width), o)
        i, f, g, o = _sigmoid(i), _sigmoid(f), _tanh(g), _sigmoid(o)
        cell = f * cell + i * g
        tl.store(outputs + (t + 1) * rows * width + own, o * _tanh(cell), mask=there)
        if t + 1 < length:
            _arrive(counters + t)  # the rest is nobody else's business
        tl.store(cells + (t + 1) * rows * width + own, cell, mask=there)
        kept = gates + t * rows * 4 * width + own_gates
        tl.store(kept, i, mask=there)
        tl.store(kept + width, f, mask=there)
        tl.store(kept + 2 * width, g, mask=there)
        tl.store(kept + 3 * width, o, mask=there)
        if t + 1 < length:
            _wait(counters + t, programs)


@triton.jit
def _lstm_backward(
    incoming,  # (T, B, P)
    transposed,  # (4, P, P): gate, unit, the row of the recurrent weights
    cells,  # (T + 1, B, P)
    gates,  # (T, B, 4, P)
    grad_gates,  # (T, B, 4, P)
    counters,  # (T,)
    length,
    rows,
    programs,
    width: tl.constexpr,
    block: tl.constexpr,
    units: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.arange(0, block)
    unit = tl.program_id(0) * units + tl.arange(0, units)
    column = tl.arange(0, columns)
    there = (row < rows)[:, None]
    own = row[:, None] * width + unit[None, :]
    own_gates = row[:, None] * (4 * width) + unit[None, :]
    weight = transposed + unit[None, :] * width + column[:, None]  # (columns, units) of the first gate
    grad_cell = tl.zeros((block, units), tl.float32)
    for step in range(length):
        t = length - 1 - step
        total = tl.load(incoming + t * rows * width + own, mask=there, other=0.0).to(tl.float32)
        if step > 0:
            after = grad_gates + (t + 1) * rows * 4 * width + row[:, None] * (4 * width) + column[None, :]
            from_f = tl.zeros((block, units), tl.float32)
            from_g = tl.zeros((block, units), tl.float32)
            from_o = tl.zeros((block, units), tl.float32)
            for start in range(0, width, columns):
                w = weight + start
                d = after + start
                total = tl.dot(tl.load(d, mask=there, other=0.0, cache_modifier=".cg"), tl.load(w), total)
                d += width
                w += width * width
                from_f = tl.dot(tl.load(d, mask=there, other=0.0, cache_modifier=".cg"), tl.load(w), from_f)
                d += width
                w += width * width
                from_g = tl.dot(tl.load(d, mask=there, other=0.0, cache_modifier=".cg"), tl.load(w), from_g)
                d += width
                w += width * width
                from_o = tl.dot(tl.load(d, mask=there, other=0.0, cache_modifier=".cg"), tl.load(w), from_o)
            total += from_f + from_g + from_o
        kept = gates + t * rows * 4 * width + own_gates
        i = tl.load(kept, mask=there, other=0.0).to(tl.float32)
        f = tl.load(kept + width, mask=there, other=0.0).to(tl.float32)
        g = tl.load(kept + 2 * width, mask=there, other=0.0).to(tl.float32)
        o = tl.load(kept + 3 * width, mask=there, other=0.0).to(tl.float32)
        squashed = _tanh(tl.load(cells + (t + 1) * rows * width + own, mask=there, other=0.0))
        cell = tl.load(cells + t * rows * width + own, mask=there, other=0.0)
        grad_cell += total * o * (1 - squashed * squashed)
        made = grad_gates + t * rows * 4 * width + own_gates
        tl.store(made, grad_cell * g * i * (1 - i), mask=there)
        tl.store(made + width, grad_cell * cell * f * (1 - f), mask=there)
        tl.store(made + 2 * width, grad_cell * i * (1 - g * g), mask=there)
        tl.store(made + 3 * width, total * squashed * o * (1 - o), mask=there)
        grad_cell *= f
        if step + 1 < length:
            _arrive(counters + t)
            _wait(counters + t, programs)
