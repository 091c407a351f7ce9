"""Rows whose columns have bit widths of their own: many bits where the columns vary much, few where they do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchdefine.tables.rows import Rows, frozen, pack, packed_width, stored_as, unpack

LLOYD_ITERATIONS = 20
VALUES_LOOKED_AT = 200_000


class MixedBitRows(Rows):
    """Columns come in ``runs`` of [bits, columns]; a number is one of its run's 2^bits levels × its column's scale."""

    kind = "mixed bits"
    settings = ("num_rows", "runs")

    def __init__(self, num_rows: int, runs: Sequence[Sequence[int]]) -> None:
        super().__init__(num_rows, sum(columns for _, columns in runs))
        self.runs, self.own_codes = [list(run) for run in runs], num_rows * self.width
        packed = sum(packed_width(columns, bits) for bits, columns in self.runs)
        self.register_buffer("codes", torch.zeros(num_rows, packed, dtype=torch.uint8))
        self.codes: Tensor
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
