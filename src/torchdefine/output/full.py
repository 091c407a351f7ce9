"""Layers over the rows of a map or of an embedding, and the plain one: a single softmax over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.config import setting
from torchdefine.embedding import AdaptiveConfig, MapConfig, TokenEmbedding, VocabularyFacts
from torchdefine.embedding.map import ProjectiveMap, StandardMap
from torchdefine.embedding.token_embedding import sizes_read
from torchdefine.errors import UserError, check_count
from torchdefine.ops import exact_dtype
from torchdefine.output.layer import OutputConfig, OutputLayer
from torchdefine.output.linear_cross_entropy import Table, Targets, table_losses


class MapSoftmax(OutputLayer):
    """A layer over the tables of a map: tied, their owner trains, saves, moves and resizes them; or its own.

    It is tied to a map's tables, or to the finished vectors of an embedding.
    """

    def __init__(self, hidden_dim: int, tied_to: Any) -> None:
        super().__init__(hidden_dim)
        finished = isinstance(tied_to, TokenEmbedding)
        # In tuples, so that what is tied is not registered and saved a second time.
        self._map = (tied_to.map if finished else tied_to,)
        self._embedding: tuple[TokenEmbedding, ...] = (tied_to,) if finished else ()
        self.own_map: Any = None
        self.projection: nn.Linear | None = None
        self.bias: nn.Parameter | None = None

    @property
    def num_embeddings(self) -> int:
        return int(self._map[0].num_embeddings)

    @property
    def width(self) -> int:
        """Of the rows that hidden vectors are compared with."""
        return self._embedding[0].read_dim if self._embedding else int(self._map[0].map_dim)

    def _table(self) -> Tensor:
        """The rows of a layer over one table, (V, width)."""
        if not self._embedding:
            table: Tensor = self._map[0].compared()
            return table
        finished = self._embedding[0].finished()
        return finished if finished.shape[1] == self.width else finished[:, : self.width]

    def _row_std(self) -> float:
        """The standard deviation of fresh rows."""
        if not self._embedding:
            return float(self._map[0].std)
        on_meta = next(self._map[0].parameters()).is_meta
        return 1.0 if on_meta else sizes_read(self._embedding[0]).model

    def reset_parameters(self) -> None:
        """Draw the layer's own weights; tied tables are drawn by their map, and biases start at zero."""
        if self.own_map is not None:
            self.own_map.reset_parameters(std=self.hidden_dim**-0.5)
        if self.projection is not None:
            self.projection.reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def resize(self, num_embeddings: int) -> None:
        """Follow a change of the vocabulary: old rows and biases stay, new biases are zero.

        A tied table is resized at its map, before or after. The parameters are new, so give them to the optimiser.
        """
        check_count("num_embeddings", num_embeddings)
        if self.own_map is not None:
            self.own_map.resize(num_embeddings)
        if self.bias is not None:
            self.bias = resized_bias(self.bias, num_embeddings)

    def extra_repr(self) -> str:
        tie = "own tables" if self.own_map is not None else "tied to the map"
        tie = "tied to the finished vectors" if self._embedding else tie
        return f"{self.hidden_dim} → {self.num_embeddings:,}, {tie}, bias={self.bias is not None}"

    def _projected(self, rows: Tensor) -> Tensor:
        return rows if self.projection is None else self.projection(rows)  # (T, width)

    def _checked_bias(self) -> Tensor | None:
        """Refuse a bias that did not follow when the table that it belongs to was resized."""
        if self.bias is not None and len(self.bias) != self.num_embeddings:
            problem = f"The output layer has {len(self.bias)} biases, but its table {self.num_embeddings} rows"
            raise UserError(f"{problem}: call resize({self.num_embeddings}) here too.")
        return self.bias


def compared_with(model: nn.Module) -> list[TokenEmbedding]:
    """The embeddings whose finished vectors a model's output layers compare with."""
    layers = [part for part in model.modules() if isinstance(part, MapSoftmax)]
    return [embedding for layer in layers for embedding in layer._embedding]


