"""Ids → vectors through a map and a unit: what DeFINE and its baselines have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.embedding.adaptive_map import AdaptiveMap
from torchdefine.embedding.dense import DenseMLP, DenseProjection
from torchdefine.embedding.distinct import SharedTokens
from torchdefine.embedding.map import MapLayer, ProjectiveMap, StandardMap, as_ids
from torchdefine.embedding.table import LooksUp, cached_embedding, finished_table
from torchdefine.embedding.unit import DefineUnit
from torchdefine.errors import UserError
from torchdefine.modes import Prepared, untouched

OUR_MAPS = (StandardMap, ProjectiveMap, AdaptiveMap)
OUR_UNITS = (DefineUnit, nn.Linear, DenseProjection, DenseMLP)
"""Units that handle every token independently."""


class TokenEmbedding(LooksUp, Prepared):
    """A map layer, then a unit from its vectors to the finished ones; (…) → (…, embedding_dim).

    ``unit`` is any module from (…, map_layer.output_dim) to (…, embedding_dim), or None to take the map's vectors as
    they are. ``row_dropout`` is the share of token types whose map vectors are zeroed in a training step.
    """

    def __init__(self, map_layer: MapLayer, unit: nn.Module | None = None, embedding_dim: int | None = None) -> None:
        super().__init__()
        self.map: MapLayer = map_layer
        self.unit = unit
        self.embedding_dim = map_layer.output_dim if embedding_dim is None else embedding_dim
        self.row_dropout = 0.0
        self._vector_dtype = torch.float32
        self.shared: SharedTokens | None
        object.__setattr__(self, "shared", None)  # around nn.Module: it refers to this very module

    @classmethod
    def beside(cls, map_layer: MapLayer, partner: TokenEmbedding) -> TokenEmbedding:
        """An embedding with its own map and the unit of ``partner``, which alone trains, saves and moves that unit."""
        embedding = TokenEmbedding(map_layer, None, partner.embedding_dim)
        object.__setattr__(embedding, "unit", partner.unit)  # around nn.Module, which would register it a second time
        return embedding

    @property
    def num_embeddings(self) -> int:
        return self.map.num_embeddings

    @property
    def map_dim(self) -> int:
        return self.map.map_dim

    @property
    def padding_idx(self) -> int | None:
        return self.map.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        """(…) whole numbers → (…, embedding_dim)."""
        if (table := self.looked_up) is not None:
            return self._looked_up(ids, table)
        return self.compute(ids)

    def compute(self, ids: Tensor, each_once: bool = False) -> Tensor:
        """Map, then unit; ``each_once`` if no id stands twice."""
        vectors: Tensor = self.map(ids, each_once) if each_once else self.map(ids)  # type: ignore[call-arg]
        if self.training and self.row_dropout:
            vectors = vectors * self._kept_rows(vectors)[ids.long()].unsqueeze(-1)
        if self.unit is None:
            return vectors
        finished: Tensor = self.unit(vectors)  # (…, m)
        if (padding := self.map.padding_idx) is not None:  # the unit's biases would give the padding token a vector
            finished = finished.masked_fill((ids == padding).unsqueeze(-1), 0.0)
        return finished

    def prepare(self, on: bool = True) -> None:
        """Decide whether equal tokens of a batch are computed once, and whether their order may be changed.

        Only where a token's vector depends on nothing else in the batch: not with other maps and units than ours, and
        not where dropout draws anew for every place.
        """
        super().prepare(on and type(self.map) in OUR_MAPS and type(self).forward is TokenEmbedding.forward)
        unit, drops = self.unit, self.training and isinstance(self.unit, DefineUnit) and self.unit.config.dropout
        by_token = self.fused and (unit is None or (type(unit) in OUR_UNITS and untouched(unit) and not drops))
        banded = unit is None and isinstance(self.map, AdaptiveMap)  # several projected tables cost more than sorting
        compiled = self._compiled_call_impl is not None  # then it is called as a whole
        shares = by_token and (unit is not None or banded) and not compiled
        self.fused = by_token
        object.__setattr__(self, "shared", SharedTokens(self, on_cpu_only=banded) if shares else None)

    def _looked_up(self, ids: Tensor, table: nn.Module) -> Tensor:
        """As short as possible: on a GPU the look-up itself takes less time than a few lines of Python."""
        if type(ids) is not Tensor or not ids.is_cuda or ids.dtype is not torch.int64:
            ids = as_ids(ids, self.num_embeddings)
        vectors: Tensor = F.embedding(ids, table.weight) if type(table) is nn.Embedding else table(ids)
        return vectors if vectors.dtype is self._vector_dtype else vectors.to(self._vector_dtype)

    def _kept_rows(self, like: Tensor) -> Tensor:
        """1 / (1 - p) for the token types kept in this step and 0 for the others: (V,)."""
        return F.dropout(torch.ones(self.num_embeddings, device=like.device, dtype=like.dtype), self.row_dropout)

    def look_up(self, table: Tensor | nn.Module | None) -> None:
        super().look_up(table)
        self._vector_dtype = self._dtype_of_map()

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._vector_dtype = self._dtype_of_map()
        return self

    def _dtype_of_map(self) -> torch.dtype:
        """The dtype of the map's first floating-point weight; float32 for a foreign map without any."""
        weights = itertools.chain(self.map.parameters(), self.map.buffers())  # type: ignore[attr-defined]
        return next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)

    def extra_repr(self) -> str:
        own = sum(parameter.numel() for parameter in self.parameters())
        plain = self.num_embeddings * self.embedding_dim
        return f"{self.num_embeddings:,} → {self.embedding_dim}: {own:,} parameters, nn.Embedding would have {plain:,}"

    def reset_parameters(self) -> None:
        self.look_up(None)
        self.map.reset_parameters()
        if self.unit is not None:
            reset = getattr(self.unit, "reset_parameters", None)
            if reset is None:
                raise UserError(f"The unit {type(self.unit).__name__} has no reset_parameters: give it one.")
            reset()

    def table(self, *, dtype: torch.dtype | None = None, progress: Callable[[int, int], None] | None = None) -> Tensor:
        """All finished vectors, (V, m), computed a chunk of tokens at a time."""
        return finished_table(self, dtype=dtype, progress=progress)

    def cached(self, *, dtype: torch.dtype | None = None) -> nn.Embedding:
        """An ``nn.Embedding`` that gives the same vectors without the unit, for inference."""
        return cached_embedding(self, dtype=dtype)

    def resize(self, num_embeddings: int) -> Self:
        """Change the vocabulary in place: old rows stay bit for bit, new ones start like the others did.

        The table becomes a new parameter, so give it to the optimiser again.
        """
        self.map.resize(num_embeddings)
        self.look_up(None)
        return self


def embedded(embedding: TokenEmbedding, ids: Tensor, distinct: int | None = None) -> Tensor:
    """The vectors of ids, each different token computed once where the embedding was prepared for it."""
    if embedding.shared is None:
        vectors: Tensor = embedding(ids)
        return vectors
    return embedding.shared(ids, distinct)


def count_parameters(model: nn.Module, embeddings: Iterable[TokenEmbedding], context: nn.Module) -> dict[str, int]:
    """The parameters of a model's units, of its context model, and of all else; shared ones count once."""
    units = {p for embedding in embeddings if embedding.unit is not None for p in embedding.unit.parameters()}
    define, within = sum(p.numel() for p in units), sum(p.numel() for p in context.parameters())
    total = sum(p.numel() for p in model.parameters())
    return {"define": define, "context": within, "input_output": total - define - within, "total": total}
