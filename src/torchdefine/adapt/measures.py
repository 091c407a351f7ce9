"""Numbers with their 95 % intervals, which come from leaving out one group of sentences after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GROUPS = 20
_QUANTILE = 2.09
"""Of Student's distribution with 19 degrees of freedom."""


@dataclass(frozen=True)
class Measure:
    """What was measured after a replacement, and the ends of its interval.

    Where the old model has such a number too, it is ``before``. The interval is then that of the change, added to it.
    """

    value: float
    low: float
    high: float
    before: float | None = None

    def __str__(self) -> str:
        was = "" if self.before is None else f", before {self.before:.4g}"
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f}{was})"


def measured(after: Callable[[Tensor], float], count: int, before: Callable[[Tensor], float] | None = None) -> Measure:
    """A statistic of ``count`` sentences, called with the numbers of some; ``before`` is the old model's.

    The interval is a delete-a-group jackknife's.
    """
    every = torch.arange(count)

    def change(some: Tensor) -> float:
        return after(some) - (0.0 if before is None else before(some))

    groups = min(GROUPS, count)
    left = torch.tensor([change(every[every % groups != one]) for one in range(groups)], dtype=torch.float64)
    wide = _QUANTILE * math.sqrt((groups - 1) * float(left.var(correction=0)))
    value = after(every)
    return Measure(value, value - wide, value + wide, None if before is None else before(every))
