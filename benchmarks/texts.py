"""Ids of real text, and ids spread over a vocabulary larger than the text's as a real one would be."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchdefine.data import encode_corpus, resolve_corpus

WIKIPEDIA_CUTOFFS = (20_000, 40_000, 200_000)
WIKIPEDIA_SHARES = (0.936, 0.031, 0.031, 0.002)
"""Of the tokens of Wikipedia text, in the bands that these cutoffs make of a vocabulary of 267,735 words."""
WIKIPEDIA_SIZE = 267_735


class RealText(NamedTuple):
    tokens: np.ndarray
    vocabulary: int

    def ids(self, shape: tuple[int, ...], device: torch.device, most: int | None = None) -> Tensor:
        """Rows of running text, far apart, as a batch has them; with ``most``, rarer words than so many are all the
        rarest of them."""
        taken = _laid_out(self.tokens, shape)
        return torch.from_numpy(taken if most is None else np.minimum(taken, most - 1)).to(device)

    def wide_ids(
        self, shape: tuple[int, ...], device: torch.device, size: int, cutoffs: tuple[int, int, int] = WIKIPEDIA_CUTOFFS
    ) -> Tensor:
        """Ids below ``size`` with Wikipedia's share of tokens in each band.

        A text whose vocabulary reaches into the last band is taken as it is. Otherwise its frequent words stay in
        their order, and a fixed seed puts rare ids between them, any of a band as often as any other.
        """
        if self.vocabulary > cutoffs[-1]:
            return self.ids(shape, device, size)
        random = np.random.default_rng(0)
        count = int(np.prod(shape))
        band = random.choice(len(cutoffs) + 1, count, p=WIKIPEDIA_SHARES)
        edges = np.array((0, *cutoffs, size))
        drawn = random.integers(edges[band], edges[band + 1])  # (count,)
        frequent = _laid_out(self.tokens[self.tokens < cutoffs[0]], shape)
        return torch.from_numpy(np.where(band.reshape(shape) == 0, frequent, drawn.reshape(shape))).to(device)


def _laid_out(tokens: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """As many rows as the shape has, each from another place of the text on."""
    rows, length = int(np.prod(shape[:-1])), shape[-1]
    starts = np.arange(rows) * (len(tokens) // rows)
    places = (starts[:, None] + np.arange(length)) % len(tokens)  # (rows, length)
    return tokens[places].astype(np.int64).reshape(shape)


@lru_cache(maxsize=2)
def real_text(data: str) -> RealText:
    """The beginning of the training text of a corpus, by name or folder."""
    corpus = encode_corpus(resolve_corpus(data))
    return RealText(np.asarray(corpus.splits["train"].tokens[:1_000_000]), len(corpus.tokenization))
