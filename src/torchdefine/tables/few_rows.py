"""A few trellis-coded rows out of many bands, decoded by as many operations as one band needs.

Where a number stands in its row follows from its band and its column. Here that is a table, so all bytes of all rows
are fetched at once. Eight columns next to each other have as many bits each, so whole bytes hold them, and what a byte
adds to the eight is one whole number of eight bytes. Bands are ``TrellisRows``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchdefine.tables.fields import field_bytes, fields_of, packed_width

MOST_BITS = 7
"""Numbers of more bits have more levels than a byte can tell apart."""


class Slot(NamedTuple):
    """A byte of a row."""

    byte: int
    field: int = 0
    """How many bits of it belong to a column; 0 is a byte of coded bits."""
    part: int = 0
    """Which of the bytes it is that hold this field of eight columns; of coded bits, which one of a pair is meant."""
    rest: int = 0
    """How many bits of a number come after this field."""

    def adds(self, weight: int) -> Tensor:
        """What it adds to eight columns, for each value that it may have: (256,)."""
        byte = torch.arange(256)
        if not self.field:
            return byte + 256 * self.part
        columns, each = torch.zeros(256, 8, dtype=torch.uint8), 8 // self.field
        for index in range(each):
            number = (byte >> index * self.field & (2**self.field - 1)) << self.rest
            columns[:, self.part * each + index] = number * weight
        return columns.view(torch.int64).squeeze(1)


def slots_of(band: Any) -> list[tuple[Slot, list[Slot]]]:
    """For every eight columns the byte of their coded bits, and those that hold their choices within a subset."""
    start, coded, eights = packed_width(band.coded, 1), 0, []
    for bits, columns in band.runs:
        each = 1 if bits == int(bits) else 2
        own = [(Slot(coded + index // each, 0, index % each), list[Slot]()) for index in range(columns // 8)]
        coded += columns // 8 // each
        rest = math.ceil(bits) - 1
        for field in fields_of(rest):
            rest -= field
            for index, (_, slots) in enumerate(own):
                slots += [Slot(start + index * field + part, field, part, rest) for part in range(field)]
            start += field_bytes(columns, field)
        eights += own
    return eights


class FewRows(NamedTuple):
    """What bands and columns say, in tables. A column that a band does not have is a number of scale zero."""

    flat: Tensor
    """The codes of all bands, one after another."""
    ends: Tensor
    """The first row after each band, (bands,)."""
    starts: Tensor
    """The bytes of a row, and where row 0 of all bands would begin if they had so many, (bands, 2)."""
    bytes: Tensor
    """Where the byte of a slot is in its row, (bands, slots): of every eight columns the coded bits, the next ones,
    and bytes of choices."""
    kinds: Tensor
    """Where in ``parts`` slots of this kind begin, (bands, slots)."""
    parts: Tensor
    """What a byte adds to eight columns, for every kind of slot."""
    subsets: tuple[Tensor, Tensor]
    """What a byte of coded bits and the next one say of the subsets of the first one's columns, and of the second ones
    of pairs, (512,) each."""
    first_levels: Tensor  # (bands, width)
    levels: Tensor
    scales: Tensor  # (bands, width)

    @classmethod
    def of(
        cls, bands: Sequence[Any], flat: Tensor, subsets: tuple[Tensor, Tensor], weight: int, dtype: torch.dtype
    ) -> FewRows:
        width = max(band.width for band in bands)
        eights = [slots_of(band) for band in bands]
        depth = max(len(slots) for band in eights for _, slots in band)
        count = width // 8
        nothing, kinds, parts = Slot(0, -1), dict[tuple[int, ...], int](), list[Tensor]()
        places, which, starts, first_levels = [], [], [], []
        first_byte = first_row = first_level = 0
        for band, own in zip(bands, eights, strict=True):
            last = packed_width(band.coded, 1) - 1
            columns = [[coded for coded, _ in own]]
            columns.append([one._replace(byte=one.byte + 1) if one.byte < last else nothing for one in columns[0]])
            columns += [[some[index] if index < len(some) else nothing for _, some in own] for index in range(depth)]
            slots = [slot for held in columns for slot in held + [nothing] * (count - len(held))]
            for slot in slots:
                if slot[1:] not in kinds:
                    kinds[slot[1:]] = 256 * len(kinds)
                    parts.append(torch.zeros(256, dtype=torch.int64) if slot is nothing else slot.adds(weight))
            places.append([slot.byte for slot in slots])
            which.append([kinds[slot[1:]] for slot in slots])
            row_bytes = band.codes.shape[1]
            starts.append([row_bytes, first_byte - first_row * row_bytes])
            first_levels.append(pad(band.first_levels() + first_level, (0, width - band.width)))
            first_byte, first_row = first_byte + band.codes.numel(), first_row + band.num_rows
            first_level += len(band.levels)
        scales = [pad(band.scales.to(dtype), (0, width - band.width)) for band in bands]
        return cls(
            flat=flat,
            ends=torch.tensor([band.num_rows for band in bands]).cumsum(0),
            starts=torch.tensor(starts),
            bytes=torch.tensor(places, dtype=torch.int32 if len(flat) < 2**31 else torch.int64),
            kinds=torch.tensor(which, dtype=torch.int32),
            parts=torch.cat(parts),
            subsets=subsets,
            first_levels=torch.stack(first_levels),
            levels=torch.cat([band.levels for band in bands]).to(dtype),
            scales=torch.stack(scales),
        )

    def decoded(self, place: Tensor) -> Tensor:
        """(T,) → (T, width)."""
        width = self.scales.shape[1]
        band = torch.bucketize(place, self.ends, right=True)  # (T,)
        starts = self.starts.index_select(0, band)
        begin = torch.addcmul(starts[:, 1], place, starts[:, 0]).to(self.bytes.dtype)  # (T,)
        where = self.bytes.index_select(0, band).add_(begin.unsqueeze(1))  # (T, slots)
        held = self.flat.index_select(0, where.view(-1)).view(where.shape)
        kinds = self.kinds.index_select(0, band).add_(held)
        parts = self.parts.index_select(0, kinds.view(-1)).view(kinds.shape)
        count = width // 8
        own, following = parts[:, :count].reshape(-1), parts[:, count : 2 * count].reshape(-1)
        of_own, of_following = self.subsets
        eights = of_own.index_select(0, own).bitwise_xor_(of_following.index_select(0, following)).view(-1, count)
        eights += parts[:, 2 * count :].unflatten(1, (-1, count)).sum(1)
        levels = self.first_levels.index_select(0, band)  # (T, width)
        levels += eights.view(torch.uint8)
        values = self.levels.index_select(0, levels.view(-1)).view(levels.shape)
        return values.mul_(self.scales.index_select(0, band))
