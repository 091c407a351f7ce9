"""Adaptive softmax over the rows of one table: bands of equal width, as the Transformer-XL recipes have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.config import setting
from torchdefine.embedding import AdaptiveConfig, MapConfig, TokenEmbedding, VocabularyFacts
from torchdefine.embedding.adaptive_map import check_cutoffs, fitting_cutoffs, frequency_ranks, grown_ranks
from torchdefine.embedding.map import ProjectiveMap, StandardMap
from torchdefine.errors import UserError
from torchdefine.output.adaptive import BandedSoftmax, checked_ties
from torchdefine.output.layer import OutputConfig
from torchdefine.output.linear_cross_entropy import Table


@dataclass(frozen=True)
class AdaptiveTableConfig(OutputConfig):
    """A softmax over bands of a standard or projective embedding's table."""

    kind: str = "adaptive-table"
    cutoffs: tuple[int, ...] = setting(
        (20_000, 40_000, 200_000), "Frequency ranks at which the second and later bands start."
    )
    tied_projections: tuple[bool, ...] = setting((), "For each band, whether it shares the embedding's projection.")

    def __post_init__(self) -> None:
        super().__post_init__()
        given, bands = len(self.tied_projections), len(self.cutoffs) + 1
        self.require(given in (0, bands), f"tied_projections has {given} values for {bands} bands: give one for each.")
        self.require(
            self.tied != "none", "tied is none, but this kind always shares the embedding's rows: use another kind."
        )
        projected = any(self.tied_projections)
        self.require(
            self.tied == "table" or not projected,
            "tied_projections are of the embedding's table: leave them out, or use output.tied table.",
        )

    def check(self, embedding: MapConfig) -> None:
        if isinstance(embedding, AdaptiveConfig):
            raise UserError("An adaptive embedding has bands of its own: use output.kind adaptive.")

    def build(self, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts) -> AdaptiveTableSoftmax:
        halves = tuple(2**band for band in range(len(self.cutoffs), 0, -1))  # as many, for tied_projections to fit
        cutoffs = fitting_cutoffs("output", self.cutoffs, embedding.num_embeddings, halves)
        tied, counts = self.tied_projections[: len(cutoffs) + 1], vocabulary.counts_tensor()
        return AdaptiveTableSoftmax(hidden_dim, self.tied_to(embedding), cutoffs, tied, counts)


class AdaptiveTableSoftmax(BandedSoftmax):
    """Softmax over bands of a standard or projective map's table, with a bias for every token and every band.

    Tied to an embedding over such a map, it compares with finished vectors. Where hidden vectors are not as wide as the
    rows, every band has a projection to them: its own, or the one that a projective map has for the input, transposed.

    Args:
        hidden_dim: width of the context model's vectors.
        tied_to: the map, or the embedding whose finished vectors it compares with.
        cutoffs: the frequency ranks that every band but the first starts at.
        tied_projections: for every band, whether it takes the map's projection; none does by default, and none may
            where it compares with finished vectors.
        counts: how often each id occurs, where ids are not in the order of frequency (subwords, say).
    """

    frequency_ranks: Tensor | None

    def __init__(
        self,
        hidden_dim: int,
        tied_to: StandardMap | ProjectiveMap | TokenEmbedding,
        cutoffs: Sequence[int],
        tied_projections: Sequence[bool] = (),
        counts: Sequence[int] | Tensor | None = None,
    ) -> None:
        finished = isinstance(tied_to, TokenEmbedding)
        map_layer: Any = tied_to.map if finished else tied_to
        if not isinstance(map_layer, StandardMap | ProjectiveMap):
            problem = f"Bands of one table need a standard or projective map, not {type(map_layer).__name__}"
            raise UserError(f"{problem}: pass the embedding's map, or use AdaptiveSoftmax for an adaptive one.")
        super().__init__(hidden_dim, tied_to, check_cutoffs(cutoffs, map_layer.num_embeddings))
        width, bands = self.width, len(self.cutoffs) + 1
        self.register_buffer("frequency_ranks", frequency_ranks(map_layer.num_embeddings, counts))
        self._tied = checked_ties(tied_projections, (False,) * bands)
        if any(self._tied) and (finished or not isinstance(map_layer, ProjectiveMap)):
            what = "Finished vectors have" if finished else "A standard map has"
            raise UserError(f"{what} no projection to tie to: use a projective map, or no tied_projections.")
        if any(self._tied) and map_layer.output_dim != hidden_dim:
            raise UserError(
                f"The map's projection gives {map_layer.output_dim} values, but the context model's vectors have "
                f"{hidden_dim}: make both equal, or use no tied_projections."
            )
        self.projections = nn.ModuleDict()
        if hidden_dim != width:
            own = [str(band) for band, tied in enumerate(self._tied) if not tied]
            self.projections.update({band: nn.Linear(hidden_dim, width, bias=False) for band in own})
        self.cluster_weight = nn.Parameter(torch.empty(bands - 1, width))
        self.cluster_bias = nn.Parameter(torch.empty(bands - 1))
        self.bias = nn.Parameter(torch.empty(map_layer.num_embeddings))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the layer's own weights like the map's weights of the same kind; biases start at zero."""
        super().reset_parameters()
        projective = isinstance(self._map[0], ProjectiveMap) and not self._embedding
        std = self._map[0].projection_std if projective else self.hidden_dim**-0.5
        for parameter in self.projections.parameters():
            nn.init.normal_(parameter, std=std)
        nn.init.normal_(self.cluster_weight, std=self._row_std())
        nn.init.zeros_(self.cluster_bias)

    @property
    def ranks(self) -> Tensor | None:
        return self.frequency_ranks

    def resize(self, num_embeddings: int) -> None:
        """Follow a change of the vocabulary at the map: old biases stay, new ones are zero, the last band grows."""
        check_cutoffs(self.cutoffs, num_embeddings)
        if self.frequency_ranks is not None:
            self.frequency_ranks = grown_ranks(self.frequency_ranks, num_embeddings)
        super().resize(num_embeddings)

    def extra_repr(self) -> str:
        tied = ", ".join(str(band) for band, tied in enumerate(self._tied) if tied)
        projections = f", the map's projection in band {tied}" if tied else ""
        return f"{super().extra_repr()}{projections}"

    def _bands(self) -> list[Table]:
        (first, bias), *tails = self._split(self._table(), self._checked_bias())
        assert bias is not None
        columns = self.cluster_weight.to(first.dtype)  # finished vectors may be in half precision
        return [Table(torch.cat((first, columns)), torch.cat((bias, self.cluster_bias))), *tails]

    def _facing(self, rows: Tensor, band: int) -> Tensor:
        if self._tied[band]:
            return F.linear(rows, self._map[0].projection.weight.T)  # (T, map_dim)
        return self.projections[str(band)](rows) if self.projections else rows  # (T, map_dim)
