"""Slim embeddings (Li et al., AAAI 2018): the rows of a table are made of shared sub-vectors, in a shuffled order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdefine.config import MOST_DEEP, setting
from torchdefine.embedding.adaptive_map import rows_inside
from torchdefine.embedding.map import MapConfig, StandardMap, VocabularyFacts, as_ids, check_resize, check_table
from torchdefine.errors import UserError, check_count


@dataclass(frozen=True)
class SlimConfig(MapConfig):
    """Rows made of shared sub-vectors."""

    kind: str = "slim"
    parts: int = setting(8, "Number of sub-vectors in a row.", at_least=1, at_most=MOST_DEEP)
    ratio: float = setting(8.0, "A table without sharing would have this many times the numbers.", at_least=1)

    def build(self, vocabulary: VocabularyFacts, width: int | None) -> SlimMap:
        pool = max(round(vocabulary.size * self.parts / self.ratio), 1)
        return SlimMap(vocabulary.size, self.map_dim, self.parts, pool, scale=self.factor(self.map_dim))


class SlimMap(StandardMap):
    """Rows of ``parts`` sub-vectors, each one of ``pool``, (pool × n / parts).

    Which ones is drawn once and saved: all are used equally often, in an order shuffled over the whole vocabulary.
    """

    kind = "slim"
    bits = None
    saved = ("num_embeddings", "map_dim", "parts", "pool", "padding_idx", "scale", "sparse", "std")

    def __init__(
        self,
        num_embeddings: int,
        map_dim: int,
        parts: int,
        pool: int,
        padding_idx: int | None = None,
        scale: float = 1.0,
        sparse: bool = False,
    ) -> None:
        for name, count in (("parts", parts), ("pool", pool)):
            check_count(name, count)
        if map_dim % parts:
            raise UserError(f"map_dim {map_dim} cannot be cut into {parts} parts: use a divisor of it.")
        nn.Module.__init__(self)  # a StandardMap's own would take memory for a whole table
        self.padding_idx = check_table(num_embeddings, map_dim, padding_idx)
        self.num_embeddings, self.map_dim, self.output_dim = num_embeddings, map_dim, map_dim
        self.parts, self.pool, self.scale, self.std = parts, pool, scale, 1.0
        self.table = nn.Embedding(pool, map_dim // parts, sparse=sparse)
        self.places: Tensor = nn.Buffer(shuffled(num_embeddings * parts, pool).view(num_embeddings, parts))

    def reset_parameters(self, std: float | None = None) -> None:
        self.std = std = self.std if std is None else std
        nn.init.normal_(self.table.weight, std=std)

    def forward(self, ids: Tensor, each_once: bool = False) -> Tensor:
        ids = as_ids(ids, self.num_embeddings)
        places = self.places[ids]  # (…, parts)
        if self.padding_idx is None:
            parts = self.table(places)  # (…, parts, n / parts)
        else:
            inside = (ids != self.padding_idx).unsqueeze(-1).expand_as(places)
            parts = rows_inside(self.table, places, inside) if self.sparse else self.table(places) * inside[..., None]
        vectors: Tensor = parts.flatten(-2)  # (…, n)
        return vectors * self.scale if self.scale != 1.0 else vectors

    def compared(self) -> Tensor:
        ids = torch.arange(self.num_embeddings, device=self.places.device)
        return self(ids) / self.scale

    def resize(self, num_embeddings: int) -> None:
        """Rows that come later are made of the same sub-vectors, as trained."""
        check_resize(num_embeddings, self.padding_idx)
        more = max(num_embeddings - self.num_embeddings, 0)
        later = shuffled(more * self.parts, self.pool).view(more, self.parts).to(self.places.device)
        self.places = torch.cat((self.places[:num_embeddings], later))
        self.num_embeddings = num_embeddings

    def extra_repr(self) -> str:
        shared = f"{self.num_embeddings:,} rows of {self.parts} out of {self.pool:,} sub-vectors"
        return ", ".join(filter(None, (shared, super().extra_repr())))


def shuffled(count: int, pool: int) -> Tensor:
    """(count,) places in the pool, each as often as any other but for one, in random order."""
    if torch.empty(0).is_meta:
        return torch.empty(count, dtype=torch.int32)
    order = torch.randperm(count, device="cpu") % pool
    return order.int().to(torch.empty(0).device)  # the default device, also of a `with torch.device(…)` in torch 2.6
