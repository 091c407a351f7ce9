"""Batches: a text as streams that are read side by side, segment by segment, and pairs of sentences by tokens.

Shapes: B rows (the batch), L tokens in each row, T tokens in a segment; S and T tokens of a source and its target.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from torchdefine.data.bitext import SentencePairs
from torchdefine.data.tokenizer import TokenizerPair
from torchdefine.errors import UserError

IGNORE = -100
"""The target of padding; PyTorch's losses leave it out by default."""

HALF_LENGTH_PROBABILITY = 0.05  # of a segment that aims at half the length
LENGTH_STD = 5.0
SHORTEST = 5
BUCKET_GROWTH = 1.12
"""Ratio of each bucket's longest sentence to the previous one's; a smaller ratio pads less, but mixes less."""


class TokenStreams:
    """The first B · L of N tokens as B contiguous rows, L = N // B; each of them is a target exactly once.

    A row's first input is the token before its first target; for row 0 it is ``start_token``, normally ``<eos>``.
    ``rows`` keeps only some of the B rows, for one of several processes (see ``shard``). With ``pad`` no token is left
    over: L = ⌈N / B⌉, and the last rows are padded, with ``start_token`` as inputs and ``IGNORE`` as targets.
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
            problem = f"The text has {len(tokens)} tokens, too few for a batch of {batch_size}"
            raise UserError(f"{problem}: use a smaller batch size (train.batch_size) or a longer text.")
        kept = range(batch_size)[rows or slice(None)]
        held = np.full((len(kept), length + 1), IGNORE, dtype=np.int32)  # half the memory of int64, and ids fit
        for row, start in zip(held, (index * length for index in kept), strict=True):
            targets = tokens[start : start + length]
            row[1 : 1 + len(targets)] = targets
            if len(targets):
                row[0] = tokens[start - 1] if start else start_token
        self.length, self.batch_size = length, len(kept)
        self._start_token, self._padded = start_token, bool((held[:, -1] == IGNORE).any())
        self._host, self._streams = held, torch.from_numpy(held).to(device)  # (B, L + 1)

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


def shard(batch_size: int, rank: int, world_size: int, parts: int = 1) -> slice:
    """The rows of a global batch for process ``rank`` of ``world_size``, in as many ``parts`` of equal size.

    Together the processes see all of it.
    """
    if batch_size % world_size:
        lower = batch_size // world_size * world_size
        options = f"{lower} or {lower + world_size}" if lower else f"{world_size}"
        raise UserError(f"The batch size {batch_size} is not divisible by the {world_size} processes: use {options}.")
    own = batch_size // world_size
    if own % parts:
        problem = f"The {own} rows of a process cannot be split into {parts} equal parts"
        raise UserError(f"{problem}: change train.batch_size or train.accumulate.")
    return slice(rank * own, (rank + 1) * own)


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

    def segment(self, step: int) -> tuple[int, int]:
        """Where the segment of step ``step`` (from 0) starts in every row, and its length; an epoch begins at 0."""
        epoch = self._epoch_of(step)
        cuts, index = self._cuts(epoch), step - self._ends[epoch]
        return int(cuts[index]), int(cuts[index + 1] - cuts[index])

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


@dataclass(frozen=True)
class PairBatch:
    """Padded ids of B pairs on the device, and what the host knows of them."""

    source: Tensor
    """(B, S), each ended by ``<eos>``."""
    inputs: Tensor
    """(B, T), begun by ``<bos>``."""
    targets: Tensor
    """(B, T), ended by ``<eos>``; padding is ``IGNORE``."""
    host_targets: np.ndarray
    tokens: int
    """How many targets are predicted."""


class BitextBatches:
    """The batches of a split in a shuffled order, or with ``seed`` None in buckets from short to long, once each.

    Pairs are put into buckets by their longer side, and a batch has as many pairs of a bucket as fit into ``tokens``
    places of that side, padding included. So the number of batches in a pass never changes, and any batch of any pass
    can be made by itself: which pairs it has depends on the seed and its number alone.
    """

    def __init__(
        self,
        pairs: SentencePairs,
        tokenization: TokenizerPair,
        tokens: int,
        device: torch.device | str,
        seed: int | None = None,
    ) -> None:
        if tokens < 1:
            raise UserError(f"A batch has {tokens} tokens, but must have at least 1.")
        self._pairs, self._seed, self.device = pairs, seed, torch.device(device)
        self._source, self._target = tokenization.source, tokenization.target
        self._ends = (pairs.source_ends, pairs.target_ends)  # each (n,)
        self._lengths = [np.diff(ends, prepend=0) for ends in self._ends]  # each (n,), <eos> included
        longer = np.maximum(*self._lengths)
        self._bounds = bucket_bounds(int(longer.max()))
        bucket = np.searchsorted(self._bounds, longer)  # (n,)
        self._members = [np.flatnonzero(bucket == index) for index in range(len(self._bounds))]
        self._capacities = [max(1, int(tokens // bound)) for bound in self._bounds]
        self._order = lru_cache(maxsize=1)(self._shuffled)

    @property
    def per_epoch(self) -> int:
        """How many batches a pass over the text takes."""
        sizes = zip(self._members, self._capacities, strict=True)
        return sum(-(-len(members) // capacity) for members, capacity in sizes)

    def batch(self, number: int) -> PairBatch:
        """Batch ``number``, counted from 0 through all passes."""
        indices = self.indices(number)
        lengths = [int(side[indices].max()) for side in self._lengths]
        if self.device.type == "cuda":  # few different shapes, so that few CUDA graphs serve all
            lengths = [int(self._bounds[np.searchsorted(self._bounds, max(lengths))])] * 2
        source = self._rows(0, indices, lengths[0], self._source.pad_id)  # (B, S)
        targets = self._rows(1, indices, lengths[1], IGNORE)  # (B, T)
        inputs = np.concatenate((np.full((len(indices), 1), self._target.bos_id), targets[:, :-1]), axis=1)
        # No target is counted at or after <eos> of the inputs, so any id will do there.
        inputs = np.where(inputs == IGNORE, self._target.pad_id, inputs)
        moved = [to_device(ids, self.device) for ids in (source, inputs, targets)]
        return PairBatch(moved[0], moved[1], moved[2], targets, self.tokens(number))

    def indices(self, number: int) -> np.ndarray:
        """Which pairs batch ``number`` is made of."""
        epoch, place = divmod(number, self.per_epoch)
        return self._order(epoch)[place]

    def tokens(self, number: int) -> int:
        """How many targets batch ``number`` predicts, without making it."""
        return int(self._lengths[1][self.indices(number)].sum())

    def _shuffled(self, epoch: int) -> list[np.ndarray]:
        random = None if self._seed is None else np.random.default_rng([self._seed, epoch])
        batches: list[np.ndarray] = []
        for members, capacity in zip(self._members, self._capacities, strict=True):
            key = self._lengths[0][members].astype(np.float64)  # beside sources of similar length, a pair pads less
            if random is not None:
                key += random.uniform(0, 3, len(members))
            ordered = members[np.argsort(key, kind="stable")]
            batches += [ordered[at : at + capacity] for at in range(0, len(ordered), capacity)]
        return batches if random is None else [batches[index] for index in random.permutation(len(batches))]

    def _rows(self, side: int, indices: np.ndarray, length: int, fill: int) -> np.ndarray:
        tokens = (self._pairs.source, self._pairs.target)[side].tokens
        lengths = self._lengths[side][indices]
        starts = self._ends[side][indices] - lengths
        places = np.arange(length)
        inside = places < lengths[:, None]  # (B, T)
        at = np.where(inside, starts[:, None] + places, 0)
        return np.where(inside, tokens[at].astype(np.int64), fill)


def to_device(array: np.ndarray, device: torch.device | str) -> Tensor:
    """A copy that the host does not wait for."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cuda":  # only pinned memory is copied without the host
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def bucket_bounds(longest: int) -> np.ndarray:
    """The longest sentence of each bucket, from 4 on by ``BUCKET_GROWTH`` and at least by one, up to ``longest``."""
    bounds = [4]
    while bounds[-1] < longest:
        bounds.append(min(longest, max(bounds[-1] + 1, int(bounds[-1] * BUCKET_GROWTH))))
    return np.array(bounds)
