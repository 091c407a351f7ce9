"""Adaptive softmax: frequent tokens and one column for each rarer band first, then only the band that is needed."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.config import setting
from torchdefine.embedding import (
    AdaptiveConfig,
    AdaptiveMap,
    MapConfig,
    ProjectiveConfig,
    SlimConfig,
    StandardConfig,
    TokenEmbedding,
    VocabularyFacts,
)
from torchdefine.embedding.map import check_ids
from torchdefine.errors import UserError
from torchdefine.ops import exact_dtype, taken_rows
from torchdefine.output.full import MapSoftmax
from torchdefine.output.layer import OutputConfig
from torchdefine.output.linear_cross_entropy import Table, Targets, table_losses


def checked_ties(given: Sequence[bool], usual: Sequence[bool]) -> tuple[bool, ...]:
    """For every band, whether it takes the map's projection; ``usual`` says it where nothing is given."""
    if given and len(given) != len(usual):
        raise UserError(f"tied_projections has {len(given)} values for {len(usual)} bands: give one for each.")
    return tuple(given or usual)


class BandedSoftmax(MapSoftmax):
    """Softmax over bands of tokens, the most frequent first.

    The head holds the tokens of band 0 and, behind them, one column for each further band (``cluster_weight``).
    log p(token of band i) = log p(column i in the head) + log p(token within the band). A layer defines its bands
    by ``ranks``, ``_bands`` and ``_facing``.

    Args:
        hidden_dim: width of the context model's vectors.
        tied_to: the map to tie to, or the embedding whose finished vectors it compares with.
        cutoffs: the frequency ranks that every band but the first starts at.
    """

    def __init__(self, hidden_dim: int, tied_to: Any, cutoffs: tuple[int, ...]) -> None:
        super().__init__(hidden_dim, tied_to)
        self.cutoffs = cutoffs
        self._ranks_on_host: tuple[Tensor, int, np.ndarray] | None = None

    @property
    @abstractmethod
    def ranks(self) -> Tensor | None:
        """The frequency rank of every id, (V,); None where ids are ranks."""

    @abstractmethod
    def _bands(self) -> list[Table]:
        """Rows and biases of the bands, (V_i, n_i) and (V_i,). The head comes first; its last rows stand for bands."""

    @abstractmethod
    def _facing(self, rows: Tensor, band: int) -> Tensor:
        """Projected vectors, brought to the width of a band's rows: (T, …) → (T, n_i)."""

    def losses(self, hidden: Tensor, targets: Targets) -> Tensor:
        """The head for every token, each tail only for its own. Without a hint the host waits for the device once."""
        ids, counted, label_smoothing, per_token, hint = targets
        rows, first, tails = self._rows(hidden), self.cutoffs[0], len(self.cutoffs)
        if label_smoothing:  # exact and therefore expensive: it needs every band for every token
            return torch.where(counted, self._smoothed_losses(self.scorer(), label_smoothing, ids, rows), 0.0)
        ranks = ids if self.ranks is None else self.ranks[ids]
        band_of = torch.zeros_like(ranks)
        for cutoff in self.cutoffs:
            band_of += ranks >= cutoff
        columns = torch.where(counted, torch.where(ranks < first, ranks, first - 1 + band_of), 0)
        band_of = torch.where(counted, band_of, tails + 1)  # tokens that do not count are sorted last
        sizes = torch.stack([(band_of == band).sum() for band in range(tails + 1)])
        ends, order = sizes.cumsum(0), torch.argsort(band_of.short(), stable=True)  # a GPU sorts byte by byte
        places, held = [], []  # of each tail: the tokens that it is computed for, and their columns
        for index, (start, room) in enumerate(zip(self.cutoffs, self._rooms(sizes, hint), strict=True), start=1):
            seat = torch.arange(room if len(ranks) else 0, device=ranks.device)
            places.append(order[(ends[index - 1] + seat).clamp(max=len(ranks) - 1)])  # the first sizes[index] count
            counts = seat < sizes[index]
            held.append(targets._replace(ids=torch.where(counts, ranks[places[-1]] - start, 0), counted=counts))
        facing, *tail_rows = taken_rows(self._projected(rows), places)  # (T, …) and (room, …)
        head, *bands = self._bands()
        loss = table_losses(self._facing(facing, 0), head, targets._replace(ids=columns))
        # A band without tokens takes part as well, so that its own parameters get a gradient on every worker.
        for index, band in enumerate(bands):
            added = table_losses(self._facing(tail_rows[index], index + 1), band, held[index])  # (room,) or ()
            loss = loss.index_add(0, places[index], added) if per_token else loss + added
        return loss

    def _rooms(self, sizes: Tensor, hint: Sequence[int] | None) -> list[int]:
        """How many tokens each tail is computed for; with a hint, shapes depend on nothing else."""
        if hint is None:
            return sizes[1:].tolist()
        if len(hint) != len(sizes) - 1 or (sizes.is_cpu and any(np.less(hint, sizes[1:].numpy()))):
            problem = f"The hint {tuple(hint)} does not cover targets in {len(sizes)} bands"
            raise UserError(f"{problem}: pass host_hint of the same targets, or None.")
        return list(hint)

    def log_prob(self, hidden: Tensor) -> Tensor:
        return self.scorer()(hidden)

    def scorer(self) -> Callable[[Tensor], Tensor]:
        return partial(self._log_prob, self._bands())

    def _log_prob(self, bands: list[Table], hidden: Tensor) -> Tensor:
        rows = self._projected(self._rows(hidden))  # (T, …)
        first = self.cutoffs[0]
        head, *tails = (
            F.log_softmax(self._band_logits(rows, index, band), dim=-1) for index, band in enumerate(bands)
        )  # (T, V_i)
        pieces = [head[:, :first], *(tail + head[:, first + i, None] for i, tail in enumerate(tails))]
        log_probs = torch.cat(pieces, dim=-1)  # (T, V) by rank
        if self.ranks is not None:
            log_probs = log_probs.index_select(1, self.ranks)
        return log_probs.reshape(*hidden.shape[:-1], self.num_embeddings)  # (…, V)

    def _split(self, table: Tensor, bias: Tensor | None = None) -> list[Table]:
        """The bands of one table by id: one split, not a slice for each, so that the gradients are joined in one go."""
        edges = (0, *self.cutoffs, self.num_embeddings)
        sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        if self.ranks is not None:
            order = ids_by_rank(self.ranks)
            table, bias = table[order], None if bias is None else bias[order]
        biases: Sequence[Tensor | None] = [None] * len(sizes) if bias is None else bias.split(sizes)
        return [Table(*band) for band in zip(table.split(sizes), biases, strict=True)]  # (V_i, width) and (V_i,)

    def _band_logits(self, rows: Tensor, index: int, band: Table) -> Tensor:
        logits = F.linear(self._facing(rows, index), band.weight).to(exact_dtype(rows))  # (T, V_i)
        return logits if band.bias is None else logits + band.bias

    @torch.no_grad()
    def predict(self, hidden: Tensor) -> Tensor:
        """The most probable ids, (…). Tails are computed only where one of their columns wins the head.

        Where a frequent token wins, no rarer one can be more probable: its whole band is less probable.
        """
        rows, head = self._rows(hidden), self._bands()[0]
        logits = (self._band_logits(self._projected(chunk), 0, head) for chunk in self._chunks(rows))
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
        if (ranks := self.ranks) is not None:
            kept = self._ranks_on_host  # copied anew only when they have changed
            if kept is None or kept[0] is not ranks or kept[1] != ranks._version:
                kept = self._ranks_on_host = (ranks, ranks._version, ranks.cpu().numpy().copy())
            ids = kept[2][ids]
        band_of = np.searchsorted(self.cutoffs, ids, side="right")
        return tuple(np.bincount(band_of, minlength=len(self.cutoffs) + 1)[1:].tolist())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, cutoffs {self.cutoffs}"


