"""Language-model batches: a token stream cut into rows that are read side by side, segment by segment.

Shapes: B rows (the batch), L tokens in each row, T tokens in a segment.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchdefine.errors import UserError

IGNORE = -100
"""The target of padding; PyTorch's losses leave it out by default."""

HALF_LENGTH_PROBABILITY = 0.05  # of a segment that aims at half the length
LENGTH_STD = 5.0
SHORTEST = 5


class TokenStreams:
    """The first B · L of N tokens as B contiguous rows, L = N // B; each of them is a target exactly once.

    A row's first input is the token before its first target; for row 0 it is ``start_token``, normally ``<eos>``.
    ``rows`` keeps only some of the B rows, for one of several processes (see ``shard``). With ``pad`` no token is
    left over: L is rounded up, and the last rows are padded (see ``evaluation_streams``).
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        device: torch.device | str,
        start_token: int,
        rows: slice | None = None,
        *,
        pad: bool = False,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"The batch size is {batch_size}, but must be at least 1.")
        length = math.ceil(len(tokens) / batch_size) if pad else len(tokens) // batch_size
        if length < 1:
            raise UserError(
                f"The text has {len(tokens)} tokens, too few for a batch of {batch_size}: "
                "use a smaller batch size (train.batch_size) or a longer text."
            )
        kept = range(batch_size) if rows is None else range(batch_size)[rows]
        held = _lay_out(tokens, length, start_token, kept)
        self.length = length
        self.batch_size = len(kept)
        self._start_token = start_token
        self._padded = bool((held[:, -1] == IGNORE).any())
        self._host = held
        self._streams = torch.from_numpy(held).to(device)  # (B, L + 1)

    def segment(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (int64) for ``length`` tokens of each row from ``start`` on, fewer at the rows' end."""
        if not 0 <= start < self.length:
            raise IndexError(f"The segment starts at {start}, but the rows have {self.length} tokens.")
        end = min(start + length, self.length)
        inputs = self._streams[:, start:end].long()  # (B, T)
        targets = self._streams[:, start + 1 : end + 1].long()  # (B, T)
        if self._padded:
            inputs = inputs.masked_fill(inputs == IGNORE, self._start_token)
        return inputs, targets

    def host_targets(self, start: int, length: int) -> np.ndarray:
        """The targets of the same segment on the host, for callers that must not wait for the device."""
        return self._host[:, start + 1 : min(start + length, self.length) + 1]


def evaluation_streams(
    tokens: np.ndarray, batch_size: int, start_token: int, device: torch.device | str
) -> TokenStreams:
    """All N tokens as B rows, L = ⌈N / B⌉: every token is a target exactly once.

    The rest of the last rows is padding, with ``start_token`` as its inputs and ``IGNORE`` as its targets.
    """
    return TokenStreams(tokens, batch_size, device, start_token, pad=True)


def shard(batch_size: int, rank: int, world_size: int) -> slice:
    """The rows of a global batch for process ``rank`` of ``world_size``; together they see all of it."""
    if batch_size % world_size:
        lower = batch_size // world_size * world_size
        options = f"{lower} or {lower + world_size}" if lower else f"{world_size}"
        raise UserError(f"The batch size {batch_size} is not divisible by the {world_size} processes: use {options}.")
    own = batch_size // world_size
    return slice(rank * own, (rank + 1) * own)


def _lay_out(tokens: np.ndarray, length: int, start_token: int, rows: range) -> np.ndarray:
    """Rows of one input and ``length`` targets; places beyond the last token are ``IGNORE``."""
    held = np.full((len(rows), length + 1), IGNORE, dtype=np.int32)  # half the memory of int64, and ids fit
    for row, index in zip(held, rows, strict=True):
        start = index * length
        targets = tokens[start : start + length]
        row[1 : 1 + len(targets)] = targets
        if len(targets):
            row[0] = tokens[start - 1] if start else start_token
    return held


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
    or with probability 0.05 around half of it.
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
            aims = np.where(random.random(enough) < HALF_LENGTH_PROBABILITY, self.length / 2, float(self.length))
            lengths = np.maximum(SHORTEST, random.normal(aims, LENGTH_STD).astype(np.int64))
            ends = lengths.cumsum()
            inner = ends[ends < self.row_length]
        return np.concatenate(([0], inner, [self.row_length]))
