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
from torchdefine.ops import only_values
from torchdefine.tables.compact_table import CompactTable, table_bytes
from torchdefine.tables.fields import pack, packed_width, unpack
from torchdefine.tables.rows import FLOATS, BandedRows, DenseRows, Rows, frozen, stored_as
from torchdefine.tables.source import Budget, Candidate, Method, Source, TableLike, centred

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

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        kept: dict[str, Any] = {**self._buffers, **self._parameters}  # nn.Module takes half a microsecond for each
        levels = self._levels(torch.embedding(kept["codes"], rows), dtype)  # (…, width)
        steps = torch.embedding(kept["steps"], rows)  # (…, groups)
        if dtype is not torch.float32:
            steps = steps.to(dtype)
        if self.width % self.group_size:
            return levels * steps.repeat_interleave(self.group_size, dim=-1)[..., : self.width]
        if steps.requires_grad:
            return (levels.unflatten(-1, (self.num_groups, -1)) * steps.unsqueeze(-1)).flatten(-2)
        levels.view(-1, self.num_groups, self.group_size).mul_(steps.view(-1, self.num_groups, 1))
        return levels

    def _levels(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Codes as numbers around zero, in new memory: (…, bytes) → (…, width)."""
        if self.bits == 8:
            return packed.to(dtype).sub_(127.5)
        if self.bits == 4 and dtype in _PAIRS and self.width % 2 == 0 and packed.is_cpu and only_values(packed):
            pairs = _pairs(dtype).index_select(0, packed.view(-1).int()).view(dtype)
            return pairs.view(*packed.shape[:-1], self.width)
        return unpack(packed, self.bits, self.width).to(dtype) - (2**self.bits - 1) / 2


_PAIRS = {torch.float32: torch.int64, torch.float16: torch.int32, torch.bfloat16: torch.int32}


@lru_cache(maxsize=len(_PAIRS))
def _pairs(dtype: torch.dtype) -> Tensor:
    """For every byte its two codes of four bits as numbers around zero, as one whole number."""
    with torch.inference_mode(False), torch.device("cpu"):
        codes = torch.arange(256).unsqueeze(1) >> torch.tensor([0, 4]) & 15
        return (codes - 7.5).to(dtype).view(_PAIRS[dtype]).squeeze(1)


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
    """Every number in ``bits`` bits, with a float16 step for each ``group_size`` of them."""
    if not 1 <= bits <= 8 or group_size < 1:
        raise UserError(f"A table cannot have {bits} bits in groups of {group_size}: try 1 to 8 bits in groups of 32.")
    source = Source.of(table, **known)
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
                label = f"int{fitting[-1]}, a step a {'row' if group == width else f'{group} numbers'}"
                yield Candidate(label, partial(quantised_table, bits=fitting[-1], group_size=group))

    def usual_bytes(self, rows: int, width: int) -> int | None:
        return None if self.bits is None else table_bytes(partial(QuantisedRows, rows, width, self.bits, GROUP))
