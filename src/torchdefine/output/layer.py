"""What every output layer can do, and the plain one: a single softmax over the whole vocabulary.

A model, a training loop or a decoder need not know which layer it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchdefine.config import Config, rate, setting
from torchdefine.embedding import AdaptiveConfig, MapConfig, TokenEmbedding, VocabularyFacts
from torchdefine.embedding.map import ProjectiveMap, StandardMap
from torchdefine.errors import UserError, check_count
from torchdefine.ops import exact_dtype
from torchdefine.output.linear_cross_entropy import (
    Reduction,
    Table,
    Targets,
    check_loss_options,
    checked_targets,
    fitting_tokens,
    mean_over,
    table_losses,
)


class HostHint(NamedTuple):
    """What the host knows about a batch, so that the device need not be asked; larger numbers work as well."""

    distinct: int | None = None
    """How many different ids there can be; None if the embedding does not use it."""
    bands: tuple[int, ...] | None = None
    """The output layer's ``host_hint``."""


class Losses(NamedTuple):
    """The loss that a step minimises, and the one to report."""

    objective: Tensor
    cross_entropy: Tensor
    """Without penalties; in training it is smoothed where the model smooths labels."""


@dataclass(frozen=True)
class LossConfig(Config):
    """What training adds to the plain cross-entropy; evaluation uses none of it."""

    label_smoothing: float = rate("Probability spread over all words in the training loss.")


@dataclass(frozen=True)
class OutputConfig(Config):
    """What every output layer has; one of your own inherits it and says how it is built."""

    kind: str = ""
    tied: bool = setting(True, "Tied weights: whether it shares the tables of the embedding.")

    def check(self, embedding: MapConfig) -> None:
        """Refuse, before any text is read, an embedding that this layer does not fit."""

    @abstractmethod
    def build(self, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts) -> OutputLayer:
        """The layer for vectors of ``hidden_dim``; ``embedding`` is what it ties to."""
        raise NotImplementedError


