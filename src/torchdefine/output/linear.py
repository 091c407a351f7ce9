"""One softmax over the whole vocabulary, tied to the map's table or with its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.config import setting
from torchdefine.embedding import AdaptiveConfig, MapConfig, TokenEmbedding, VocabularyFacts
from torchdefine.embedding.map import ProjectiveMap, StandardMap
from torchdefine.errors import UserError
from torchdefine.ops import exact_dtype
from torchdefine.output.layer import OutputConfig, OutputLayer, check_bias, hidden_projection, resized_bias
from torchdefine.output.linear_cross_entropy import Reduction, linear_cross_entropy


@dataclass(frozen=True)
class FullConfig(OutputConfig):
    """One softmax over the whole vocabulary."""

    kind: str = "full"
    bias: bool = setting(True, "Whether it has a bias for every word.")

    def check(self, embedding: MapConfig) -> None:
        if self.tied and isinstance(embedding, AdaptiveConfig):
            raise UserError(
                "A tied full output does not fit an adaptive embedding: use output.kind adaptive, another "
                "embedding.kind, or output.tied false."
            )

    def build(self, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts) -> FullSoftmax:
        if not self.tied:
            return FullSoftmax(hidden_dim, num_embeddings=embedding.num_embeddings, bias=self.bias)
        return FullSoftmax(hidden_dim, embedding.map, bias=self.bias)  # type: ignore[arg-type]


class FullSoftmax(OutputLayer):
    """Logits are the products of the hidden vector with every row of a table.

    Tied, the table is that of ``map_layer``, whatever unit follows it in the embedding, which trains, saves, moves and
    resizes it. A bias-free ``projection`` comes first where hidden vectors are not as wide as the table.
    Untied, ``FullSoftmax(hidden_dim, num_embeddings=V)`` has a table of V × hidden_dim of its own.

    Args:
        hidden_dim: width of the context model's vectors.
        map_layer: a standard or projective map to tie to.
        num_embeddings: size of the vocabulary of an untied layer, V.
        bias: learn a number for each token; it starts at zero.
    """

    def __init__(
        self,
        hidden_dim: int,
        map_layer: StandardMap | ProjectiveMap | None = None,
        *,
        num_embeddings: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(hidden_dim)
        _check_table_choice(map_layer, num_embeddings)
        self.own_map: StandardMap | None = None
        if num_embeddings is not None:
            self.own_map = map_layer = StandardMap(num_embeddings, hidden_dim)
        assert map_layer is not None
        self._map = (map_layer,)  # in a tuple, so that a tied table is not registered and saved a second time
        self.projection = hidden_projection(hidden_dim, map_layer.map_dim)
        self.bias = nn.Parameter(torch.empty(map_layer.num_embeddings)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the layer's own weights; a tied table is drawn by its map."""
        if self.own_map is not None:
            self.own_map.reset_parameters(std=self.hidden_dim**-0.5)
        if self.projection is not None:
            self.projection.reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def weight(self) -> Tensor:
        """The output matrix, (V, map_dim): tied or own."""
        return self._map[0].table.weight

    @property
    def num_embeddings(self) -> int:
        return self._map[0].num_embeddings

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        hint: Sequence[int] | None = None,
    ) -> Tensor:
        if reduction != "none":
            hidden, targets = self._as_they_lie(hidden, targets)
        rows, flat_targets = self._rows_and_targets(hidden, targets)
        loss = linear_cross_entropy(
            self._projected(rows),
            self.weight,
            flat_targets,
            self._checked_bias(),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        return loss.reshape(targets.shape) if reduction == "none" else loss

    def log_prob(self, hidden: Tensor) -> Tensor:
        logits = F.linear(self._projected(self._rows(hidden)), self.weight).to(exact_dtype(hidden))  # (T, V)
        bias = self._checked_bias()
        if bias is not None:
            logits = logits + bias
        return F.log_softmax(logits, dim=-1).reshape(*hidden.shape[:-1], self.num_embeddings)  # (…, V)

    def resize(self, num_embeddings: int) -> None:
        """Follow a change of the vocabulary: old rows and biases stay, new biases are zero.

        A tied table is resized at its map, before or after. The parameters are new, so give them to the optimiser.
        """
        if num_embeddings < 1:
            raise UserError(f"num_embeddings is {num_embeddings}, but must be at least 1.")
        if self.own_map is not None:
            self.own_map.resize(num_embeddings)
        if self.bias is not None:
            self.bias = resized_bias(self.bias, num_embeddings)

    def extra_repr(self) -> str:
        tie = "own table" if self.own_map is not None else "tied to the map"
        return f"{self.hidden_dim} → {self.num_embeddings:,}, {tie}, bias={self.bias is not None}"

    def _projected(self, rows: Tensor) -> Tensor:
        return rows if self.projection is None else self.projection(rows)  # (T, map_dim)

    def _checked_bias(self) -> Tensor | None:
        if self.bias is not None:
            check_bias(self.bias, self.num_embeddings)
        return self.bias


def _check_table_choice(map_layer: object, num_embeddings: int | None) -> None:
    if (map_layer is None) == (num_embeddings is None):
        raise UserError("A softmax needs either a map_layer to tie to or num_embeddings for its own table.")
    if map_layer is not None and not isinstance(map_layer, StandardMap | ProjectiveMap):
        raise UserError(
            f"A full softmax ties to a standard or projective map, not to {type(map_layer).__name__}: "
            f"pass the embedding's map, or use AdaptiveSoftmax for an adaptive one."
        )
