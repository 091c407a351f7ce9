"""Ids → vectors through a map and a unit: what DeFINE and its baselines have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.embedding.adaptive_map import AdaptiveMap
from torchdefine.embedding.dense import DenseLinear, DenseMLP, DenseProjection
from torchdefine.embedding.distinct import FEWEST_IDS, LARGEST_SHARE, distinct_ids
from torchdefine.embedding.group_linear import GroupLinear
from torchdefine.embedding.map import MapLayer, ProjectiveMap, StandardMap, as_ids
from torchdefine.embedding.table import LooksUp, cached_embedding, finished_table
from torchdefine.embedding.unit import DefineUnit, ExpansionLayer
from torchdefine.errors import UserError
from torchdefine.ops import is_plain

OUR_MAPS = (StandardMap, ProjectiveMap, AdaptiveMap)
OUR_UNITS = (DefineUnit, nn.Linear, DenseProjection, DenseMLP)
OUR_PARTS = {
    *OUR_MAPS,
    *OUR_UNITS,
    *(DenseLinear, ExpansionLayer, GroupLinear),
    *(nn.Dropout, nn.Embedding, nn.GroupNorm, nn.LayerNorm, nn.ModuleList, nn.ParameterList),
}
"""The modules that maps and units are made of: each handles every token independently."""


def _is_ours(part: Any) -> bool:
    """Whether a map or a unit is free of foreign layers, hooks and forwards."""
    return all(type(module) in OUR_PARTS and is_plain(module, type(module)) for module in part.modules())


class TokenEmbedding(LooksUp):
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

    def forward(self, ids: Tensor, distinct: int | None = None) -> Tensor:
        """(…) whole numbers → (…, embedding_dim).

        ``distinct`` is an upper bound on the number of different ids; with it a GPU computes each of them once. A CPU
        finds them by itself.
        """
        if (table := self.looked_up) is not None:
            return self._looked_up(ids, table)
        ids = as_ids(ids, self.num_embeddings)
        if not self._worth_sharing(ids, distinct):
            return self._computed(ids)
        types, places = distinct_ids(ids, distinct)
        return F.embedding(places, self._computed(types, each_once=True))

    def _computed(self, ids: Tensor, each_once: bool = False) -> Tensor:
        vectors: Tensor = self.map(ids, each_once) if self._has_our_map else self.map(ids)  # type: ignore[call-arg]
        if self.training and self.row_dropout:
            vectors = vectors * self._kept_rows(vectors)[ids].unsqueeze(-1)
        if self.unit is None:
            return vectors
        finished: Tensor = self.unit(vectors)  # (…, m)
        if self.padding_idx is not None:  # the unit's biases would give the padding token a vector
            finished = finished.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0.0)
        return finished

    def _worth_sharing(self, ids: Tensor, distinct: int | None) -> bool:
        """Whether equal tokens may be computed once, with some gain and without waiting for the device."""
        if distinct is None and (ids.device.type != "cpu" or torch.compiler.is_compiling()):
            return False
        if ids.numel() < FEWEST_IDS:
            return False
        if self.unit is None:  # only several projected tables cost more than finding equal tokens
            return type(self.map) is AdaptiveMap and ids.device.type == "cpu" and _is_ours(self.map)
        return self.shares_equal_tokens and (distinct is None or distinct <= LARGEST_SHARE * ids.numel())

    @property
    def shares_equal_tokens(self) -> bool:
        """Whether a token's vector depends on nothing else in the batch, so that equal tokens can share it."""
        unit = self.unit
        if type(unit) is DefineUnit and self.training and unit.config.dropout:
            return False
        return type(unit) in OUR_UNITS and self._has_our_map and _is_ours(unit) and _is_ours(self.map)

    @property
    def _has_our_map(self) -> bool:
        """Other maps, subclasses of ours too, may depend on positions or random draws, and take only ids."""
        return type(self.map) in OUR_MAPS

    @property
    def knows_tokens_only(self) -> bool:
        """Whether the order of the ids cannot matter: random draws, if any, are one per token type.

        Foreign code may depend on positions: another forward, a hook, another map.
        """
        if type(self).forward is not TokenEmbedding.forward or not is_plain(self, type(self)):
            return False
        return self.shares_equal_tokens or (self.unit is None and self._has_our_map and _is_ours(self.map))

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
