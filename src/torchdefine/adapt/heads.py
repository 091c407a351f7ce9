"""Output layers that take their matrix from a replaced input table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.adapt.stand_in import Borrower, StandIn
from torchdefine.embedding import TokenEmbedding
from torchdefine.embedding.map import ProjectiveMap, StandardMap
from torchdefine.embedding.table import TOKENS_AT_ONCE
from torchdefine.errors import UserError
from torchdefine.output.layer import resized_bias


class TiedHead(Borrower):
    """Hidden vectors → logits, (…, in_features) → (…, V), like the ``nn.Linear`` that it replaces.

    It owns its bias but no table; ``stand_in`` trains and saves that.
    """

    def __init__(self, stand_in: StandIn, bias: nn.Parameter | None) -> None:
        super().__init__(stand_in)
        self.bias = bias

    @property
    def in_features(self) -> int:
        return self.stand_in.embedding_dim

    @property
    def out_features(self) -> int:
        return self.stand_in.num_embeddings

    def follow_resize(self) -> None:
        """Give the bias the table's new size; new tokens start at zero."""
        if self.bias is not None and len(self.bias) != self.out_features:  # else a model may share it
            self.bias = resized_bias(self.bias, self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features:,}, bias={self.bias is not None}"


class MapHead(TiedHead):
    """Tied to the map's table, V × n, through a projection of its own from the hidden width to n.

    This is the paper's tie: the output layer is as small as the map, and shares its numbers.
    """

    def __init__(self, stand_in: StandIn, bias: nn.Parameter | None, *, fresh: bool = False) -> None:
        super().__init__(stand_in, bias)
        like, map_dim = stand_in.weight, tied_map(stand_in.table).map_dim
        self.projection = nn.Linear(self.in_features, map_dim, bias=False, dtype=like.dtype, device=like.device)
        if fresh:  # the projected vectors then are as large as the hidden ones
            nn.init.normal_(self.projection.weight, std=self.in_features**-0.5)

    @property
    def weight(self) -> Tensor:
        """The output matrix behind the projection, (V, n)."""
        return tied_map(self.stand_in.table).table.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(self.projection(hidden), self.weight, self.bias)


class VectorsHead(TiedHead):
    """Tied to the vectors themselves, as the old head was to the old table: for tables fitted to an old one.

    The vectors are computed again, part of the vocabulary at a time, unless the stand-in is cached.
    """

    @property
    def weight(self) -> Tensor:
        """The output matrix, (V, m), computed each time."""
        return self.stand_in.rows(0, self.out_features)

    def forward(self, hidden: Tensor) -> Tensor:
        total = self.out_features
        logits = [
            hidden @ self.stand_in.rows(start, min(start + TOKENS_AT_ONCE, total)).T.to(hidden.dtype)
            for start in range(0, total, TOKENS_AT_ONCE)
        ]
        whole = logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)  # (…, V)
        return whole if self.bias is None else whole + self.bias


def tied_map(table: nn.Module) -> StandardMap | ProjectiveMap:
    """The map that an output layer can share; a UserError if there is none."""
    if isinstance(table, TokenEmbedding) and isinstance(table.map, (StandardMap, ProjectiveMap)):
        return table.map
    kind = type(table.map).__name__ if isinstance(table, TokenEmbedding) else type(table).__name__
    raise UserError(f"The output layer cannot be tied to the map of a {kind}: use heads='untie'.")