def ids_by_rank(ranks: Tensor) -> Tensor:
    """The ids in the order of their ranks, (V,)."""
    return torch.empty_like(ranks).scatter_(0, ranks, torch.arange(len(ranks), device=ranks.device))


@dataclass(frozen=True)
class AdaptiveSoftmaxConfig(OutputConfig):
    """A softmax over the bands of an adaptive embedding."""

    kind: str = "adaptive"
    tied_projections: tuple[bool, ...] = setting(
        (), "For each band, whether it shares the embedding's projection; by default all but the first do."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.tied == "table" or not self.tied_projections,
            "tied_projections are of the embedding's table: leave them out, or use output.tied table.",
        )

    def check(self, embedding: MapConfig) -> None:
        if isinstance(embedding, StandardConfig | ProjectiveConfig | SlimConfig):
            problem = f"An adaptive output takes its bands from an adaptive embedding, not from a {embedding.kind} one"
            raise UserError(f"{problem}: use embedding.kind adaptive, output.kind adaptive-table, or output.kind full.")
        if isinstance(embedding, AdaptiveConfig):
            checked_ties(self.tied_projections, (False,) * (len(embedding.cutoffs) + 1))
            if self.tied == "table" and embedding.rows is not None:
                problem = "With embedding.rows not every word has a row that an output could compare with"
                raise UserError(f"{problem}: use output.tied none or finished, or leave it out.")

    def width(self, embedding: TokenEmbedding) -> int | None:
        """Tied projections take vectors as wide as those that the map gives."""
        return embedding.map.output_dim if self.tied == "table" else super().width(embedding)

    def build(self, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts) -> AdaptiveSoftmax:
        table: Any = embedding.map
        if self.tied != "none" or not isinstance(table, AdaptiveMap):
            tied = self.tied_projections[: len(getattr(table, "cutoffs", ())) + 1]  # a small vocabulary has fewer bands
            return AdaptiveSoftmax(hidden_dim, self.tied_to(embedding), tied)
        return AdaptiveSoftmax.untied(hidden_dim, embedding.num_embeddings, table.cutoffs, table.division, table.ranks)


