"""Mixture of softmaxes: several predictions from one hidden vector, mixed as probabilities (Yang et al., 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchdefine.config import setting
from torchdefine.embedding import AdaptiveMap, TokenEmbedding, VocabularyFacts
from torchdefine.embedding.map import check_ids
from torchdefine.errors import UserError
from torchdefine.ops import exact_dtype, locked_dropout
from torchdefine.output.adaptive import AdaptiveSoftmaxConfig
from torchdefine.output.layer import OutputConfig, OutputLayer
from torchdefine.output.linear import FullConfig
from torchdefine.output.linear_cross_entropy import Reduction, check_loss_options, mean_over


@dataclass(frozen=True)
class MixtureConfig(OutputConfig):
    """A mixture of softmaxes, adaptive ones over an adaptive embedding, else full ones."""

    kind: str = "mixture"
    components: int = setting(15, "Softmaxes that are mixed.", at_least=1)
    latent_dropout: float = setting(0.0, "Dropout rate of the components' vectors.", at_least=0, below=1)
    bias: bool = setting(True, "Whether full components have a bias for every word.")

    def build(self, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts) -> MixtureSoftmax:
        banded = isinstance(embedding.map, AdaptiveMap)
        kind = AdaptiveSoftmaxConfig(tied=self.tied) if banded else FullConfig(tied=self.tied, bias=self.bias)
        component = kind.build(embedding.map_dim, embedding, vocabulary)
        return MixtureSoftmax(hidden_dim, component, self.components, self.latent_dropout)


class MixtureSoftmax(OutputLayer):
    """log Σ_k π_k p_k(token): K vectors tanh(W_k h) go through one ``component`` layer, and a softmax of h weighs them.

    A single softmax has log-probabilities of a rank no higher than its width; a mixture has not. The component may be
    any other output layer, tied or not, full or adaptive; it is computed K times, at K times the cost.

    Args:
        hidden_dim: width of the context model's vectors.
        component: the layer that each of the mixed vectors goes through.
        components: how many there are, K.
        latent_dropout: share of each vector's features that is zeroed in training, the same at all positions.
    """

    def __init__(self, hidden_dim: int, component: OutputLayer, components: int, latent_dropout: float = 0.0) -> None:
        super().__init__(hidden_dim)
        if components < 1:
            raise UserError(f"components is {components}, but must be at least 1: use 15, say.")
        if not 0 <= latent_dropout < 1:
            raise UserError(f"latent_dropout is {latent_dropout}, but must be at least 0 and below 1.")
        self.component = component
        self.components, self.latent_dropout = components, latent_dropout
        self.prior = nn.Linear(hidden_dim, components, bias=False)
        self.latent = nn.Linear(hidden_dim, components * component.hidden_dim)

    @property
    def num_embeddings(self) -> int:
        return self.component.num_embeddings

    def resize(self, num_embeddings: int) -> None:
        self.component.resize(num_embeddings)

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
        """As for every output layer; label smoothing needs all probabilities of all tokens and is expensive."""
        check_loss_options(reduction, label_smoothing)
        rows, flat_targets = self._rows_and_targets(hidden, targets)
        counted = flat_targets != ignore_index
        latents = self._latents(hidden).reshape(-1, self.components, self.component.hidden_dim)  # (T, K, d)
        if label_smoothing:
            ids = torch.where(counted, flat_targets, 0)
            check_ids(ids, self.num_embeddings)
            losses = self._smoothed_losses(rows, latents, ids.long(), label_smoothing)
            losses = torch.where(counted, losses, 0.0)
        else:
            losses = self._mixed_losses(rows, latents, flat_targets, ignore_index, hint)  # (T,)
        if reduction == "none":
            return losses.reshape(targets.shape)
        return losses.sum() if reduction == "sum" else mean_over(losses.sum(), counted)

    def _mixed_losses(
        self, rows: Tensor, latents: Tensor, targets: Tensor, ignore_index: int, hint: Sequence[int] | None
    ) -> Tensor:
        """Only the targets' probabilities are mixed, so no component holds all of its probabilities at once."""
        everyones = targets.unsqueeze(1).expand(-1, self.components)  # (T, K)
        losses = self.component.loss(
            latents, everyones, ignore_index=ignore_index, reduction="none", hint=self._for_components(hint)
        )  # (T, K)
        mixed = -torch.logsumexp(self._log_prior(rows) - losses, dim=1)
        return torch.where(targets != ignore_index, mixed, 0.0)

    def _smoothed_losses(self, rows: Tensor, latents: Tensor, ids: Tensor, label_smoothing: float) -> Tensor:
        def chunk_losses(rows: Tensor, latents: Tensor, ids: Tensor) -> Tensor:
            log_probs = self._mixed_log_probs(rows, latents)
            return F.cross_entropy(log_probs, ids, reduction="none", label_smoothing=label_smoothing)

        sizes = [len(chunk) for chunk in self._chunks(rows)]
        return torch.cat(
            [
                checkpoint(chunk_losses, *chunk, use_reentrant=False, preserve_rng_state=False)
                for chunk in zip(rows.split(sizes), latents.split(sizes), ids.split(sizes), strict=True)
            ]
        )

    def log_prob(self, hidden: Tensor) -> Tensor:
        rows = self._rows(hidden)
        latents = self._latents(hidden).reshape(-1, self.components, self.component.hidden_dim)  # (T, K, d)
        return self._mixed_log_probs(rows, latents).reshape(*hidden.shape[:-1], self.num_embeddings)  # (…, V)

    def _mixed_log_probs(self, rows: Tensor, latents: Tensor) -> Tensor:
        """(T, V), in the memory of two components."""
        log_prior = self._log_prior(rows)  # (T, K)
        mixed = self.component.log_prob(latents[:, 0]) + log_prior[:, :1]
        for k in range(1, self.components):
            mixed = torch.logaddexp(mixed, self.component.log_prob(latents[:, k]) + log_prior[:, k : k + 1])
        return mixed

    def _log_prior(self, rows: Tensor) -> Tensor:
        return F.log_softmax(self.prior(rows).to(exact_dtype(rows)), dim=-1)  # (T, K)

    def _latents(self, hidden: Tensor) -> Tensor:
        latents = torch.tanh(self.latent(hidden))  # (…, K · d)
        if self.training and self.latent_dropout:
            by_position = latents.ndim == 3
            latents = locked_dropout(latents if by_position else latents.unsqueeze(1), self.latent_dropout, time_dim=1)
            return latents if by_position else latents.squeeze(1)
        return latents

    def host_hint(self, targets: np.ndarray, *, ignore_index: int = -100) -> tuple[int, ...] | None:
        return self.component.host_hint(targets, ignore_index=ignore_index)

    def _for_components(self, hint: Sequence[int] | None) -> tuple[int, ...] | None:
        """Every target counts once for each component."""
        return None if hint is None else tuple(count * self.components for count in hint)

    def extra_repr(self) -> str:
        return f"{self.hidden_dim} → {self.num_embeddings:,}, {self.components} components"
