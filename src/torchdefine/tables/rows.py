"""Ways to hold the rows of a table in few bytes. Each decodes only the rows asked for; they nest in one another.

Whole numbers of 1 to 8 bits are packed into bytes, row by row. A width that is not a power of two is split into fields
that are (3 = 2 + 1, 6 = 4 + 2): the highest field of all numbers of a row comes first, then the next. Within a byte the
first number takes the lowest bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from torchdefine.errors import UserError

FLOATS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

_KINDS: dict[str, type[Rows]] = {}


class Rows(nn.Module, ABC):
    """``num_rows`` vectors of ``width`` numbers, packed; row numbers (…) → (…, width) of the dtype asked for.

    Float parts are parameters that do not learn until asked to (``requires_grad_``); codes are buffers. Both live in
    memory as they are stored. A subclass names its ``kind``, for files, and in ``settings`` the arguments of its
    constructor, which it keeps as attributes: plain values, or other rows.
    """

    kind: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]
    own_codes: int = 0
    """How many packed whole numbers there are; a code is a parameter as much as a float is."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        _KINDS[cls.kind] = cls

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.num_rows, self.width = num_rows, width

    @abstractmethod
    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """(…) row numbers → (…, width)."""

    def matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All rows, (num_rows, width)."""
        device = next(self.parameters()).device
        return self(torch.arange(self.num_rows, device=device), dtype)

    def described(self) -> dict[str, Any]:
        """Kind and settings as plain values, for a file."""
        return {"kind": self.kind, **{name: _described(getattr(self, name)) for name in self.settings}}

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        return cls(**{name: _revived(value) for name, value in settings.items()})

    def extra_repr(self) -> str:
        return f"{self.num_rows:,} × {self.width}"


def _described(value: Any) -> Any:
    if isinstance(value, nn.ModuleList):
        return [rows.described() for rows in value]  # type: ignore[operator]
    return value.described() if isinstance(value, Rows) else value


def _revived(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [rows_from_config(one) for one in value]
    return rows_from_config(value) if isinstance(value, dict) else value


def rows_from_config(described: dict[str, Any]) -> Rows:
    """An empty module from what ``described()`` gave."""
    settings = dict(described)
    kind = settings.pop("kind", None)
    if kind not in _KINDS:
        raise UserError(f"The row encoding {kind!r} is unknown: this torchdefine knows {', '.join(sorted(_KINDS))}.")
    return _KINDS[kind].from_settings(settings)


def frozen(values: Tensor) -> nn.Parameter:
    """A parameter that does not learn until asked to."""
    return nn.Parameter(values, requires_grad=False)


def stored_as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in the number type that a table holds them in; those too large or too small for it are refused."""
    stored = values.detach().to(dtype)
    if dtype != torch.float16 or stored.is_meta:
        return stored
    too_small = _magnitude(stored) < _magnitude(values) / 2
    if too_small or not bool(torch.isfinite(stored).all()):
        size, way = ("small", "multiply") if too_small else ("large", "divide")
        raise UserError(
            f"The table needs numbers as {size} as {float(values.abs().max()):.1e}, which float16 cannot hold: {way} "
            "it by a number and undo that in its vectors, or store it as float32."
        )
    return stored


def _magnitude(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values.detach(), dtype=torch.float64))


def float_type(name: str) -> torch.dtype:
    if name not in FLOATS:
        raise UserError(f"The number type {name!r} is unknown: use one of {', '.join(FLOATS)}.")
    return FLOATS[name]


class DenseRows(Rows):
    """Rows as they are, in float32, float16 or bfloat16."""

    kind = "dense"
    settings = ("num_rows", "width", "dtype")

    def __init__(self, num_rows: int, width: int, dtype: str = "float32") -> None:
        super().__init__(num_rows, width)
        self.dtype = dtype
        self.weight = frozen(torch.zeros(num_rows, width, dtype=float_type(dtype)))

    @classmethod
    def of(cls, matrix: Tensor, dtype: str = "float32") -> DenseRows:
        made = cls(len(matrix), matrix.shape[1], dtype)
        made.weight = frozen(stored_as(matrix, float_type(dtype)).clone())
        return made

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return nn.functional.embedding(rows, self.weight).to(dtype)

    def matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weight.to(dtype)


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
        values = nn.functional.pad(values, (0, spare)).unflatten(-1, (-1, 8 // field))  # (…, bytes, per byte)
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
        shifted = torch.bitwise_right_shift(wide[..., start:stop].unsqueeze(-1), _shifts(field, wide))
        values = (shifted & (2**field - 1)).flatten(-2)[..., :count]  # (…, bytes, per byte) → (…, count)
        codes = values if codes is None else codes * 2**field + values
        start = stop
    assert codes is not None
    return codes


def _shifts(field: int, like: Tensor) -> Tensor:
    return torch.arange(0, 8, field, dtype=like.dtype, device=like.device)


def _fields(bits: int) -> list[int]:
    return [field for field in (8, 4, 2, 1) if bits & field]


def _field_bytes(count: int, field: int) -> int:
    return -(-count * field // 8)
