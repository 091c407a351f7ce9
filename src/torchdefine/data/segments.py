"""Where the segments of truncated back-propagation begin and end, step after step and epoch after epoch."""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

HALF_SHARE = 0.05  # the share of segments that aim at half the length
SPREAD = 5.0
SHORTEST = 5


class Segment(NamedTuple):
    """The tokens of one step: ``length`` of every row from ``start`` on."""

    start: int
    length: int

    @property
    def begins_epoch(self) -> bool:
        return self.start == 0


class SegmentPlan:
    """Cuts rows of ``row_length`` tokens into segments; any step can be asked for, in any order.

    Segments have ``length`` tokens, the last one of an epoch fewer. With a ``seed`` the lengths are random and
    different in every epoch, so that the cuts fall elsewhere each time (Merity et al., 2018): normal around ``length``,
    or for one in twenty around half of it.
    """

    def __init__(self, row_length: int, length: int, seed: int | None = None) -> None:
        self.row_length, self.length, self.seed = row_length, length, seed
        self._ends = [0]  # steps done after each epoch, as far as they were asked for
        self._cuts = lru_cache(maxsize=2)(self._draw_cuts)

    def segment(self, step: int) -> Segment:
        """The segment of step ``step``, counted from 0."""
        epoch = self._epoch_of(step)
        cuts, index = self._cuts(epoch), step - self._ends[epoch]
        return Segment(int(cuts[index]), int(cuts[index + 1] - cuts[index]))

    def steps_in(self, epochs: float) -> int:
        """How many steps that many epochs take, rounded up to a whole step."""
        exact = Fraction(str(epochs))  # as it is written: 0.1 of 70 steps is 7, not slightly more
        whole = int(exact)
        self._extend(whole + 1)
        of_next = self._ends[whole + 1] - self._ends[whole]
        return self._ends[whole] + math.ceil((exact - whole) * of_next)

    def epoch_after(self, steps: int) -> float:
        """How many epochs that many steps are."""
        epoch = self._epoch_of(steps)
        return epoch + (steps - self._ends[epoch]) / (self._ends[epoch + 1] - self._ends[epoch])

    def _epoch_of(self, step: int) -> int:
        while self._ends[-1] <= step:
            self._extend(len(self._ends))
        return bisect_right(self._ends, step) - 1

    def _extend(self, epochs: int) -> None:
        while len(self._ends) <= epochs:
            self._ends.append(self._ends[-1] + len(self._cuts(len(self._ends) - 1)) - 1)

    def _draw_cuts(self, epoch: int) -> np.ndarray:
        """0, where each further segment starts, and the end of the rows."""
        if self.seed is None:
            inner = np.arange(self.length, self.row_length, self.length)
        else:
            random = np.random.default_rng((self.seed, epoch))
            enough = self.row_length // SHORTEST + 1
            aims = np.where(random.random(enough) < HALF_SHARE, self.length / 2, float(self.length))
            lengths = np.maximum(SHORTEST, random.normal(aims, SPREAD).astype(np.int64))
            ends = lengths.cumsum()
            inner = ends[ends < self.row_length]
        return np.concatenate(([0], inner, [self.row_length]))