class AdaptiveSoftmax(BandedSoftmax):
    """Softmax over the bands of an adaptive map, whose tables and projections it shares with the input.

    Tied to an embedding over such a map, it compares with finished vectors, which are equally wide in all bands. The
    layer's own are ``cluster_weight``; where hidden vectors are not as wide as what the map gives, a bias-free
    ``projection`` that comes first; and ``projections`` of bands that do not take the map's, transposed.
    ``AdaptiveSoftmax.untied`` makes a layer with tables of its own.

    Args:
        hidden_dim: width of the context model's vectors.
        tied_to: the adaptive map, or the embedding over one.
        tied_projections: for every band, whether it takes the map's projection; by default all but the first do, as
            with Baevski & Auli (2019), and none where it compares with finished vectors. A first band as wide as the
            vectors needs no projection, even if the map has one.
    """

    def __init__(
        self, hidden_dim: int, tied_to: AdaptiveMap | TokenEmbedding, tied_projections: Sequence[bool] = ()
    ) -> None:
        finished = isinstance(tied_to, TokenEmbedding)
        map_layer: Any = tied_to.map if finished else tied_to
        if not isinstance(map_layer, AdaptiveMap):
            raise UserError(
                f"An adaptive softmax ties to an adaptive map, not to {type(map_layer).__name__}: "
                f"pass the embedding's map, or use FullSoftmax or AdaptiveTableSoftmax for another one."
            )
        super().__init__(hidden_dim, tied_to, map_layer.cutoffs)
        self._tied = checked_ties(tied_projections, (False, *[not finished] * len(self.cutoffs)))
        if any(self._tied) and finished:
            raise UserError("Finished vectors have no projection to tie to: use no tied_projections.")
        if self._tied[0] and not map_layer.projects_first:
            raise UserError("The map's first band has no projection to tie to: give the map an output_dim.")
        facing = self.width if finished else map_layer.output_dim
        self.projection = nn.Linear(hidden_dim, facing, bias=False) if facing != hidden_dim else None
        self.projections = nn.ModuleDict(
            {
                str(band): nn.Linear(facing, width, bias=False)
                for band, width in enumerate(map_layer.band_dims)
                if not (finished or self._tied[band] or (band == 0 and width == facing))
            }
        )
        self.cluster_weight = nn.Parameter(torch.empty(len(self.cutoffs), self.width))
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
        counts = None if ranks is None else -torch.as_tensor(ranks)  # the lowest rank is that of the most frequent
        layer = cls(hidden_dim, AdaptiveMap(num_embeddings, hidden_dim, cutoffs, division, counts=counts))
        layer.own_map = layer.map
        layer.reset_parameters()
        return layer

    def reset_parameters(self) -> None:
        """Draw the layer's own weights; the columns of the bands start like the rows they stand beside."""
        super().reset_parameters()
        for projection in self.projections.parameters():
            nn.init.normal_(projection, std=projection.shape[1] ** -0.5)
        nn.init.normal_(self.cluster_weight, std=self._row_std())

    @property
    def map(self) -> AdaptiveMap:
        return self._map[0]

    @property
    def ranks(self) -> Tensor | None:
        return self.map.ranks

    def _facing(self, rows: Tensor, band: int) -> Tensor:
        if self._tied[band]:
            return F.linear(rows, self.map.projection_of(band))  # (T, n_i)
        return self.projections[str(band)](rows) if str(band) in self.projections else rows  # (T, n_i)

    def _bands(self) -> list[Table]:
        if self._embedding:
            first, *tails = self._split(self._table())
        else:
            first, *tails = (Table(band.weight) for band, _ in self.map.bands_with_starts())
        return [Table(torch.cat((first.weight, self.cluster_weight.to(first.weight.dtype)))), *tails]
