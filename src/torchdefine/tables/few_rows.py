"""A few trellis-coded rows out of many bands, decoded by as many operations as one band needs.

Where a number stands in its row follows from its band and its column. Here that is a table, so all bytes of all rows
are fetched at once, and then the levels that they select. Bands are ``TrellisRows``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchdefine.tables.fields import field_bytes, fields_of, packed_width


class Field(NamedTuple):
    """Some bits of a row: where they stand in it, and what one of them adds to the number of a level."""

    byte: int
    bits: int
    shift: int
    weight: int


def fields_by_column(band: Any, weight: int) -> Iterator[list[Field]]:
    """For each column the fields of its choice within a subset, the highest first."""
    start = packed_width(band.width, 1)
    for bits, columns in band.runs:
        parts, rest = [], bits - 1
        for field in fields_of(bits - 1):
            rest -= field
            parts.append((start, field, rest))
            start += field_bytes(columns, field)
        for column in range(columns):
            yield [
                Field(first + column * field // 8, field, column * field % 8, weight * 2**rest)
                for first, field, rest in parts
            ]


def slots_of(band: Any, columns: list[list[Field]], widths: Sequence[int]) -> list[Field | None]:
    """The bytes of coded bits, one more that is zero, and the fields of all columns, first ones first."""
    coded = packed_width(band.width, 1)
    slots: list[Field | None] = [Field(byte, 8, 0, 1) if byte < coded else None for byte in range(widths[0])]
    for index, width in enumerate(widths[1:]):
        held = [fields[index] if index < len(fields) else None for fields in columns[:width]]
        slots += held + [None] * (width - len(held))
    return slots


class FewRows(NamedTuple):
    """What bands and columns say, in tables. A column that a band does not have is a number of scale zero."""

    flat: Tensor
    """The codes of all bands, one after another."""
    ends: Tensor
    """The first row after each band, (bands,)."""
    starts: Tensor
    """The bytes of a row, and where row 0 of all bands would begin if they had so many, (bands, 2)."""
    widths: list[int]
    """How many slots hold coded bits, how many a column's first field, how many its second."""
    bytes: Tensor
    """Where the byte of a slot is in its row, (bands, slots)."""
    kinds: Tensor
    """Where in ``parts`` slots of this kind begin, (bands, slots)."""
    parts: Tensor
    """What a byte adds, for every kind of slot."""
    subsets: Tensor
    """The subsets of eight columns, for each two bytes of coded bits."""
    first_levels: Tensor  # (bands, width)
    levels: Tensor
    scales: Tensor  # (bands, width)

    @classmethod
    def of(cls, bands: Sequence[Any], flat: Tensor, subsets: Tensor, weight: int, dtype: torch.dtype) -> FewRows:
        width = max(band.width for band in bands)
        columns = [list(fields_by_column(band, weight)) for band in bands]
        depth = max(len(fields) for band in columns for fields in band)
        widths = [packed_width(width, 1) + 1]
        widths += [max(c + 1 for band in columns for c, f in enumerate(band) if len(f) > k) for k in range(depth)]
        kinds: dict[tuple[int, ...], int] = {}
        places, which, starts, first_levels = [], [], [], []
        first_byte = first_row = first_level = 0
        for band, of_columns in zip(bands, columns, strict=True):
            slots = slots_of(band, of_columns, widths)
            places.append([slot.byte if slot else 0 for slot in slots])
            which.append([256 * kinds.setdefault(slot[1:] if slot else (), len(kinds)) for slot in slots])
            row_bytes = band.codes.shape[1]
            starts.append([row_bytes, first_byte - first_row * row_bytes])
            first_levels.append(pad(band.first_levels() + first_level, (0, width - band.width)))
            first_byte, first_row = first_byte + band.codes.numel(), first_row + band.num_rows
            first_level += len(band.levels)
        byte = torch.arange(256)
        parts = [(byte >> kind[1] & (2 ** kind[0] - 1)) * kind[2] if kind else 0 * byte for kind in kinds]
        scales = [pad(band.scales.to(dtype), (0, width - band.width)) for band in bands]
        return cls(
            flat=flat,
            ends=torch.tensor([band.num_rows for band in bands]).cumsum(0),
            starts=torch.tensor(starts),
            widths=widths,
            bytes=torch.tensor(places, dtype=torch.int32),
            kinds=torch.tensor(which, dtype=torch.int32),
            parts=torch.cat(parts).int(),
            subsets=subsets,
            first_levels=torch.stack(first_levels),
            levels=torch.cat([band.levels for band in bands]).to(dtype),
            scales=torch.stack(scales),
        )

    def decoded(self, place: Tensor) -> Tensor:
        """(T,) → (T, width)."""
        band = torch.bucketize(place, self.ends, right=True)  # (T,)
        starts = self.starts.index_select(0, band)
        begin = torch.addcmul(starts[:, 1], place, starts[:, 0]).int()  # (T,)
        where = self.bytes.index_select(0, band).add_(begin.unsqueeze(1))  # (T, slots)
        held = self.flat.index_select(0, where.view(-1)).view(where.shape)
        kinds = self.kinds.index_select(0, band).add_(held)
        parts = self.parts.index_select(0, kinds.view(-1)).view(kinds.shape)
        coded, *fields = parts.split(self.widths, 1)
        words = torch.add(coded[:, :-1], coded[:, 1:], alpha=256)
        subsets = self.subsets.index_select(0, words.view(-1)).view(torch.uint8).view(len(words), 8 * words.shape[1])
        levels = self.first_levels.index_select(0, band)  # (T, width)
        levels += subsets[:, : levels.shape[1]]
        for field in fields:
            levels[:, : field.shape[1]] += field
        values = self.levels.index_select(0, levels.view(-1)).view(levels.shape)
        return values.mul_(self.scales.index_select(0, band))
