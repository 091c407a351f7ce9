"""Rows in bands by frequency, each band held in its own way: whole, in many bits, in few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from torchdefine.tables.rows import Rows

_LARGEST_SHORT = 1 << 16


class BandedRows(Rows):
    """Bands of rows one after another, most frequent first, and the place of each row in that order.

    With ``ranked`` False the rows are in that order already and no places are stored. A band may be narrower than the
    table: its rows end in zeros.
    """

    kind = "banded"
    settings = ("bands", "ranked")

    def __init__(self, bands: list[Rows], ranked: bool = True) -> None:
        super().__init__(sum(band.num_rows for band in bands), max(band.width for band in bands))
        self.bands: Sequence[Rows] = nn.ModuleList(bands)  # type: ignore[assignment]
        self.ranked = ranked
        if ranked:
            place_type = torch.int16 if self.num_rows <= _LARGEST_SHORT else torch.int32
            self.register_buffer("places", torch.zeros(self.num_rows, dtype=place_type))
            self.places: Tensor

    def order_by(self, order: Tensor) -> Self:
        """Set the places from ``order``: row numbers, most frequent first."""
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        if self.places.dtype == torch.int16:
            places = torch.where(places >= _LARGEST_SHORT // 2, places - _LARGEST_SHORT, places)  # as unsigned
        self.places = places.to(self.places.dtype)
        return self

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        place = rows
        if self.ranked:
            place = self.places[rows].long()
            place = torch.where(place < 0, place + _LARGEST_SHORT, place)
        if place.device.type == "cpu" and not torch.compiler.is_compiling():
            return self._each_its_own(place, dtype)
        return self._all_and_pick(place, dtype)

    def _each_its_own(self, place: Tensor, dtype: torch.dtype) -> Tensor:
        """Every band decodes only its own rows: least work, but shapes that depend on the ids."""
        flat = place.reshape(-1)
        vectors = torch.zeros(len(flat), self.width, dtype=dtype, device=place.device)
        start = 0
        for band in self.bands:
            where = ((flat >= start) & (flat < start + band.num_rows)).nonzero().squeeze(-1)
            if len(where):
                own = self._widened(band(flat[where] - start, dtype)).to(dtype)  # autocast may have changed it
                vectors = vectors.index_put((where,), own)
            start += band.num_rows
        return vectors.reshape(*place.shape, self.width)

    def _all_and_pick(self, place: Tensor, dtype: torch.dtype) -> Tensor:
        """Every band decodes for all, and a mask picks: fixed shapes, as compiled and exported programs need."""
        vectors: Tensor | None = None
        start = 0
        for band in self.bands:
            inside = (place - start).clamp(0, band.num_rows - 1)
            own = self._widened(band(inside, dtype))  # (…, width)
            vectors = own if vectors is None else torch.where((place >= start).unsqueeze(-1), own, vectors)
            start += band.num_rows
        assert vectors is not None
        return vectors

    def _widened(self, vectors: Tensor) -> Tensor:
        return nn.functional.pad(vectors, (0, self.width - vectors.shape[-1]))


def in_bands(bands: list[Rows], order: Tensor) -> BandedRows:
    """Bands whose rows stand in ``order``; places are left out if that is the order of the ids."""
    if already_in(order):
        return BandedRows(bands, ranked=False)
    return BandedRows(bands).to(order.device).order_by(order)


def place_bytes(rows: int) -> int:
    """The bytes that a banded table spends on the order of its rows."""
    return rows * (2 if rows <= _LARGEST_SHORT else 4)


def already_in(order: Tensor) -> bool:
    """Whether the rows are in that order already."""
    return torch.equal(order, torch.arange(len(order), device=order.device))
