"""Batches of sentence pairs by tokens: which pairs make up a batch depends on the seed and its number alone.

Pairs are put into buckets by their longer side. A batch of a bucket has as many pairs as fit into the given number of
tokens, so the number of batches in a pass never changes, and any batch of any pass can be made by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from torchdefine.data.batches import IGNORE
from torchdefine.data.bitext import SentencePairs
from torchdefine.data.tokenizer import TokenizerPair
from torchdefine.errors import UserError

BUCKET_GROWTH = 1.12
"""Ratio of each bucket's longest sentence to the previous one's; a smaller ratio pads less, but mixes less."""


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

    ``tokens`` is the number of places that the longer side of a batch may take, padding included.
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
        return PairBatch(self._moved(source), self._moved(inputs), self._moved(targets), targets, self.tokens(number))

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

    def _moved(self, rows: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(rows))
        if self.device.type == "cuda":  # from pinned memory the copy does not hold up the host
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def bucket_bounds(longest: int) -> np.ndarray:
    """The longest sentence of each bucket, from 4 on by ``BUCKET_GROWTH`` and at least by one, up to ``longest``."""
    bounds = [4]
    while bounds[-1] < longest:
        bounds.append(min(longest, max(bounds[-1] + 1, int(bounds[-1] * BUCKET_GROWTH))))
    return np.array(bounds)
