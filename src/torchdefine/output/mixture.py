"""Mixture of softmaxes: several predictions from one hidden vector, mixed as probabilities (Yang et al., 2018)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.config import MOST_DEEP, rate, setting
from torchdefine.embedding import AdaptiveMap, TokenEmbedding, VocabularyFacts
from torchdefine.errors import UserError, check_count
from torchdefine.ops import exact_dtype, locked_dropout
from torchdefine.output.adaptive import AdaptiveSoftmaxConfig
from torchdefine.output.full import FullConfig
from torchdefine.output.layer import OutputConfig, OutputLayer
from torchdefine.output.linear_cross_entropy import Targets


@dataclass(frozen=True)
class MixtureConfig(OutputConfig):
    """A mixture of softmaxes, adaptive ones over an adaptive embedding, else full ones."""

    kind: str = "mixture"
    components: int = setting(15, "Number of softmaxes that are mixed.", at_least=1, at_most=MOST_DEEP)
    latent_dropout: float = rate("Dropout rate of the components' vectors.")
    bias: bool = setting(True, "Whether full softmaxes have a bias for every word.")

    def build(self, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts) -> MixtureSoftmax:
        banded = isinstance(embedding.map, AdaptiveMap)
        full = FullConfig(tied=self.tied, bias=self.bias)
        kind = AdaptiveSoftmaxConfig(tied=self.tied) if banded else full
        component = kind.build(kind.width(embedding) or embedding.map_dim, embedding, vocabulary)
        return MixtureSoftmax(hidden_dim, component, self.components, self.latent_dropout)


class MixtureSoftmax(OutputLayer):
    """log Σ_k π_k p_k(token): K vectors tanh(W_k h) go through one ``component`` layer, and a softmax of h weighs them.

    A single softmax has log-probabilities of a rank no higher than its width; a mixture has not. The component may be
    any other output layer, tied or not, full or adaptive; it is computed K times, at K times the cost.

    Args:
        hidden_dim: width of the context model's vectors.
        component: the layer that each of the mixed vectors goes through.
        components: how many there are, K.
        latent_dropout: dropout rate of the vectors' features in training, the same at all positions.
    """

    any_order = False  # dropout goes by position

    def __init__(self, hidden_dim: int, component: OutputLayer, components: int, latent_dropout: float = 0.0) -> None:
        super().__init__(hidden_dim)
        check_count("components", components, "try 15")
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

    def losses(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Only the targets' probabilities are mixed, so no component holds all of its probabilities at once."""
        ids, counted, label_smoothing, _, hint = targets
        rows, latents = self._rows(hidden), self._latents(hidden)  # (T, hidden_dim) and (T, K, d)
        if label_smoothing:
            mixed = partial(self._mixed_log_probs, self.component.scorer())
            losses = self._smoothed_losses(mixed, label_smoothing, ids, rows, latents)
        else:
            everyones = torch.where(counted, ids, -100).unsqueeze(1).expand(-1, self.components)  # (T, K)
            hint = None if hint is None else [count * self.components for count in hint]
            component = self.component.loss(latents, everyones, reduction="none", hint=hint)  # (T, K)
            losses = -torch.logsumexp(self._log_prior(rows) - component, dim=1)  # (T,)
        return torch.where(counted, losses, 0.0)

    def log_prob(self, hidden: Tensor) -> Tensor:
        return self.scorer()(hidden)

    def scorer(self) -> Callable[[Tensor], Tensor]:
        return partial(self._log_prob, self.component.scorer())

    def _log_prob(self, log_prob: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        log_probs = self._mixed_log_probs(log_prob, self._rows(hidden), self._latents(hidden))
        return log_probs.reshape(*hidden.shape[:-1], self.num_embeddings)  # (…, V)

    def _mixed_log_probs(self, log_prob: Callable[[Tensor], Tensor], rows: Tensor, latents: Tensor) -> Tensor:
        """(T, V), in the memory of two components; ``log_prob`` is a component's."""
        log_prior = self._log_prior(rows)  # (T, K)
        mixed = log_prob(latents[:, 0]) + log_prior[:, :1]
        for k in range(1, self.components):
            mixed = torch.logaddexp(mixed, log_prob(latents[:, k]) + log_prior[:, k : k + 1])
        return mixed

    def _log_prior(self, rows: Tensor) -> Tensor:
        return F.log_softmax(self.prior(rows).to(exact_dtype(rows)), dim=-1)  # (T, K)

    def _latents(self, hidden: Tensor) -> Tensor:
        """(T, K, d). Dropout has one mask for all positions of (B, T, …), else a mask for every vector."""
        latents = torch.tanh(self.latent(hidden))  # (…, K · d)
        if self.training:
            by_position = latents if latents.ndim == 3 else latents.unsqueeze(1)
            latents = locked_dropout(by_position, self.latent_dropout, time_dim=1)
        return latents.reshape(-1, self.components, self.component.hidden_dim)

    def host_hint(self, targets: np.ndarray, *, ignore_index: int = -100) -> tuple[int, ...] | None:
        return self.component.host_hint(targets, ignore_index=ignore_index)

    def extra_repr(self) -> str:
        return f"{self.hidden_dim} → {self.num_embeddings:,}, {self.components} components"
