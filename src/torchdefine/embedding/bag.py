"""Bags of ids → one vector each: the sums, means or maxima of finished vectors, as ``nn.EmbeddingBag`` gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.embedding.define import SAVE_AGAIN, DeFINE
from torchdefine.embedding.map import as_ids
from torchdefine.errors import UserError
from torchdefine.files import read_sealed, write_sealed

Mode = Literal["sum", "mean", "max"]
MODES = ("sum", "mean", "max")
BAG_FILE = "bag.json"


class DeFINEBag(nn.Module):
    """Bags of ids → (bags, embedding_dim), called as ``nn.EmbeddingBag`` is.

    The unit computes equal ids of a batch once, so its dropout is drawn once for each of them; a GPU makes the host
    wait for their number. The padding token counts in no bag.

    Args:
        embedding: DeFINE, or whatever else maps ids to vectors and has num_embeddings, embedding_dim and padding_idx.
        mode: what a bag's vectors become: their sum, mean or maximum.
        include_last_offset: the offsets end with the number of ids.
    """

    def __init__(self, embedding: nn.Module, mode: Mode = "mean", include_last_offset: bool = False) -> None:
        super().__init__()
        if mode not in MODES:
            raise UserError(f"mode is {mode!r}, but must be one of {', '.join(MODES)}.")
        self.embedding: Any = embedding
        self.mode, self.include_last_offset = mode, include_last_offset

    @property
    def num_embeddings(self) -> int:
        return int(self.embedding.num_embeddings)

    @property
    def embedding_dim(self) -> int:
        return int(self.embedding.embedding_dim)

    @property
    def padding_idx(self) -> int | None:
        found: int | None = self.embedding.padding_idx
        return found

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Ids (N,) with the place at which each bag starts, or (bags, N) → (bags, embedding_dim)."""
        self._check(ids, offsets, per_sample_weights)
        vectors, places, padding = self._vectors_of(ids)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(vectors.dtype)
        bags: Tensor = F.embedding_bag(
            places,
            vectors,
            None if offsets is None else offsets.long(),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
        return bags

    def _vectors_of(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Vectors, the place of each id among them, and that of the padding token."""
        cached = getattr(self.embedding, "cached_vectors", None)
        if cached is not None and not self.embedding.has_other_weights():
            return cached, as_ids(ids, self.num_embeddings).long(), self.padding_idx
        types, places = torch.unique(ids, return_inverse=True)
        vectors = F.pad(self.embedding(types), (0, 0, 0, 1))  # (U + 1, m): the last is the padding token's
        if self.padding_idx is not None:
            places = places.masked_fill(ids == self.padding_idx, len(types))
        return vectors, places, len(types)

    def _check(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> None:
        if ids.ndim not in (1, 2):
            raise UserError(f"The ids have {ids.ndim} dimensions: give (N,) with offsets, or (bags, N).")
        if ids.ndim == 1 and offsets is None:
            raise UserError("Ids of one dimension need offsets: give the place at which each bag starts.")
        if ids.ndim == 2 and offsets is not None:
            raise UserError("Ids of two dimensions have a bag in each row: leave the offsets out.")
        if weights is not None and self.mode != "sum":
            raise UserError(f"per_sample_weights go with the mode sum, not with {self.mode}: use mode='sum'.")
        if weights is not None and weights.shape != ids.shape:
            shapes = f"{tuple(weights.shape)}, but the ids {tuple(ids.shape)}"
            raise UserError(f"per_sample_weights have the shape {shapes}: give one for each id.")

    def cached(self, *, dtype: torch.dtype | None = None) -> nn.EmbeddingBag:
        """An ``nn.EmbeddingBag`` that gives the same vectors without the unit, for inference."""
        return nn.EmbeddingBag.from_pretrained(
            self.embedding.table(dtype=dtype),
            mode=self.mode,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )

    def cache(self) -> Self:
        """Look up cached vectors, V × m numbers in memory, from now on until ``train()``, a resize or a load."""
        self.embedding.look_up(self.embedding.table())
        return self

    def resize(self, num_embeddings: int) -> Self:
        """Change the vocabulary in place, as ``DeFINE.resize`` does."""
        self.embedding.resize(num_embeddings)
        return self

    def save(self, folder: str | Path) -> None:
        """Write what ``DeFINE.save`` writes, and how bags are made of its vectors."""
        if not isinstance(self.embedding, DeFINE):
            raise UserError(f"A bag over a {type(self.embedding).__name__} has no files: save its state_dict.")
        self.embedding.save(folder)
        write_sealed(Path(folder) / BAG_FILE, {"mode": self.mode, "include_last_offset": self.include_last_offset})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what ``save`` wrote."""
        bag = read_sealed(Path(folder) / BAG_FILE, SAVE_AGAIN)
        return cls(DeFINE.load(folder), bag["mode"], bag["include_last_offset"])

    def extra_repr(self) -> str:
        return f"mode={self.mode}" + (", include_last_offset=True" if self.include_last_offset else "")
