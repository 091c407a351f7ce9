"""Rows rounded to a few bits, in groups that share a float16 step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.tables.budget import Budget
from torchdefine.tables.compact_table import CompactTable, table_bytes
from torchdefine.tables.fields import pack, packed_width, unpack
from torchdefine.tables.rows import FLOATS, BandedRows, DenseRows, Rows, frozen, stored_as
from torchdefine.tables.source import Candidate, Method, Source, TableLike, centred

GROUP = 32
_BITS = {f"int{bits}": bits for bits in range(8, 0, -1)}
ROWS_AT_ONCE = 8_192
_CLIPS = {1: (0.6, 1.1), 2: (0.5, 1.0), 3: (0.6, 1.0), 4: (0.7, 1.0)}  # where the best step lies, by bits
_STEPS_TRIED = 12


class QuantisedRows(Rows):
    """Each number is one of 2^bits levels, evenly spaced around zero: (code - (2^bits - 1) / 2) × the group's step."""

    kind = "quantised"
    refuses = True

    def __init__(self, num_rows: int, width: int, bits: int = 4, group_size: int = 32) -> None:
        super().__init__(num_rows, width)
        self.bits, self.group_size = bits, min(group_size, width)
        self.own_codes, self.num_groups = num_rows * width, -(-width // self.group_size)
        self.codes: Tensor = nn.Buffer(torch.zeros(num_rows, packed_width(width, bits), dtype=torch.uint8))
        self.steps = frozen(torch.zeros(num_rows, self.num_groups, dtype=torch.float16))
        self._fits_fbgemm = self._has_room_for_a_range()
        self._ranged: tuple[Tensor, Tensor] | None = None

    def _has_room_for_a_range(self) -> bool:
        whole = self.width % self.group_size == 0 and self.width * self.bits % 8 == 0
        if not whole or self.bits not in _RANGES:
            return False
        return _RANGES[self.bits].nbytes <= MOST_MORE * (self.codes.shape[1] + 2 * self.num_groups)

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        codes = unpack(torch.embedding(self.codes, rows), self.bits, self.width)  # (…, width)
        levels = codes.to(dtype).sub_((2**self.bits - 1) / 2)
        steps = torch.embedding(self.steps, rows).to(dtype)  # (…, groups)
        if self.width % self.group_size:
            return levels * steps.repeat_interleave(self.group_size, dim=-1)[..., : self.width]
        return (levels.unflatten(-1, (self.num_groups, -1)) * steps.unsqueeze(-1)).flatten(-2)

    def added_to(self, base: Tensor, rows: Tensor) -> Tensor:
        codes: Any = self._buffers["codes"]  # nn.Module takes half a microsecond to find a tensor
        steps: Any = self._parameters["steps"]
        if not (self._fits_fbgemm and base.dtype is torch.float32 and codes.is_cpu) or steps.requires_grad:
            return super().added_to(base, rows)
        ids = rows if rows.ndim == 1 else rows.reshape(-1)
        levels: Tensor = _FBGEMM[self.bits](self._with_range(codes), ids, _places(len(ids)))  # (T, width)
        grouped = levels.view(-1, self.num_groups, self.group_size)
        own = torch.embedding(steps, ids).view(-1, self.num_groups, 1)
        torch.addcmul(base.view(self.num_groups, self.group_size), grouped, own, out=grouped)
        return levels if ids is rows else levels.view(*rows.shape, self.width)

    def _with_range(self, codes: Tensor) -> Tensor:
        """Codes with what fbgemm wants behind each row: a scale, which is one here, and the first level.

        ``codes`` is a part of it from then on, so that there are not two of them in memory.
        """
        if self._ranged is None or self._ranged[1] is not codes:
            with torch.inference_mode(False):
                ranged = torch.cat([codes, _RANGES[self.bits].view(torch.uint8).expand(self.num_rows, -1)], 1)
                self.codes = ranged[:, : codes.shape[1]]
            self._ranged = ranged, self.codes
        return self._ranged[0]


_FBGEMM = {
    8: torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
    4: torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
}
"""torch's operations that look bytes and halves of bytes up and convert them."""
_RANGES = {
    8: torch.tensor([1, -127.5], dtype=torch.float32, device="cpu"),
    4: torch.tensor([1, -7.5], dtype=torch.float16, device="cpu"),
}
MOST_MORE = 0.125
"""Rows are not made larger than this for it."""


@lru_cache(maxsize=16)
def _places(count: int) -> Tensor:
    """Where the bags of a row each begin; fbgemm would make them in every call."""
    with torch.inference_mode(False):
        return torch.arange(count, device="cpu")


@torch.no_grad()
def quantise_rows(
    matrix: Tensor, bits: int = 4, group_size: int = 32, progress: Progress | None = None
) -> QuantisedRows:
    """Round a matrix, each group with the step that loses least: (V, m) → QuantisedRows."""
    made = QuantisedRows(len(matrix), matrix.shape[1], bits, group_size).to(matrix.device)
    for start in range(0, 0 if matrix.is_meta else len(matrix), ROWS_AT_ONCE):
        chunk = matrix[start : start + ROWS_AT_ONCE].float()
        spare = made.num_groups * made.group_size - made.width
        grouped = nn.functional.pad(chunk, (0, spare)).unflatten(-1, (made.num_groups, made.group_size))
        steps = stored_as(best_steps(grouped, bits), torch.float16)  # (rows, groups)
        codes = nearest_codes(grouped, steps.float().unsqueeze(-1), bits).flatten(-2)[:, : made.width]
        made.codes[start : start + len(chunk)] = pack(codes, bits)
        made.steps[start : start + len(chunk)] = steps
        if progress:
            progress(start + len(chunk), len(matrix))
    return made


def nearest_codes(values: Tensor, steps: Tensor, bits: int) -> Tensor:
    """The whole numbers whose levels are nearest; any if the step is zero."""
    half = (2**bits - 1) / 2
    return (values / steps.clamp(min=1e-12) + half).round().clamp(0, 2**bits - 1).to(torch.int32)


def best_steps(grouped: Tensor, bits: int) -> Tensor:
    """The step of each group, (…, group) → (…), by trying some and fitting the best by least squares."""
    half = (2**bits - 1) / 2
    largest = grouped.abs().amax(-1)
    low, high = _CLIPS.get(bits, (0.85, 1.0))
    best, least = largest / half, torch.full_like(largest, torch.inf)
    for clip in torch.linspace(low, high, _STEPS_TRIED).tolist():
        step = largest * clip / half
        for _ in range(2):  # a second time with the step that fits the codes of the first
            levels = nearest_codes(grouped, step.unsqueeze(-1), bits) - half
            step = (levels * grouped).sum(-1) / levels.square().sum(-1).clamp(min=1e-12)
        error = (grouped - levels * step.unsqueeze(-1)).square().sum(-1)
        best, least = torch.where(error < least, step, best), torch.minimum(error, least)
    return best


@torch.no_grad()
def exact_rows(matrix: Tensor, most_bits: int) -> QuantisedRows | None:
    """The rows of a matrix if every number is a level already, as after training with ``embedding.bits``."""
    for bits in range(1, most_bits + 1):
        steps = matrix.new_full((len(matrix),), torch.nan)
        half = (2**bits - 1) / 2
        for odd in range(2**bits - 1, 0, -2):  # the least number of a row may be any of the levels
            tried = 2 * matrix.abs().amin(-1) / odd
            codes = nearest_codes(matrix, tried.unsqueeze(-1), bits)
            levels = ((codes - half) * tried.unsqueeze(-1) == matrix).all(-1) & (tried.half() == tried)
            steps = torch.where(levels, tried, steps)
        if bool(steps.isfinite().all()):
            made = QuantisedRows(len(matrix), matrix.shape[1], bits, matrix.shape[1]).to(matrix.device)
            made.codes = pack(nearest_codes(matrix, steps.unsqueeze(-1), bits), bits)
            made.steps = frozen(steps.half().unsqueeze(-1))
            return made
    return None


def stored_rows(matrix: Tensor, how: str, group_size: int = GROUP) -> Rows:
    """Rows as ``float32``, ``float16``, ``bfloat16``, or ``int8`` … ``int1`` in groups.

    A matrix on the meta device gives rows there, which show what such rows would take.
    """
    if how in FLOATS:
        return DenseRows.of(matrix, how)
    if how not in _BITS:
        raise UserError(f"Rows cannot be stored as {how!r}: use one of {', '.join((*FLOATS, *_BITS))}.")
    return quantise_rows(matrix, _BITS[how], group_size)


def rounded_like(rows: Rows, matrix: Tensor) -> Rows:
    """A matrix rounded as these rows are: quantised ones, or bands of such."""
    if isinstance(rows, BandedRows):
        parts = matrix.split([band.num_rows for band in rows.bands])
        bands = [rounded_like(band, part) for band, part in zip(rows.bands, parts, strict=True)]
        return BandedRows(bands, ranked=False)
    assert isinstance(rows, QuantisedRows)
    return quantise_rows(matrix, rows.bits, rows.group_size)


def dense_table(table: TableLike | Source, dtype: str = "float16", **known: Any) -> CompactTable:
    """The table as it is, in another number type."""
    source = Source.of(table, **known)
    return CompactTable(DenseRows.of(source.matrix, dtype), padding_idx=source.padding_idx)


def quantised_table(table: TableLike | Source, bits: int = 4, group_size: int = GROUP, **known: Any) -> CompactTable:
    """Every number in ``bits`` bits, with a float16 step for each ``group_size`` of them.

    A table that was trained in so few bits (``embedding.bits``), or fewer, is stored as it is, without any loss.
    """
    if not 1 <= bits <= 8 or group_size < 1:
        raise UserError(f"A table cannot have {bits} bits in groups of {group_size}: try 1 to 8 bits in groups of 32.")
    source = Source.of(table, **known)
    if exact_rows(source.matrix[:1], bits) and (exact := exact_rows(source.matrix, bits)):
        return CompactTable(exact, padding_idx=source.padding_idx)
    rows, mean = centred(source.matrix)
    return CompactTable(quantise_rows(rows, bits, group_size, source.progress), mean, source.padding_idx)


@dataclass(frozen=True)
class Quantised(Method):
    """``bits`` for every number, or as many as fit: with a step for each row, and for each 32 numbers."""

    bits: int | None = None

    def within(self, rows: int, width: int, budget: Budget) -> Iterator[Candidate]:
        if budget.floats_only:
            return
        groups, choices = ((width, GROUP) if width > GROUP else (width,)), range(1, 9)
        if self.bits is not None:
            groups, choices = (GROUP,), range(self.bits, self.bits + 1)
        for group in groups:
            fitting = [bits for bits in choices if budget.fits(partial(QuantisedRows, rows, width, bits, group))]
            if fitting:
                label = f"int{fitting[-1]}, one scale per {'row' if group == width else f'{group} numbers'}"
                yield Candidate(label, partial(quantised_table, bits=fitting[-1], group_size=group))

    def usual_bytes(self, rows: int, width: int) -> int | None:
        return None if self.bits is None else table_bytes(partial(QuantisedRows, rows, width, self.bits, GROUP))
