"""Rows rounded to a few bits: in groups that share a float16 step, or in columns of many levels and of few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.ops import only_values
from torchdefine.tables.compact_table import CompactTable, table_bytes
from torchdefine.tables.rows import FLOATS, DenseRows, Rows, frozen, pack, packed_width, stored_as, unpack
from torchdefine.tables.source import Budget, Candidate, Method, Source, TableLike, centred

GROUP = 32
_BITS = {f"int{bits}": bits for bits in range(8, 0, -1)}
ROWS_AT_ONCE = 8_192
_CLIPS = {1: (0.6, 1.1), 2: (0.5, 1.0), 3: (0.6, 1.0), 4: (0.7, 1.0)}  # where the best step lies, by bits
_STEPS_TRIED = 12
LLOYD_ITERATIONS = 20
VALUES_LOOKED_AT = 200_000


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


class MixedBitRows(Rows):
    """Columns come in ``runs`` of [bits, columns]; a number is one of its run's 2^bits levels × its column's scale."""

    kind = "mixed bits"

    def __init__(self, num_rows: int, runs: Sequence[Sequence[int]]) -> None:
        super().__init__(num_rows, sum(columns for _, columns in runs))
        self.runs, self.own_codes = [list(run) for run in runs], num_rows * self.width
        packed = sum(packed_width(columns, bits) for bits, columns in self.runs)
        self.codes: Tensor = nn.Buffer(torch.zeros(num_rows, packed, dtype=torch.uint8))
        self.levels = frozen(torch.zeros(sum(2**bits for bits, _ in self.runs), dtype=torch.float16))
        self.scales = frozen(torch.zeros(self.width, dtype=torch.float16))

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        packed, levels = self.codes[rows], self.levels.to(dtype)
        first_byte = first_level = 0
        parts = []
        for bits, columns in self.runs:
            here = packed[..., first_byte : first_byte + packed_width(columns, bits)]
            parts.append(levels[unpack(here, bits, columns).long() + first_level])  # (…, columns)
            first_byte += packed_width(columns, bits)
            first_level += 2**bits
        return torch.cat(parts, dim=-1) * self.scales.to(dtype)


@torch.no_grad()
def mixed_bit_rows(matrix: Tensor, runs: Sequence[Sequence[int]]) -> MixedBitRows:
    """Round a matrix; each run's levels are fitted to its numbers (Lloyd's algorithm), each column is scaled to one."""
    made = MixedBitRows(len(matrix), runs)
    if matrix.is_meta:  # only to see what they would take
        return made
    scales = stored_as(matrix.float().square().mean(0).sqrt().clamp(min=1e-7), torch.float16)
    levels, codes, start = [], [], 0
    for bits, columns in runs:
        part = matrix[:, start : start + columns].float() / scales[start : start + columns].float()
        fitted = stored_as(fitted_levels(part, bits), torch.float16)
        levels.append(fitted)
        codes.append(pack(nearest_levels(part, fitted.float()), bits))
        start += columns
    made.codes, made.levels, made.scales = torch.cat(codes, -1), frozen(torch.cat(levels)), frozen(scales)
    return made


def nearest_levels(values: Tensor, levels: Tensor) -> Tensor:
    """The number of the nearest of some ascending levels, for each value."""
    return torch.bucketize(values.contiguous(), (levels[1:] + levels[:-1]) / 2)


def fitted_levels(values: Tensor, bits: int) -> Tensor:
    """2^bits ascending levels with little squared error for values of unit variance, (V,) or (V, columns)."""
    values = values[:: -(-values.numel() // VALUES_LOOKED_AT)].flatten()  # whole rows, so that no column is left out
    count = 2**bits
    quantiles = (torch.arange(count, device=values.device) + 0.5) / count
    levels = torch.erfinv(2 * quantiles - 1) * 6**0.5  # of a normal with variance 3: about as dense as the best levels
    for _ in range(LLOYD_ITERATIONS):
        codes = nearest_levels(values, levels)
        sums = torch.zeros_like(levels).index_add_(0, codes, values)
        masses = torch.zeros_like(levels).index_add_(0, codes, torch.ones_like(values))
        levels = torch.where(masses > 0, sums / masses.clamp(min=1), levels).sort().values
    return levels


def stored_rows(matrix: Tensor, how: str, group_size: int = GROUP) -> Rows:
    """Rows as ``float32``, ``float16``, ``bfloat16``, or ``int8`` … ``int1`` in groups.

    A matrix on the meta device gives rows there, which show what such rows would take.
    """
    if how in FLOATS:
        return DenseRows.of(matrix, how)
    if how not in _BITS:
        raise UserError(f"Rows cannot be stored as {how!r}: use one of {', '.join((*FLOATS, *_BITS))}.")
    return quantise_rows(matrix, _BITS[how], group_size)


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
