"""Whole numbers of 1 to 8 bits packed into bytes, row by row.

A width that is not a power of two is split into fields that are (3 = 2 + 1, 6 = 4 + 2): the highest field of all
numbers of a row comes first, then the next. Within a byte the first number takes the lowest bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchdefine.errors import UserError


def packed_width(count: int, bits: int) -> int:
    """Bytes for one row of ``count`` numbers."""
    return sum(_field_bytes(count, field) for field in _fields(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """(…, count) whole numbers below 2^bits → (…, bytes) uint8."""
    count = codes.shape[-1]
    rest, parts = bits, []
    for field in _fields(bits):
        rest -= field
        values = (codes >> rest) & (2**field - 1)  # (…, count)
        spare = _field_bytes(count, field) * (8 // field) - count
        values = torch.nn.functional.pad(values, (0, spare)).unflatten(-1, (-1, 8 // field))  # (…, bytes, per byte)
        parts.append((values << _shifts(field, codes)).sum(-1))
    return torch.cat(parts, dim=-1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """(…, bytes) uint8 → (…, count) int32."""
    wide = packed.to(torch.int32)  # ONNX cannot shift bytes
    if bits == 8:
        return wide
    codes: Tensor | None = None
    start = 0
    for field in _fields(bits):
        stop = start + _field_bytes(count, field)
        spread = torch.bitwise_right_shift(wide[..., start:stop].unsqueeze(-1), _shifts(field, wide))
        values = (spread & (2**field - 1)).flatten(-2)[..., :count]  # (…, bytes, per byte) → (…, count)
        codes = values if codes is None else codes * 2**field + values
        start = stop
    assert codes is not None
    return codes


def _shifts(field: int, like: Tensor) -> Tensor:
    return torch.arange(0, 8, field, dtype=like.dtype, device=like.device)


def _fields(bits: int) -> list[int]:
    if not 1 <= bits <= 8:
        raise UserError(f"Numbers of {bits} bits cannot be packed: use 1 to 8.")
    return [field for field in (8, 4, 2, 1) if bits & field]


def _field_bytes(count: int, field: int) -> int:
    return -(-count * field // 8)