class OutputLayer(nn.Module, ABC):
    """Vectors of a context model → loss, log-probabilities and most probable tokens. Calling it gives ``log_prob``.

    A layer supplies ``num_embeddings``, ``log_prob``, ``resize`` and ``losses``, or the whole of ``loss``.
    """

    any_order = True
    """Whether ``losses`` may take vectors in the order in which they lie in memory: a sum does not depend on it."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        check_count("hidden_dim", hidden_dim, "use the context model's width")
        self.hidden_dim = hidden_dim

    @property
    @abstractmethod
    def num_embeddings(self) -> int:
        """Size of the vocabulary, V."""

    @abstractmethod
    def log_prob(self, hidden: Tensor) -> Tensor:
        """(…, hidden_dim) → (…, V) log-probabilities in the order of the ids; at least float32."""

    @abstractmethod
    def resize(self, num_embeddings: int) -> None:
        """Follow a change of the vocabulary: the layer's own weights are resized; a tied table is left to its map."""

    def losses(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Losses of vectors (…, hidden_dim): (T,), with zeros where none counts, or their sum."""
        raise NotImplementedError

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
        """Cross-entropy of (…, hidden_dim) against ids (…), reduced as by ``F.cross_entropy``; at least float32.

        ``hint`` is what ``host_hint`` said of the same targets; with it, the host never waits for the device. Only the
        full softmax smooths labels cheaply: the others then need all probabilities of all tokens.
        """
        check_loss_options(reduction, label_smoothing)
        if targets.shape != hidden.shape[:-1]:
            problem = f"targets have the shape {tuple(targets.shape)}, but hidden needs {tuple(hidden.shape[:-1])}"
            raise UserError(f"{problem}: give one id for each vector.")
        if self.any_order and reduction != "none":
            hidden, targets = self._as_they_lie(hidden, targets)
        ids, counted = checked_targets(targets.reshape(-1), ignore_index, self.num_embeddings)
        losses = self.losses(hidden, Targets(ids, counted, label_smoothing, reduction == "none", hint))
        if reduction == "none":
            return losses.reshape(targets.shape)
        return losses.sum() if reduction == "sum" else mean_over(losses.sum(), counted)

    def host_hint(self, targets: np.ndarray, *, ignore_index: int = -100) -> tuple[int, ...] | None:
        """What ``loss`` needs to know about the targets before they go to the device; None if nothing."""
        return None

    @torch.no_grad()
    def predict(self, hidden: Tensor) -> Tensor:
        """The most probable ids, (…)."""
        best = [self.log_prob(chunk).argmax(-1) for chunk in self._chunks(self._rows(hidden))]
        return torch.cat(best).reshape(hidden.shape[:-1])

    @torch.no_grad()
    def top_k(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable tokens, best first: log-probabilities (…, k) and ids (…, k)."""
        if not 1 <= k <= self.num_embeddings:
            raise UserError(
                f"k is {k}, but the vocabulary has {self.num_embeddings} tokens: use 1 to {self.num_embeddings}."
            )
        found = [self.log_prob(chunk).topk(k) for chunk in self._chunks(self._rows(hidden))]
        log_probs, ids = (torch.cat(parts).reshape(*hidden.shape[:-1], k) for parts in zip(*found, strict=True))
        return log_probs, ids

    def forward(self, hidden: Tensor) -> Tensor:
        return self.log_prob(hidden)

    def _rows(self, hidden: Tensor) -> Tensor:
        """Any leading dimensions as one: (…, hidden_dim) → (T, hidden_dim)."""
        if hidden.ndim == 0 or hidden.shape[-1] != self.hidden_dim:
            problem = f"hidden has the shape {tuple(hidden.shape)}, but its last dimension must be {self.hidden_dim}"
            raise UserError(f"{problem}: build the layer with another hidden_dim, or transpose.")
        return hidden.reshape(-1, self.hidden_dim)

    def _as_they_lie(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors and their targets in memory order, which is position by position for those of an LSTM: no copy."""
        if hidden.ndim == 3 and not hidden.is_contiguous() and hidden.transpose(0, 1).is_contiguous():
            return hidden.transpose(0, 1), targets.transpose(0, 1)
        return hidden, targets

    def _chunks(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows in portions whose log-probabilities fit into bounded memory."""
        return rows.split(fitting_tokens(self.num_embeddings))

    def _smoothed_losses(
        self, log_prob: Callable[..., Tensor], label_smoothing: float, ids: Tensor, *rows: Tensor
    ) -> Tensor:
        """Losses (T,) from whole rows of log-probabilities, of which only a chunk exists at a time."""

        def chunk_losses(ids: Tensor, *rows: Tensor) -> Tensor:
            return F.cross_entropy(log_prob(*rows), ids, reduction="none", label_smoothing=label_smoothing)

        return torch.cat(
            [
                checkpoint(chunk_losses, *chunk, use_reentrant=False, preserve_rng_state=False)
                for chunk in zip(*(self._chunks(part) for part in (ids, *rows)), strict=True)
            ]
        )


class MapSoftmax(OutputLayer):
    """A layer over the tables of a map: tied, their owner trains, saves, moves and resizes them; or its own."""

    def __init__(self, hidden_dim: int, map_layer: Any) -> None:
        super().__init__(hidden_dim)
        self._map = (map_layer,)  # in a tuple, so that tied tables are not registered and saved a second time
        self.own_map: Any = None
        self.projection: nn.Linear | None = None
        self.bias: nn.Parameter | None = None

    @property
    def num_embeddings(self) -> int:
        return int(self._map[0].num_embeddings)

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
        return f"{self.hidden_dim} → {self.num_embeddings:,}, {tie}, bias={self.bias is not None}"

    def _projected(self, rows: Tensor) -> Tensor:
        return rows if self.projection is None else self.projection(rows)  # (T, map_dim)

    def _checked_bias(self) -> Tensor | None:
        """Refuse a bias that did not follow when the table that it belongs to was resized."""
        if self.bias is not None and len(self.bias) != self.num_embeddings:
            problem = f"The output layer has {len(self.bias)} biases, but its table {self.num_embeddings} rows"
            raise UserError(f"{problem}: call resize({self.num_embeddings}) here too.")
        return self.bias


def resized_bias(bias: nn.Parameter, num_embeddings: int) -> nn.Parameter:
    """A bias for more or fewer tokens: old numbers stay, new ones are zero."""
    kept = bias.detach()[:num_embeddings]
    resized = torch.cat((kept, kept.new_zeros(num_embeddings - len(kept))))
    return nn.Parameter(resized, requires_grad=bias.requires_grad)


@dataclass(frozen=True)
class FullConfig(OutputConfig):
    """One softmax over the whole vocabulary."""

    kind: str = "full"
    bias: bool = setting(True, "Whether it has a bias for every word.")

    def check(self, embedding: MapConfig) -> None:
        if self.tied and isinstance(embedding, AdaptiveConfig):
            problem = "A tied full output does not fit an adaptive embedding"
            raise UserError(f"{problem}: use output.kind adaptive, another embedding.kind, or output.tied false.")

    def build(self, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts) -> FullSoftmax:
        if not self.tied:
            return FullSoftmax(hidden_dim, num_embeddings=embedding.num_embeddings, bias=self.bias)
        return FullSoftmax(hidden_dim, embedding.map, bias=self.bias)  # type: ignore[arg-type]


class FullSoftmax(MapSoftmax):
    """Logits are the products of the hidden vector with every row of a table.

    Tied, the table is that of ``map_layer``, whatever unit follows it in the embedding. A bias-free ``projection``
    comes first where hidden vectors are not as wide as the table. Untied, ``FullSoftmax(hidden_dim, num_embeddings=V)``
    has a table of V × hidden_dim of its own.

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
        if (map_layer is None) == (num_embeddings is None):
            raise UserError("A softmax needs either a map_layer to tie to or num_embeddings for its own table.")
        if map_layer is not None and not isinstance(map_layer, StandardMap | ProjectiveMap):
            problem = f"A full softmax ties to a standard or projective map, not to {type(map_layer).__name__}"
            raise UserError(f"{problem}: pass the embedding's map, or use AdaptiveSoftmax for an adaptive one.")
        super().__init__(hidden_dim, map_layer)
        if num_embeddings is not None:
            self.own_map = StandardMap(num_embeddings, hidden_dim)
            self._map = (self.own_map,)
        width = self._map[0].map_dim
        self.projection = nn.Linear(hidden_dim, width, bias=False) if width != hidden_dim else None
        self.bias = nn.Parameter(torch.empty(self.num_embeddings)) if bias else None
        self.reset_parameters()

    @property
    def weight(self) -> Tensor:
        """The output matrix, (V, map_dim): tied or own."""
        return self._map[0].table.weight

    def losses(self, hidden: Tensor, targets: Targets) -> Tensor:
        rows, table = self._projected(self._rows(hidden)), Table(self.weight, self._checked_bias())
        return table_losses(rows, table, targets)

    def log_prob(self, hidden: Tensor) -> Tensor:
        logits = F.linear(self._projected(self._rows(hidden)), self.weight).to(exact_dtype(hidden))  # (T, V)
        bias = self._checked_bias()
        logits = logits if bias is None else logits + bias
        return F.log_softmax(logits, dim=-1).reshape(*hidden.shape[:-1], self.num_embeddings)  # (…, V)
