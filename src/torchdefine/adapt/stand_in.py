"""The modules that replace an ``nn.Embedding``, and its table where it was shared."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from torchdefine.embedding import LooksUp, TokenEmbedding, finished_table
from torchdefine.embedding.map import ProjectiveMap, StandardMap
from torchdefine.errors import UserError
from torchdefine.tables import CompactTable, DenseRows
from torchdefine.tables.rows import BandedRows

LAYOUT_VERSION = 1

HeadKind = Literal["map", "vectors", "own"]
"""What an output layer is tied to: the map's table through a projection, the vectors, or nothing."""


class Face:
    """What a model sees where its ``nn.Embedding`` was: the vectors of a ``StandIn``, times this place's ``scale``."""

    stand_in: Any
    scale: float

    @property
    def num_embeddings(self) -> int:
        return int(self.stand_in.table.num_embeddings)

    @property
    def embedding_dim(self) -> int:
        return int(self.stand_in.table.embedding_dim)

    @property
    def padding_idx(self) -> int | None:
        found: int | None = self.stand_in.table.padding_idx
        return found

    def forward(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.stand_in.vectors(ids)  # (…, m)
        return vectors if self.scale == 1.0 else vectors * self.scale

    def cached(self, *, dtype: torch.dtype | None = None) -> nn.Embedding:
        """An ``nn.Embedding`` of its own with the same answers, the scale included; this module stays as it is."""
        vectors: Tensor = self.stand_in.all_vectors()
        scaled = (vectors if self.scale == 1.0 else vectors * self.scale).to(dtype or vectors.dtype)
        return nn.Embedding.from_pretrained(scaled, freeze=True, padding_idx=self.padding_idx)


class StandIn(Face, LooksUp):
    """Ids → the vectors of ``table``, times ``scale``; (…) → (…, embedding_dim), with the face of an ``nn.Embedding``.

    ``table`` is a ``TokenEmbedding`` (DeFINE and its baselines) or a ``CompactTable``. ``weight`` is not a table but
    one number, the version of this layout. It has the dtype and device of the vectors. Files hold it under the name of
    the replaced table, so that a program that expects the old table meets a wrong shape and stops, instead of going on
    with random numbers. ``heads`` says what an output layer that shared the old table gets.
    """

    def __init__(self, table: nn.Module, like: Tensor, scale: float = 1.0, heads: HeadKind = "own") -> None:
        super().__init__()
        self.table = table
        self.scale, self.heads = scale, heads
        self.weight: Tensor
        self.register_buffer("weight", torch.full((1,), LAYOUT_VERSION, dtype=like.dtype, device=like.device))

    @property
    def stand_in(self) -> StandIn:
        return self

    def vectors(self, ids: Tensor) -> Tensor:
        """(…) → (…, m), unscaled."""
        source = self.table if self.looked_up is None else self.looked_up
        found: Tensor = source(ids)
        return found.to(self.weight.dtype)

    def all_vectors(self) -> Tensor:
        """(V, m), unscaled, computed a part of the vocabulary at a time."""
        return finished_table(self.table, dtype=self.weight.dtype, device=self.weight.device)

    def rows(self, start: int, stop: int) -> Tensor:
        """The vectors of a range of ids, unscaled: (stop - start, m)."""
        if self.cached_vectors is not None:
            return self.cached_vectors[start:stop].to(self.weight.dtype)
        return self.vectors(torch.arange(start, stop, device=self.weight.device))

    def cache(self) -> Self:
        """Look up cached vectors, V × m numbers in memory, from now on until ``train()``, a resize or a load."""
        self.look_up(self.all_vectors())
        return self

    def resize(self, num_embeddings: int, *, from_mean: bool = False) -> None:
        """Change the vocabulary in place: old rows stay, new ones are drawn like the others or start at their mean."""
        self.look_up(None)
        if isinstance(self.table, CompactTable):
            self.table = _grown(self.table, num_embeddings, from_mean)
            return
        assert isinstance(self.table, TokenEmbedding)
        old = self.num_embeddings
        self.table.resize(num_embeddings)
        if from_mean and num_embeddings > old and isinstance(self.table.map, StandardMap | ProjectiveMap):
            weight = self.table.map.table.weight
            with torch.no_grad():
                weight[old:] = weight[:old].mean(0)

    def extra_repr(self) -> str:
        scale = "" if self.scale == 1.0 else f", scale={self.scale:g}"
        return f"{self.num_embeddings:,}, {self.embedding_dim}{scale}" + ("" if self.looked_up is None else ", cached")


class Borrower(nn.Module):
    """Uses a ``StandIn`` that stands elsewhere, and is trained and saved there."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__()
        self._stand_in = (stand_in,)  # in a tuple, so that the shared table is not registered a second time

    @property
    def stand_in(self) -> StandIn:
        return self._stand_in[0]


class SharedStandIn(Face, Borrower):
    """Another place where the same table is looked up."""

    def __init__(self, stand_in: StandIn, scale: float = 1.0) -> None:
        super().__init__(stand_in)
        self.scale = scale

    @property
    def weight(self) -> Tensor:
        return self.stand_in.weight


def cache_tables(model: nn.Module) -> list[str]:
    """Compute all vectors of every replaced table once and look them up from then on; returns the tables' names.

    For inference: it lasts until ``model.train()`` or ``load_state_dict``, and is never saved. It takes the memory of
    the old tables again, but saves the time of the units.
    """
    stand_ins = {name: module for name, module in model.named_modules() if isinstance(module, StandIn)}
    if not stand_ins:
        raise UserError("The model has no replaced table to cache: replace its embeddings first.")
    for stand_in in stand_ins.values():
        stand_in.eval()
        stand_in.cache()
    return list(stand_ins)


@torch.no_grad()
def _grown(table: CompactTable, num_embeddings: int, from_mean: bool) -> CompactTable:
    """The same table with rows added, uncompressed, after its own."""
    added = num_embeddings - table.num_embeddings
    if added < 0:
        raise UserError(
            f"A compact table cannot lose rows: keep at least {table.num_embeddings}, or resize the model before its "
            "table is fitted."
        )
    if not added:
        return table
    start = torch.zeros(table.embedding_dim, device=table.mean.device)
    if from_mean:
        start = finished_table(table, dtype=torch.float32).mean(0) - table.mean
    rows = DenseRows.of(start.expand(added, -1)).to(table.mean.device)
    rows.requires_grad_(any(parameter.requires_grad for parameter in table.rows.parameters()))
    grown = CompactTable(BandedRows([table.rows, rows], ranked=False), table.mean, table.padding_idx)
    grown.mean = table.mean  # keeps its dtype and requires_grad
    return grown.train(table.training)
