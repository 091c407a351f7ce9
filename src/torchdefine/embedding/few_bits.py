"""Rows rounded to few bits in training: the table learns in floats, and whoever reads it sees the rounded rows.

Gradients pass the rounding as if it were not there (the straight-through estimator). One bit is the sign of a number
times the mean magnitude of its row (XNOR-Net, Rastegari et al., 2016); more bits are evenly spaced levels around zero
(Hubara et al., 2017).
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = {2: 0.9957, 3: 0.5860, 4: 0.3352}
"""Between the levels that lose least of a normal variable, in standard deviations (Max, 1960)."""
MOST_BITS = 4


def rounded(rows: Tensor, bits: int) -> Tensor:
    """(…, n) → the nearest levels, (code - (2^bits - 1) / 2) × the row's step; gradients reach ``rows`` unchanged.

    A step is a float16, as packed tables store it, so that they hold these very rows.
    """
    values = rows.detach()
    if bits == 1:
        steps = 2 * values.abs().mean(-1, keepdim=True)  # (…, 1)
    else:
        steps = STEPS[bits] * values.square().mean(-1, keepdim=True).sqrt()
    steps = steps.to(torch.float16).to(values.dtype)
    half = (2**bits - 1) / 2
    codes = (values / steps.clamp(min=1e-12) + half).round().clamp(0, 2**bits - 1)
    return (codes - half) * steps + (rows - values)
