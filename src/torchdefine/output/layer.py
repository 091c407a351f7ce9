"""What every output layer can do.

A model, a training loop or a decoder need not know which layer it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchdefine.config import Config, rate, setting
from torchdefine.embedding import MapConfig, TokenEmbedding, VocabularyFacts
from torchdefine.errors import UserError, check_count
from torchdefine.output.linear_cross_entropy import (
    Reduction,
    Targets,
    check_loss_options,
    checked_targets,
    fitting_tokens,
    mean_over,
)

Tied = Literal["table", "finished", "none"]


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
    tied: Tied = setting(
        "table",
        "Tied weights. table: the output uses the map's tables. finished: it uses the unit's vectors, and every step "
        "computes those of all words. none: it has tables of its own.",
    )

    def check(self, embedding: MapConfig) -> None:
        """Refuse, before any text is read, an embedding that this layer does not fit."""

    @abstractmethod
    def build(self, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts) -> OutputLayer:
        """The layer for vectors of ``hidden_dim``; ``embedding`` is what it ties to."""
        raise NotImplementedError

    def tied_to(self, embedding: TokenEmbedding) -> Any:
        """What a tied layer is made for."""
        return embedding if self.tied == "finished" else embedding.map

    def width(self, embedding: TokenEmbedding) -> int | None:
        """The width of the rows that a tied layer compares with."""
        widths = {"table": embedding.map_dim, "finished": embedding.read_dim}
        return widths.get(self.tied)


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

    def scorer(self) -> Callable[[Tensor], Tensor]:
        """``log_prob`` for calls that follow one another: what they share may be computed here."""
        return self.log_prob

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
        log_prob = self.scorer()
        best = [log_prob(chunk).argmax(-1) for chunk in self._chunks(self._rows(hidden))]
        return torch.cat(best).reshape(hidden.shape[:-1])

    @torch.no_grad()
    def top_k(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable tokens, best first: log-probabilities (…, k) and ids (…, k)."""
        if not 1 <= k <= self.num_embeddings:
            raise UserError(
                f"k is {k}, but the vocabulary has {self.num_embeddings} tokens: use 1 to {self.num_embeddings}."
            )
        log_prob = self.scorer()
        found = [log_prob(chunk).topk(k) for chunk in self._chunks(self._rows(hidden))]
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
