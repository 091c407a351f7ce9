"""Which words an embedding holds to be alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from torchdefine.data import Tokenization

FEWEST_SIGHTINGS = 10
"""Vectors of rarer words are mostly what they started as."""


def nearest_neighbours(
    table: Tensor, tokenization: Tokenization, words: Sequence[str], count: int = 6
) -> dict[str, list[tuple[str, float]]]:
    """For each of ``words`` in the vocabulary, the ``count`` nearest others by cosine, rare words left out."""
    directions = F.normalize(table.float(), dim=-1)  # (V, m)
    counts = tokenization.counts
    found = {}
    for word in words:
        index = tokenization.id(word)
        if index == tokenization.unk_id:
            continue
        cosines = directions @ directions[index]  # (V,)
        cosines[index] = -1
        if counts is not None:
            rare = [i for i, sightings in enumerate(counts) if sightings < FEWEST_SIGHTINGS]
            cosines[rare] = -1
        best = cosines.topk(min(count, len(cosines) - 1))
        found[word] = [(tokenization.token(int(i)), float(c)) for c, i in zip(best.values, best.indices, strict=True)]
    return found