def resized_bias(bias: nn.Parameter, num_embeddings: int) -> nn.Parameter:
    """A bias for more or fewer tokens: old numbers stay, new ones are zero."""
    kept = bias.detach()[:num_embeddings]
    resized = torch.cat((kept, kept.new_zeros(num_embeddings - len(kept))))
    return nn.Parameter(resized, requires_grad=bias.requires_grad)


@dataclass(frozen=True)
class FullConfig(OutputConfig):
    """One softmax over the whole vocabulary."""

    kind: str = "full"
    bias: bool = setting(True, "Whether the output has a bias for every word.")

    def check(self, embedding: MapConfig) -> None:
        if self.tied == "table" and isinstance(embedding, AdaptiveConfig):
            problem = "A full output that is tied to the table does not fit an adaptive embedding"
            ways = "use output.kind adaptive, another embedding.kind, or output.tied finished or none"
            raise UserError(f"{problem}: {ways}.")

    def build(self, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts) -> FullSoftmax:
        if self.tied == "none":
            return FullSoftmax(hidden_dim, num_embeddings=embedding.num_embeddings, bias=self.bias)
        return FullSoftmax(hidden_dim, self.tied_to(embedding), bias=self.bias)


class FullSoftmax(MapSoftmax):
    """Logits are the products of the hidden vector with every row of a table.

    Tied to a map, ``FullSoftmax(hidden_dim, embedding.map)``, the table is the map's, whatever unit follows it. Tied to
    an embedding, ``FullSoftmax(hidden_dim, embedding)``, its rows are the finished vectors, behind the unit. Where
    hidden vectors are not as wide as the rows, a bias-free ``projection`` comes first. Untied,
    ``FullSoftmax(hidden_dim, num_embeddings=V)`` has a table of V × hidden_dim of its own.

    Args:
        hidden_dim: width of the context model's vectors.
        tied_to: a standard or projective map, or an embedding over any map.
        num_embeddings: size of the vocabulary of an untied layer, V.
        bias: learn a number for each token; it starts at zero.
    """

    def __init__(
        self,
        hidden_dim: int,
        tied_to: StandardMap | ProjectiveMap | TokenEmbedding | None = None,
        *,
        num_embeddings: int | None = None,
        bias: bool = True,
    ) -> None:
        if (tied_to is None) == (num_embeddings is None):
            raise UserError("A softmax needs either a map or an embedding to tie to, or num_embeddings for its own.")
        if tied_to is not None and not isinstance(tied_to, StandardMap | ProjectiveMap | TokenEmbedding):
            problem = f"A full softmax ties to a standard or projective map, not to {type(tied_to).__name__}"
            raise UserError(f"{problem}: pass the embedding's map, or use AdaptiveSoftmax for an adaptive one.")
        super().__init__(hidden_dim, tied_to)
        if num_embeddings is not None:
            self.own_map = StandardMap(num_embeddings, hidden_dim)
            self._map = (self.own_map,)
        self.projection = nn.Linear(hidden_dim, self.width, bias=False) if self.width != hidden_dim else None
        self.bias = nn.Parameter(torch.empty(self.num_embeddings)) if bias else None
        self.reset_parameters()

    @property
    def weight(self) -> Tensor:
        """The output matrix, (V, width): tied or own."""
        return self._table()

    def losses(self, hidden: Tensor, targets: Targets) -> Tensor:
        rows, table = self._projected(self._rows(hidden)), Table(self._table(), self._checked_bias())
        return table_losses(rows, table, targets)

    def log_prob(self, hidden: Tensor) -> Tensor:
        return self.scorer()(hidden)

    def scorer(self) -> Callable[[Tensor], Tensor]:
        return partial(self._log_prob, Table(self._table(), self._checked_bias()))

    def _log_prob(self, table: Table, hidden: Tensor) -> Tensor:
        logits = F.linear(self._projected(self._rows(hidden)), table.weight).to(exact_dtype(hidden))  # (T, V)
        logits = logits if table.bias is None else logits + table.bias
        return F.log_softmax(logits, dim=-1).reshape(*hidden.shape[:-1], self.num_embeddings)  # (…, V)
