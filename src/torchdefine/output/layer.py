"""What every output layer can do, so that a model, a training loop or a decoder need not know which one it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchdefine.config import Config, setting
from torchdefine.embedding import MapConfig, TokenEmbedding, VocabularyFacts
from torchdefine.embedding.map import widened_ids
from torchdefine.errors import UserError
from torchdefine.output.linear_cross_entropy import Reduction, fitting_tokens


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

    label_smoothing: float = setting(
        0.0, "Probability spread over all words in the training loss.", at_least=0, below=1
    )


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
    """Vectors of a context model → loss, log-probabilities and most probable tokens.

    A layer supplies ``num_embeddings``, ``loss``, ``log_prob`` and ``resize``. Calling it gives ``log_prob``.
    """

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        if hidden_dim < 1:
            raise UserError(f"hidden_dim is {hidden_dim}, but must be at least 1: use the context model's width.")
        self.hidden_dim = hidden_dim

    @property
    @abstractmethod
    def num_embeddings(self) -> int:
        """Size of the vocabulary, V."""

    @abstractmethod
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

        ``hint`` is what ``host_hint`` said of the same targets; with it, the host never waits for the device.
        """

    @abstractmethod
    def log_prob(self, hidden: Tensor) -> Tensor:
        """(…, hidden_dim) → (…, V) log-probabilities in the order of the ids; at least float32."""

    @abstractmethod
    def resize(self, num_embeddings: int) -> None:
        """Follow a change of the vocabulary: the layer's own weights are resized; a tied table is left to its map."""

    def host_hint(self, targets: np.ndarray, *, ignore_index: int = -100) -> tuple[int, ...] | None:
        """What ``loss`` needs to know about the targets before they go to the device; None if nothing."""
        return None

    @torch.no_grad()
    def predict(self, hidden: Tensor) -> Tensor:
        """The most probable ids, (…)."""
        rows = self._rows(hidden)
        best = [self.log_prob(chunk).argmax(-1) for chunk in self._chunks(rows)]
        return torch.cat(best).reshape(hidden.shape[:-1])

    @torch.no_grad()
    def top_k(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable tokens, best first: log-probabilities (…, k) and ids (…, k)."""
        if not 1 <= k <= self.num_embeddings:
            raise UserError(f"k is {k}, but the vocabulary has {self.num_embeddings} tokens: use 1 to that many.")
        found = [self.log_prob(chunk).topk(k) for chunk in self._chunks(self._rows(hidden))]
        shape = (*hidden.shape[:-1], k)
        log_probs = torch.cat([chunk.values for chunk in found]).reshape(shape)
        return log_probs, torch.cat([chunk.indices for chunk in found]).reshape(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.log_prob(hidden)

    def _rows(self, hidden: Tensor) -> Tensor:
        """Any leading dimensions as one: (…, hidden_dim) → (T, hidden_dim)."""
        if hidden.ndim == 0 or hidden.shape[-1] != self.hidden_dim:
            raise UserError(
                f"hidden has the shape {tuple(hidden.shape)}, but its last dimension must be {self.hidden_dim}: "
                f"build the layer with another hidden_dim, or transpose."
            )
        return hidden.reshape(-1, self.hidden_dim)

    def _rows_and_targets(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._rows(hidden)
        if targets.shape != hidden.shape[:-1]:
            raise UserError(
                f"targets have the shape {tuple(targets.shape)}, but hidden needs {tuple(hidden.shape[:-1])}: "
                f"give one id for each vector."
            )
        return rows, widened_ids(targets.reshape(-1))

    def _as_they_lie(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors and their targets in memory order, which is position by position for those of an LSTM.

        It saves a copy, and a sum does not depend on the order.
        """
        fits = targets.shape == hidden.shape[:-1]  # else they are refused later, in the caller's own shapes
        if fits and hidden.ndim == 3 and not hidden.is_contiguous() and hidden.transpose(0, 1).is_contiguous():
            return hidden.transpose(0, 1), targets.transpose(0, 1)
        return hidden, targets

    def _chunks(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows in portions whose log-probabilities fit into bounded memory."""
        return rows.split(fitting_tokens(self.num_embeddings))


def hidden_projection(hidden_dim: int, map_dim: int) -> nn.Linear | None:
    """The projection of hidden vectors to the width of the table they are compared with, if that differs."""
    return None if hidden_dim == map_dim else nn.Linear(hidden_dim, map_dim, bias=False)


def resized_bias(bias: nn.Parameter, num_embeddings: int) -> nn.Parameter:
    """A bias for more or fewer tokens: old numbers stay, new ones are zero."""
    kept = bias.detach()[:num_embeddings]
    resized = torch.cat((kept, kept.new_zeros(num_embeddings - len(kept))))
    return nn.Parameter(resized, requires_grad=bias.requires_grad)


def check_bias(bias: Tensor, num_embeddings: int) -> None:
    """Refuse a bias that did not follow when the table that it belongs to was resized."""
    if len(bias) != num_embeddings:
        raise UserError(
            f"The output layer has {len(bias)} biases, but its table {num_embeddings} rows: "
            f"call resize({num_embeddings}) here too."
        )
