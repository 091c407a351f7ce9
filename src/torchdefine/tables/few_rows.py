"""A few rows out of many bands, decoded by as many operations as one band needs.

Where a number stands in its row follows from its band and its column. Here that is a table, so all bytes of all rows
are fetched at once, and then the levels that they select.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchdefine.tables.fields import field_bytes, fields_of

Run = Sequence[int]
"""Bits of a number, and how many columns have so many."""
LARGEST = 2**31 - 1


class Band(Protocol):
    """Rows in ``runs`` of columns: the codes of each select levels, and these are multiplied by the columns' scales."""

    num_rows: int
    width: int
    runs: list[list[int]]
    codes: Tensor
    levels: Tensor
    scales: Tensor


class Field(NamedTuple):
    """Some bits of a number's code: where they stand in a row, and in its code."""

    byte: int
    bits: int
    shift: int
    weight: int


def fields_by_column(runs: Sequence[Run]) -> Iterator[list[Field]]:
    """For each column of a band the fields of its codes, the highest first."""
    start = 0
    for bits, columns in runs:
        parts, rest = [], bits
        for field in fields_of(bits):
            rest -= field
            parts.append((start, field, rest))
            start += field_bytes(columns, field)
        for column in range(columns):
            yield [
                Field(first + column * field // 8, field, column * field % 8, 2**rest) for first, field, rest in parts
            ]


class Layout(NamedTuple):
    """What the bands and columns of some rows say, in tables; a column has a place for every field of a code.

    A column that a band does not have is a number of scale zero.
    """

    widths: list[int]
    """How many columns have a first field in any band, a second, a third."""
    ends: Tensor
    """The first row after each band, (bands,)."""
    starts: Tensor
    """The bytes of a row, and where row 0 of all bands would begin if they had so many, (bands, 2)."""
    bytes: Tensor
    """Where the byte of a field is in its row, (bands, fields)."""
    kinds: Tensor
    """Where in ``parts`` the fields of this kind begin, (bands, fields)."""
    parts: Tensor
    """What a byte adds to a code, for every kind of field."""
    first_levels: Tensor
    """Where the levels of a column begin among all levels, (bands, columns)."""


def layout_of(bands: Sequence[Band], width: int) -> Layout:
    columns = [list(fields_by_column(band.runs)) for band in bands]
    depth = max(len(fields) for band in columns for fields in band)
    widths = [max(c + 1 for band in columns for c, fields in enumerate(band) if len(fields) > k) for k in range(depth)]
    widths[0] = width
    kinds: dict[tuple[int, ...], int] = {}
    places, which, first_levels, starts = [], [], [], []
    flat = first_row = first_level = 0
    for band, of_columns in zip(bands, columns, strict=True):
        of_columns = of_columns + [[]] * (width - len(of_columns))
        slots = [fields[k] if k < len(fields) else None for k in range(depth) for fields in of_columns[: widths[k]]]
        places.append([slot.byte if slot else 0 for slot in slots])
        which.append([256 * kinds.setdefault(tuple(slot[1:]) if slot else (), len(kinds)) for slot in slots])
        levels: list[int] = []
        for bits, count in band.runs:
            levels += [first_level] * count
            first_level += 2**bits
        first_levels.append(levels + [0] * (width - len(levels)))
        row_bytes = band.codes.shape[1]
        starts.append([row_bytes, flat - first_row * row_bytes])
        flat, first_row = flat + band.num_rows * row_bytes, first_row + band.num_rows
    byte = torch.arange(256)
    parts = [(byte >> kind[1] & (2 ** kind[0] - 1)) * kind[2] if kind else 0 * byte for kind in kinds]
    ends = torch.tensor([band.num_rows for band in bands]).cumsum(0)
    tables = (torch.tensor(table, dtype=torch.int32) for table in (places, which, first_levels))
    places_table, which_table, level_table = tables
    return Layout(widths, ends, torch.tensor(starts), places_table, which_table, torch.cat(parts).int(), level_table)


class FewRows(NamedTuple):
    """The tables of a layout with the numbers of its bands."""

    layout: Layout
    flat: Tensor
    """The codes of all bands, one after another."""
    levels: Tensor
    scales: Tensor  # (bands, width)

    @classmethod
    def of(cls, bands: Sequence[Band], flat: Tensor, width: int, dtype: torch.dtype) -> FewRows:
        scales = [torch.nn.functional.pad(band.scales.to(dtype), (0, width - band.width)) for band in bands]
        levels = torch.cat([band.levels for band in bands]).to(dtype)
        return cls(layout_of(bands, width), flat, levels, torch.stack(scales))

    def decoded(self, place: Tensor) -> Tensor:
        """(T,) → (T, width)."""
        layout, width = self.layout, self.scales.shape[1]
        band = torch.bucketize(place, layout.ends, right=True)  # (T,)
        starts = layout.starts.index_select(0, band)
        begin = torch.addcmul(starts[:, 1], place, starts[:, 0]).int()  # (T,)
        where = layout.bytes.index_select(0, band).add_(begin.unsqueeze(1))  # (T, fields)
        held = self.flat.index_select(0, where.view(-1)).view(where.shape)
        kinds = layout.kinds.index_select(0, band).add_(held)
        parts = layout.parts.index_select(0, kinds.view(-1)).view(kinds.shape)
        codes, start = layout.first_levels.index_select(0, band).add_(parts[:, :width]), width  # (T, width)
        for more in layout.widths[1:]:
            codes[:, :more] += parts[:, start : start + more]
            start += more
        values = self.levels.index_select(0, codes.view(-1)).view(codes.shape)
        return values.mul_(self.scales.index_select(0, band))
