"""Whole numbers of 1 to 8 bits, packed into bytes, row by row.

A width that is not a power of two is split into fields that are (3 = 2 + 1, 6 = 4 + 2): the highest field of all
numbers of a row comes first, then the next. Within a byte the first number takes the lowest bits.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from torchdefine.ops import only_values


def packed_width(count: int, bits: int) -> int:
    """Bytes for one row of ``count`` numbers."""
    return sum(field_bytes(count, field) for field in fields_of(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """(…, count) whole numbers below 2^bits → (…, bytes) uint8."""
    count = codes.shape[-1]
    rest, parts = bits, []
    for field in fields_of(bits):
        rest -= field
        values = (codes >> rest) & (2**field - 1)  # (…, count)
        spare = field_bytes(count, field) * (8 // field) - count
        values = nn.functional.pad(values, (0, spare)).unflatten(-1, (-1, 8 // field))  # (…, bytes, per byte)
        parts.append((values << _shifts(field, codes)).sum(-1))
    return torch.cat(parts, dim=-1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """(…, bytes) uint8 → (…, count) int32; uint8 where bytes are looked up in a table of what they hold."""
    if packed.device.type == "cpu" and only_values(packed):
        return _unpacked_by_table(packed, bits, count)
    wide = packed.to(torch.int32)  # ONNX cannot shift bytes
    if bits == 8:
        return wide
    codes, start = wide, 0
    for field in fields_of(bits):
        stop = start + field_bytes(count, field)
        shifted = torch.bitwise_right_shift(wide[..., start:stop].unsqueeze(-1), _shifts(field, wide))
        values = (shifted & (2**field - 1)).flatten(-2)[..., :count]  # (…, bytes, per byte) → (…, count)
        codes = codes * 2**field + values if start else values
        start = stop
    return codes


def _unpacked_by_table(packed: Tensor, bits: int, count: int) -> Tensor:
    if bits == 8:
        return packed
    held, start, rest, codes = packed.reshape(-1, packed.shape[-1]).int(), 0, bits, None  # (T, bytes)
    for field in fields_of(bits):
        taken, rest = field_bytes(count, field), rest - field
        which = held if taken == held.shape[1] else held.narrow(1, start, taken)
        values = _spread(field, rest).index_select(0, which.reshape(-1)).view(torch.uint8)
        values = values.view(len(held), taken * (8 // field)).narrow(1, 0, count)
        codes, start = values if codes is None else codes.add_(values), start + taken
    assert codes is not None
    return codes.reshape(*packed.shape[:-1], count)


@cache
def _spread(field: int, rest: int) -> Tensor:
    """For every byte the fields that it holds times 2^rest, a byte for each, as one whole number."""
    with torch.inference_mode(False), torch.device("cpu"):
        fields = (torch.arange(256).unsqueeze(1) >> torch.arange(0, 8, field)) & (2**field - 1)
        spread = (fields << rest).to(torch.uint8)
        return spread.view({4: torch.int16, 2: torch.int32, 1: torch.int64}[field]).squeeze(1)


def _shifts(field: int, like: Tensor) -> Tensor:
    return torch.arange(0, 8, field, dtype=like.dtype, device=like.device)


def fields_of(bits: int) -> list[int]:
    return [field for field in (8, 4, 2, 1) if bits & field]


def field_bytes(count: int, field: int) -> int:
    return -(-count * field // 8)
