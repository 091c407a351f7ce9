"""Rows of a table drawn for a loss in which some count more than others."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLED = 0.75
"""Rows are drawn by weight to this power and the rest of the weight is in the loss, so that light rows are seen too."""


class RowDraws:
    """Batches of rows, heavy ones more often; the mean of errors times ``left`` is the weighted sum over all rows."""

    def __init__(self, weights: Tensor, generator: torch.Generator) -> None:
        chances = weights.double() ** SAMPLED
        self._ends = (chances / chances.sum()).cumsum(0)
        self._generator = generator
        self.left = (weights.double() ** (1 - SAMPLED) * chances.sum()).float()

    def draw(self, count: int) -> Tensor:
        """(count,) row numbers, with replacement."""
        at = torch.rand(count, dtype=torch.float64, device=self._ends.device, generator=self._generator)
        return torch.searchsorted(self._ends, at).clamp(max=len(self._ends) - 1)
