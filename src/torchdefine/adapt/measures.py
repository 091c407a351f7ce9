"""Numbers with their 95 % intervals, which come from leaving out one group of sentences after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MEANINGS = {
    "cosine": "mean cosine between the vectors of a sentence in both models; 1 means equal",
    "rank correlation": "Spearman, over the similarities of all pairs of sentences; 1 means the same order",
    "KL": "KL divergence between the predictions of both models, in nats; 0 means equal",
    "perplexity": "of the new model; lower is better",
    "top-1 agreement": "fraction of places where both models predict the same token",
    "agreement": "fraction of sentences to which both models give the same class",
    "pairs, mean reciprocal rank": "1 means that each text finds its partner first",
    "pairs, rank correlation": "Spearman, between the cosines of the new model and your scores",
    "labels, accuracy": "fraction of your examples that get their label",
}
"""What each measure of ``adapt`` is, for those who read its report."""
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
        was = "" if self.before is None else f", before {self.before:.4f}"
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


def explained(measures: Mapping[str, Measure]) -> list[str]:
    """Each measure with what it is, in a line."""
    return [f"{name}: {one} – {MEANINGS[name]}" for name, one in measures.items()]
