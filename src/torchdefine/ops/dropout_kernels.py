"""Masks that kernels draw from a seed, each part where it is needed; no mask is ever stored."""

from __future__ import annotations

import triton
import triton.language as tl

from torchdefine.ops.dropout_mask import BITS

ROUNDS = tl.constexpr(7)
"""Philox rounds: the fewest that pass all of its authors' tests."""


def dropped_steps(share: float) -> int:
    """How many of the values that a feature's bits can take drop it, if ``share`` is kept."""
    return round((1 - share) * 2**BITS)


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
