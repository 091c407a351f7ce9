"""Adaptive softmax: frequent tokens and one column for each rarer band first, then only the band that is needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchdefine.embedding import (
    AdaptiveMap,
    MapConfig,
    ProjectiveConfig,
    StandardConfig,
    TokenEmbedding,
    VocabularyFacts,
)
from torchdefine.embedding.map import check_ids
from torchdefine.errors import UserError
from torchdefine.ops import exact_dtype, taken_rows
from torchdefine.output.layer import OutputConfig, OutputLayer, hidden_projection
from torchdefine.output.linear_cross_entropy import (
    Reduction,
    check_loss_options,
    linear_cross_entropy,
    mean_over,
)

NOT_COUNTED = -100  # the ignored column of every band, whichever id the caller ignores


class Band(NamedTuple):
    """The rows that hidden vectors are compared with, and their biases."""

    weight: Tensor
    bias: Tensor | None = None


class BandedSoftmax(OutputLayer):
    """Softmax over bands of tokens, the most frequent first.

    The head holds the tokens of band 0 and, behind them, one column for each further band (``cluster_weight``).
    log p(token of band i) = log p(column i in the head) + log p(token within the band). A layer defines its bands
    by ``cutoffs``, ``ranks``, ``_bands`` and ``_facing``.
    """

    def __init__(self, hidden_dim: int) -> None:
        super().__init__(hidden_dim)
        self._ranks_on_host: tuple[Tensor, int, np.ndarray] | None = None

    @property
    @abstractmethod
    def cutoffs(self) -> tuple[int, ...]:
        """The ranks that every band but the first starts at."""

    @property
    def ranks(self) -> Tensor | None:
        """The frequency rank of every id, (V,); None where ids are ranks."""
        return None

    @abstractmethod
    def _bands(self) -> list[Band]:
        """Rows and biases of the bands, (V_i, n_i) and (V_i,). The head comes first; its last rows stand for bands."""

    @abstractmethod
    def _facing(self, rows: Tensor, band: int) -> Tensor:
        """Vectors from ``_shared``, brought to the width of a band's rows: (T, …) → (T, n_i)."""

    def _shared(self, rows: Tensor) -> Tensor:
        """Hidden vectors as all bands see them."""
        return rows

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
        """As for every output layer. Without ``hint`` the host waits for the device once.

        Label smoothing is exact and therefore expensive: it needs every band for every token.
        """
        check_loss_options(reduction, label_smoothing)
        if reduction != "none":
            hidden, targets = self._as_they_lie(hidden, targets)
        rows, flat_targets = self._rows_and_targets(hidden, targets)
        counted = flat_targets != ignore_index
        ids = torch.where(counted, flat_targets, 0)
        check_ids(ids, self.num_embeddings)
        per_token = reduction == "none"
        if label_smoothing:
            loss = self._smoothed_losses(rows, ids.long(), counted, label_smoothing)  # (T,)
        else:
            loss = self._band_losses(self._shared(rows), ids, counted, hint, per_token)  # (T,) or ()
        if per_token:
            return loss.reshape(targets.shape)
        return loss.sum() if reduction == "sum" else mean_over(loss.sum(), counted)

    def _band_losses(
        self, rows: Tensor, ids: Tensor, counted: Tensor, hint: Sequence[int] | None, per_token: bool
    ) -> Tensor:
        """Losses (T,) or their sum: the head for every token, each tail only for its own."""
        reduction: Reduction = "none" if per_token else "sum"
        ranks = ids if self.ranks is None else self.ranks[ids]
        band_of = torch.zeros_like(ranks)
        for cutoff in self.cutoffs:
            band_of += ranks >= cutoff
        first = self.cutoffs[0]
        columns = torch.where(ranks < first, ranks, first - 1 + band_of)
        columns = torch.where(counted, columns, NOT_COUNTED)
        places, tail_columns = self._tail_places(ranks, band_of, counted, hint)
        rows, *tail_rows = taken_rows(rows, places)  # (T, …) and (room, …)
        head, *tails = self._bands()
        loss = self._band_loss(rows, 0, head, columns, reduction)
        # A band without tokens takes part as well, so that its own parameters get a gradient on every worker.
        for index, band in enumerate(tails):
            tail = self._band_loss(tail_rows[index], index + 1, band, tail_columns[index], reduction)
            loss = loss.index_add(0, places[index], tail) if per_token else loss + tail
        return loss

    def _tail_places(
        self, ranks: Tensor, band_of: Tensor, counted: Tensor, hint: Sequence[int] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """For each tail the tokens that it is computed for, and their columns in it; both (room,)."""
        band_of = torch.where(counted, band_of, len(self.cutoffs) + 1)  # tokens that do not count are sorted last
        sizes = torch.stack([(band_of == band).sum() for band in range(len(self.cutoffs) + 1)])
        ends, order = sizes.cumsum(0), torch.argsort(band_of.short(), stable=True)  # a GPU sorts byte by byte
        places, columns = [], []
        rooms = self._rooms(sizes, hint) if len(ranks) else [0] * len(self.cutoffs)
        for index, (start, room) in enumerate(zip(self.cutoffs, rooms, strict=True), start=1):
            seats = torch.arange(room, device=ranks.device)
            taken = order[(ends[index - 1] + seats).clamp(max=len(ranks) - 1)]  # the first sizes[index] count
            places.append(taken)
            columns.append(torch.where(seats < sizes[index], ranks[taken] - start, NOT_COUNTED))
        return places, columns

    def _band_loss(self, rows: Tensor, index: int, band: Band, columns: Tensor, reduction: Reduction) -> Tensor:
        facing = self._facing(rows, index)  # (T, n_i)
        return linear_cross_entropy(
            facing, band.weight, columns, band.bias, ignore_index=NOT_COUNTED, reduction=reduction
        )

    def _smoothed_losses(self, rows: Tensor, ids: Tensor, counted: Tensor, label_smoothing: float) -> Tensor:
        """Losses (T,) from whole rows of log-probabilities, of which only a chunk exists at a time."""

        def chunk_losses(rows: Tensor, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.log_prob(rows), ids, reduction="none", label_smoothing=label_smoothing)

        chunks = self._chunks(rows)
        chunked_ids = ids.split([len(chunk) for chunk in chunks])
        losses = [
            checkpoint(chunk_losses, chunk, chunk_ids, use_reentrant=False, preserve_rng_state=False)
            for chunk, chunk_ids in zip(chunks, chunked_ids, strict=True)
        ]
        return torch.where(counted, torch.cat(losses), 0.0)

    def log_prob(self, hidden: Tensor) -> Tensor:
        rows = self._shared(self._rows(hidden))  # (T, …)
        bands = self._bands()
        head = F.log_softmax(self._band_logits(rows, 0, bands[0]), dim=-1)  # (T, first + tails)
        first = self.cutoffs[0]
        pieces = [head[:, :first]]
        for index, band in enumerate(bands[1:], start=1):
            within = F.log_softmax(self._band_logits(rows, index, band), dim=-1)  # (T, V_i)
            pieces.append(within + head[:, first + index - 1].unsqueeze(1))
        log_probs = torch.cat(pieces, dim=-1)  # (T, V) by rank
        if self.ranks is not None:
            log_probs = log_probs.index_select(1, self.ranks)
        return log_probs.reshape(*hidden.shape[:-1], self.num_embeddings)  # (…, V)

    def _band_logits(self, rows: Tensor, index: int, band: Band) -> Tensor:
        logits = F.linear(self._facing(rows, index), band.weight).to(exact_dtype(rows))  # (T, V_i)
        return logits if band.bias is None else logits + band.bias

    @torch.no_grad()
    def predict(self, hidden: Tensor) -> Tensor:
        """The most probable ids, (…). Tails are computed only where one of their columns wins the head.

        Where a frequent token wins, no rarer one can be more probable: its whole band is less probable.
        """
        rows = self._rows(hidden)
        head = self._bands()[0]
        logits = (self._band_logits(self._shared(chunk), 0, head) for chunk in self._chunks(rows))
        best = torch.cat([chunk.argmax(-1) for chunk in logits])  # (T,)
        in_tails = (best >= self.cutoffs[0]).nonzero().squeeze(1)
        if self.ranks is not None:
            best = ids_by_rank(self.ranks)[best]
        best[in_tails] = super().predict(rows[in_tails])
        return best.reshape(hidden.shape[:-1])

    def host_hint(self, targets: np.ndarray, *, ignore_index: int = -100) -> tuple[int, ...]:
        """How many targets lie in each band but the first. Larger numbers work as well: they are room, not counts."""
        ids = targets[targets != ignore_index].astype(np.int64)
        check_ids(torch.from_numpy(ids), self.num_embeddings)
        ranks = self._host_ranks()
        band_of = np.searchsorted(self.cutoffs, ids if ranks is None else ranks[ids], side="right")
        return tuple(np.bincount(band_of, minlength=len(self.cutoffs) + 1)[1:].tolist())

    def _host_ranks(self) -> np.ndarray | None:
        """The map's ranks in host memory, copied anew only when they have changed."""
        ranks = self.ranks
        if ranks is None:
            return None
        kept = self._ranks_on_host
        if kept is None or kept[0] is not ranks or kept[1] != ranks._version:
            kept = self._ranks_on_host = (ranks, ranks._version, ranks.cpu().numpy().copy())
        return kept[2]

    def _rooms(self, sizes: Tensor, hint: Sequence[int] | None) -> list[int]:
        """How many tokens each tail is computed for; with a hint, shapes depend on nothing else."""
        if hint is None:
            return sizes[1:].tolist()
        on_host = sizes.device.type == "cpu"
        if len(hint) != len(sizes) - 1 or (on_host and any(np.less(hint, sizes[1:].numpy()))):
            raise UserError(
                f"The hint {tuple(hint)} leaves no room for targets in {len(sizes)} bands: "
                f"pass host_hint of the same targets, or None."
            )
        return list(hint)


def ids_by_rank(ranks: Tensor) -> Tensor:
    """The ids in the order of their ranks, (V,)."""
    return torch.empty_like(ranks).scatter_(0, ranks, torch.arange(len(ranks), device=ranks.device))


@dataclass(frozen=True)
class AdaptiveSoftmaxConfig(OutputConfig):
    """A softmax over the bands of an adaptive embedding."""

    kind: str = "adaptive"

    def check(self, embedding: MapConfig) -> None:
        if isinstance(embedding, StandardConfig | ProjectiveConfig):
            raise UserError(
                f"An adaptive output takes its bands from an adaptive embedding, not from a {embedding.kind} one: use "
                "embedding.kind adaptive, output.kind adaptive-table, or output.kind full."
            )

    def build(self, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts) -> AdaptiveSoftmax:
        table = embedding.map
        if not self.tied and isinstance(table, AdaptiveMap):
            return AdaptiveSoftmax.untied(
                hidden_dim, embedding.num_embeddings, table.cutoffs, table.division, table.ranks
            )
        return AdaptiveSoftmax(hidden_dim, table)  # type: ignore[arg-type]


class AdaptiveSoftmax(BandedSoftmax):
    """Softmax over the bands of an adaptive map, whose tables and projections it shares with the input.

    The layer's own are only ``cluster_weight`` and, where hidden vectors are not as wide as the map, a bias-free
    ``projection`` that comes first. ``AdaptiveSoftmax.untied`` makes a layer with tables of its own.

    Args:
        hidden_dim: width of the context model's vectors.
        map_layer: the adaptive map to tie to; its owner trains, saves, moves and resizes it.
    """

    def __init__(self, hidden_dim: int, map_layer: AdaptiveMap) -> None:
        super().__init__(hidden_dim)
        if not isinstance(map_layer, AdaptiveMap):
            raise UserError(
                f"An adaptive softmax ties to an adaptive map, not to {type(map_layer).__name__}: "
                f"pass the embedding's map, or use FullSoftmax or AdaptiveTableSoftmax for another one."
            )
        self.own_map: AdaptiveMap | None = None
        self._map = (map_layer,)  # in a tuple, so that tied tables are not registered and saved a second time
        self.projection = hidden_projection(hidden_dim, map_layer.map_dim)
        self.cluster_weight = nn.Parameter(torch.empty(len(map_layer.cutoffs), map_layer.map_dim))
        self.reset_parameters()

    @classmethod
    def untied(
        cls,
        hidden_dim: int,
        num_embeddings: int,
        cutoffs: Sequence[int],
        division: int = 4,
        ranks: Sequence[int] | Tensor | None = None,
    ) -> Self:
        """A layer with its own tables, as wide as the hidden vectors.

        ``ranks`` are the places of all ids in the order of frequency, where that is not the order of ids.
        """
        layer = cls(hidden_dim, AdaptiveMap(num_embeddings, hidden_dim, cutoffs, division, ranks=ranks))
        layer.own_map = layer.map
        layer.reset_parameters()
        return layer

    def reset_parameters(self) -> None:
        """Draw the layer's own weights; the columns of the bands start like the rows they stand beside."""
        if self.own_map is not None:
            self.own_map.reset_parameters(std=self.hidden_dim**-0.5)
        if self.projection is not None:
            self.projection.reset_parameters()
        nn.init.normal_(self.cluster_weight, std=self.map.std)

    def resize(self, num_embeddings: int) -> None:
        """Resize the layer's own tables, in the last band; a tied layer has none and follows its map."""
        if self.own_map is not None:
            self.own_map.resize(num_embeddings)

    @property
    def map(self) -> AdaptiveMap:
        return self._map[0]

    @property
    def num_embeddings(self) -> int:
        return self.map.num_embeddings

    @property
    def cutoffs(self) -> tuple[int, ...]:
        return self.map.cutoffs

    @property
    def ranks(self) -> Tensor | None:
        return self.map.ranks

    def _shared(self, rows: Tensor) -> Tensor:
        return rows if self.projection is None else self.projection(rows)  # (T, map_dim)

    def _facing(self, rows: Tensor, band: int) -> Tensor:
        return F.linear(rows, self.map.projections[band - 1]) if band else rows  # (T, n_i)

    def _bands(self) -> list[Band]:
        first, *tails = (band.weight for band, _ in self.map.bands_with_starts())
        return [Band(torch.cat((first, self.cluster_weight))), *map(Band, tails)]

    def extra_repr(self) -> str:
        tie = "own tables" if self.own_map is not None else "tied to the map"
        return f"{self.hidden_dim} → {self.num_embeddings:,}, cutoffs {self.map.cutoffs}, {tie}"
