"""The different tokens of a batch, so that each goes through a unit once: most tokens of a text repeat others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchdefine.embedding.map import as_ids

FEWEST_IDS = 64
MOST_DIFFERENT = 0.75
"""If a larger fraction of the ids is different, finding them costs more than it saves."""


class SharedTokens:
    """An embedding that computes every different token of a batch once; chosen when the embedding is prepared."""

    def __init__(self, embedding: Any, on_cpu_only: bool) -> None:
        self.embedding, self.on_cpu_only = embedding, on_cpu_only

    def __call__(self, ids: Tensor, distinct: int | None = None) -> Tensor:
        """``distinct`` is an upper bound on the number of different ids; without it only a CPU finds them."""
        if self.embedding.looked_up is not None or not self._pays(ids, distinct):
            vectors: Tensor = self.embedding(ids)
            return vectors
        types, places = distinct_ids(as_ids(ids, self.embedding.num_embeddings), distinct)
        return F.embedding(places, self.embedding.compute(types, each_once=True))

    def _pays(self, ids: Tensor, distinct: int | None) -> bool:
        if torch.compiler.is_compiling() or ids.numel() < FEWEST_IDS:  # exporting must not ask for a size
            return False
        if ids.device.type == "cpu":
            return distinct is None or distinct <= MOST_DIFFERENT * ids.numel() or self.on_cpu_only
        return not self.on_cpu_only and distinct is not None and distinct <= MOST_DIFFERENT * ids.numel()


def distinct_ids(ids: Tensor, room: int | None) -> tuple[Tensor, Tensor]:
    """The different ids in rising order, (room,), and where each id is among them: ``distinct[places] == ids``.

    Ids are below 2³¹, as any vocabulary is.

    Without ``room`` there are as many as are found, and the host has to wait for a GPU to count them. With it, shapes
    are fixed and spare places repeat id 0; it must not be smaller than the number of different ids.
    """
    if room is None:
        distinct, places = torch.unique(ids, return_inverse=True)
        return distinct, places
    ordered, order = ids.reshape(-1).int().sort()  # a GPU sorts byte by byte: four of them, not eight
    ranks = F.pad((ordered[1:] != ordered[:-1]).long(), (1, 0)).cumsum(0)  # (N,)
    places = torch.empty_like(ordered).scatter_(0, order, ranks.int())
    distinct = ordered.new_zeros(room).scatter_(0, ranks, ordered)
    return distinct.to(ids.dtype), places.view(ids.shape)


def count_distinct(ids: np.ndarray, num_embeddings: int) -> int:
    """How many different non-negative ids there are, on the host; marking them is faster than sorting."""
    seen = np.zeros(num_embeddings, dtype=bool)
    seen[ids[ids >= 0]] = True
    return int(np.count_nonzero(seen))
