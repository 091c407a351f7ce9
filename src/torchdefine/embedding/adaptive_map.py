"""Adaptive input: one table for each frequency band, narrower for rarer tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchdefine.config import MOST_DEEP, MOST_WIDE, setting
from torchdefine.embedding.map import (
    MapConfig,
    VocabularyFacts,
    as_ids,
    check_resize,
    check_table,
    resized_table,
    rows_of,
)
from torchdefine.errors import UserError, check_count


@dataclass(frozen=True)
class AdaptiveConfig(MapConfig):
    """Tables by frequency band."""

    kind: str = "adaptive"
    cutoffs: tuple[int, ...] = setting(
        (20_000, 40_000, 200_000), "Frequency ranks at which the second and later bands start."
    )
    division: int = setting(
        4, "Each band is this many times narrower than the one before.", at_least=1, at_most=MOST_DEEP
    )
    output_dim: int | None = setting(
        None,
        "Project every band to this width, as Baevski & Auli do. By default the width is map_dim, and the first band "
        "has no projection.",
        at_least=1,
        at_most=MOST_WIDE,
    )

    rows: int | None = setting(
        None,
        "Rows of all bands together. Rarer tokens have no row, so only their features distinguish them.",
        at_least=1,
    )

    def build(self, vocabulary: VocabularyFacts, width: int | None) -> AdaptiveMap:
        cutoffs = fitting_cutoffs("embedding", self.cutoffs, vocabulary.size, divisors=(8, 2))
        rows = None if self.rows is None else min(self.rows, vocabulary.size)
        counts = vocabulary.counts_tensor()
        options: Any = {"scale": self.factor(self.output_dim or self.map_dim), "counts": counts, "rows": rows}
        return AdaptiveMap(vocabulary.size, self.map_dim, cutoffs, self.division, output_dim=self.output_dim, **options)


class AdaptiveMap(nn.Module):
    """Tables by frequency band: rarer tokens get narrower vectors, projected to the width of the others.

    Band 0 holds the most frequent tokens, ``map_dim`` wide, and has no projection; band i is ``division ** i`` times
    narrower. With ``output_dim`` every band is projected to it, band 0 too: the adaptive input of Baevski & Auli
    (2019). With ``rows`` there are no more, and tokens of that rank or rarer get zeros. Bands go by frequency rank. If
    ids are not sorted by frequency (subwords, another model's vocabulary), give ``counts``, one per id. Gradients of
    the tables are sparse tensors where ``sparse`` is set.
    """

    kind = "adaptive"
    ranks: Tensor | None

    def __init__(
        self,
        num_embeddings: int,
        map_dim: int,
        cutoffs: Sequence[int],
        division: int = 4,
        padding_idx: int | None = None,
        scale: float = 1.0,
        counts: Sequence[int] | Tensor | None = None,
        output_dim: int | None = None,
        sparse: bool = False,
        rows: int | None = None,
    ) -> None:
        super().__init__()
        self.padding_idx = check_table(num_embeddings, map_dim, padding_idx)
        self.cutoffs = check_cutoffs(cutoffs, num_embeddings)
        self.rows = num_embeddings if rows is None else rows
        if not 1 <= self.rows <= num_embeddings:
            raise UserError(f"{rows} rows do not fit {num_embeddings} tokens: use 1 to {num_embeddings}.")
        starts = [start for start in (0, *self.cutoffs) if start < self.rows]
        self.band_dims = band_dims(map_dim, division, len(starts))
        if output_dim is not None:
            check_count("output_dim", output_dim)
        self.num_embeddings, self.map_dim, self.output_dim = num_embeddings, map_dim, output_dim or map_dim
        self.division, self.scale, self.std = division, scale, 1.0
        self.register_buffer("ranks", frequency_ranks(num_embeddings, counts))
        edges = [*starts, self.rows]
        self.bands = nn.ModuleList(
            nn.Embedding(stop - start, dim, sparse=sparse)
            for start, stop, dim in zip(edges, edges[1:], self.band_dims, strict=False)
        )
        projected = self.band_dims[1:] if output_dim is None else self.band_dims
        self.projections = nn.ParameterList(torch.empty(dim, self.output_dim) for dim in projected)
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None) -> None:
        """Every band gives vectors of standard deviation ``std``, by default the one that they had before."""
        self.std = std = self.std if std is None else std
        padding = self.padding_idx
        if padding is not None and self.ranks is not None and not self.ranks.is_meta:
            padding = int(self.ranks[padding])
        for band, start in self.bands_with_starts():
            nn.init.normal_(band.weight, std=std)
            if padding is not None and start <= padding < start + band.num_embeddings:
                nn.init.zeros_(band.weight[padding - start])
        for projection in self.projections:
            nn.init.normal_(projection, std=projection.shape[0] ** -0.5)

    @property
    def sparse(self) -> bool:
        """Whether the gradients of the tables are sparse tensors, which have only the rows that a batch uses."""
        return all(band.sparse for band, _ in self.bands_with_starts())

    @sparse.setter
    def sparse(self, sparse: bool) -> None:
        for band, _ in self.bands_with_starts():
            band.sparse = sparse

    @property
    def projects_first(self) -> bool:
        """Whether the first band has a projection too."""
        return len(self.projections) == len(self.bands)

    def projection_of(self, band: int) -> Tensor:
        """From the width of a band to that of the vectors, (n / division^i, output_dim)."""
        return self.projections[band if self.projects_first else band - 1]

    def bands_with_starts(self) -> list[tuple[nn.Embedding, int]]:
        """The tables that have rows, most frequent first, each with the rank of its first row."""
        return list(zip(cast("Iterable[nn.Embedding]", self.bands), (0, *self.cutoffs), strict=False))

    def forward(self, ids: Tensor, each_once: bool = False) -> Tensor:
        """Static shapes: every band looks up every token, and the vectors of other bands' tokens are zeroed.

        The narrow bands together cost a third of one n × n product a token, less than sorting tokens into bands,
        which would also make the host wait for the device.
        """
        ids = as_ids(ids, self.num_embeddings)
        ranks = ids if self.ranks is None else self.ranks[ids]
        pieces = []
        for band, start in self.bands_with_starts():
            local = ranks - start
            inside = (local >= 0) & (local < band.num_embeddings)
            if self.padding_idx is not None:
                inside &= ids != self.padding_idx
            if band.sparse:
                pieces.append(rows_inside(band, local, inside))
                continue
            # For tokens of other bands the nearest row, or on a GPU different ones, whose gradients add up faster.
            different = each_once and local.is_cuda
            rows = local.remainder(band.num_embeddings) if different else local.clamp(0, band.num_embeddings - 1)
            vectors = rows_of(band, rows, each_once)
            pieces.append(vectors * inside.unsqueeze(-1))  # (…, n / division^i)
        projected = pieces if self.projects_first else pieces[1:]
        vectors = torch.cat(projected, dim=-1) @ torch.cat(list(self.projections))  # (…, output_dim)
        if not self.projects_first:
            vectors = pieces[0] + vectors
        return vectors * self.scale if self.scale != 1.0 else vectors

    def resize(self, num_embeddings: int) -> None:
        """Rows come and go at the end of the rarest band; where some tokens have none, new ones have none either."""
        check_resize(num_embeddings, self.padding_idx)
        if num_embeddings <= self.cutoffs[-1]:
            problem = f"{num_embeddings} rows would empty the rarest band, which starts at {self.cutoffs[-1]}"
            raise UserError(f"{problem}: keep at least {self.cutoffs[-1] + 1}.")
        if num_embeddings < self.rows < self.num_embeddings:
            raise UserError(f"{num_embeddings} tokens are fewer than the {self.rows} rows: keep at least {self.rows}.")
        if self.ranks is not None:
            self.ranks = grown_ranks(self.ranks, num_embeddings)
        if self.rows == self.num_embeddings:
            last, start = self.bands_with_starts()[-1]
            self.bands[-1] = resized_table(last, num_embeddings - start, self.std)
            self.rows = num_embeddings
        self.num_embeddings = num_embeddings

    def to_config(self) -> dict[str, Any]:
        names = ("num_embeddings", "map_dim", "cutoffs", "division", "padding_idx", "scale", "sparse", "std", "rows")
        config = {"kind": self.kind, "ranked": self.ranks is not None} | {name: getattr(self, name) for name in names}
        return config | {"output_dim": self.output_dim if self.projects_first else None}

    def extra_repr(self) -> str:
        called = "ids" if self.ranks is None else "ranks"
        lines = [
            f"{called} {start:,} – {start + band.num_embeddings - 1:,}: {band.embedding_dim} wide"
            for band, start in self.bands_with_starts()
        ]
        lines += [f"all projected to {self.output_dim}"] if self.projects_first else []
        return "\n".join(lines + ([] if self.scale == 1.0 else [f"scale={self.scale:g}"]))


def rows_inside(band: nn.Embedding, local: Tensor, inside: Tensor) -> Tensor:
    """The rows of a band's own tokens and zeros for all others, which leave no entry in its sparse gradient.

    An optimiser of sparse gradients would take an entry of zeros for a use of that row. The host waits for a GPU.
    """
    zeros = band.weight.new_zeros(*local.shape, band.embedding_dim)
    return zeros.index_put((inside,), band(local[inside]))  # (…, n / division^i)


def check_cutoffs(cutoffs: Sequence[int], num_embeddings: int) -> tuple[int, ...]:
    cutoffs = tuple(cutoffs)
    if not cutoffs:
        raise UserError("Adaptive bands need at least one cutoff: try (20000,) or a standard table.")
    if cutoffs[0] < 1 or any(a >= b for a, b in itertools.pairwise(cutoffs)):
        positive = tuple(sorted({c for c in cutoffs if c > 0}))
        raise UserError(f"The cutoffs {cutoffs} are not positive and increasing: try {positive or (20000,)}.")
    if cutoffs[-1] >= num_embeddings:
        fitting = shrink_cutoffs(cutoffs, num_embeddings)
        way_out = f"use {fitting}" if fitting else "use a standard table"
        problem = f"The cutoff {cutoffs[-1]} does not fit a vocabulary of {num_embeddings}"
        raise UserError(f"{problem}: {way_out} (shrink_cutoffs does this for you).")
    return cutoffs


def shrink_cutoffs(cutoffs: Sequence[int], num_embeddings: int) -> tuple[int, ...]:
    """The cutoffs that still lie inside a smaller vocabulary; none may be left."""
    return tuple(c for c in cutoffs if c < num_embeddings)


def fitting_cutoffs(section: str, cutoffs: Sequence[int], size: int, divisors: Sequence[int]) -> tuple[int, ...]:
    """A recipe's cutoffs inside the vocabulary; where there are none, fractions of its size are suggested."""
    fitting = shrink_cutoffs(cutoffs, size)
    if not fitting:
        suggested = sorted({size // divisor for divisor in divisors} - {0})
        with_bands = f"use --{section}.cutoffs {','.join(map(str, suggested))}, or " if suggested else ""
        standard = "--embedding.kind standard and " if section == "embedding" else ""
        problem = f"All of {section}.cutoffs {tuple(cutoffs)} lie outside the vocabulary of {size}"
        raise UserError(f"{problem}: {with_bands}remove the bands with {standard}--output.kind full.")
    return fitting


def band_dims(map_dim: int, division: int, bands: int) -> tuple[int, ...]:
    """Widths of the bands: map_dim, map_dim / division, …"""
    check_count("division", division, "use 4, or 1 for bands of equal width")
    dims = tuple(map_dim // division**band for band in range(bands))
    if dims[-1] < 1:
        raise UserError(
            f"map_dim {map_dim} is too small for {bands} bands, each {division} times narrower than the one before: "
            f"use map_dim {division ** (bands - 1)} or more, a smaller division, or fewer cutoffs."
        )
    return dims


def frequency_ranks(num_embeddings: int, counts: Sequence[int] | Tensor | None) -> Tensor | None:
    """ranks[id]: 0 for the most frequent token. None when the ids are the ranks."""
    if counts is None:
        return None
    if isinstance(counts, Tensor) and counts.is_meta:  # of a module without weights
        return torch.empty_like(counts, dtype=torch.long)
    values = torch.as_tensor(counts if isinstance(counts, Tensor) else list(counts), dtype=torch.long, device="cpu")
    if values.shape != (num_embeddings,):
        raise UserError(f"counts has the shape {tuple(values.shape)}, but needs one for each of {num_embeddings} ids.")
    order = torch.argsort(values, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(num_embeddings, device="cpu"))
    return ranks.to(torch.empty(0).device)  # the default device, also of a `with torch.device(…)` in torch 2.6


def grown_ranks(ranks: Tensor, num_embeddings: int) -> Tensor:
    """The ranks of a larger vocabulary, whose new tokens are the rarest."""
    if num_embeddings < len(ranks):
        problem = "Rows cannot be removed from bands whose ids are not in frequency order"
        raise UserError(f"{problem}: keep at least {len(ranks)}.")
    return torch.cat((ranks, torch.arange(len(ranks), num_embeddings, device=ranks.device)))
