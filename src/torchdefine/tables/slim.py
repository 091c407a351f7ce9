"""Slim tables: rows made of shared sub-vectors, as in slim embeddings (Li et al., AAAI 2018), found by k-means.

All parts of all rows choose from one pool, whatever their place in the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.errors import UserError
from torchdefine.tables.budget import Budget
from torchdefine.tables.compact_table import CompactTable
from torchdefine.tables.fields import pack, packed_width, unpack
from torchdefine.tables.rows import FLOATS, Rows, frozen, stored_as
from torchdefine.tables.source import Candidate, Method, Source, TableLike, centred

POINTS_AT_ONCE = 1 << 16
MOST_LEARNED = 1 << 18
"""Sub-vectors that the pool is learned from; more of them change little."""
ROUNDS = 30
LEAST_GAIN = 1e-3
"""A round that lowers the error by a smaller fraction is the last."""


class SlimRows(Rows):
    """Each row is ``parts`` sub-vectors, one after another, of a pool of ``entries``; codes are packed."""

    kind = "slim"
    refuses = True

    def __init__(self, num_rows: int, width: int, parts: int, entries: int = 256, dtype: str = "float16") -> None:
        super().__init__(num_rows, width)
        self.parts, self.entries, self.dtype = parts, entries, dtype
        self.own_codes, self.bits = num_rows * parts, entries.bit_length() - 1
        self.codes: Tensor = nn.Buffer(torch.zeros(num_rows, packed_width(parts, self.bits), dtype=torch.uint8))
        self.pool = frozen(torch.zeros(entries, width // parts, dtype=FLOATS[dtype]))

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        codes = unpack(torch.embedding(self.codes, rows), self.bits, self.parts)  # (…, parts)
        return F.embedding(codes.int(), self.pool.to(dtype)).flatten(-2)  # (…, width)


@torch.no_grad()
def slim_table(
    table: TableLike | Source, parts: int, entries: int = 256, *, rounds: int = ROUNDS, seed: int = 0, **known: Any
) -> CompactTable:
    """Rows of ``parts`` sub-vectors, each the nearest of ``entries`` shared ones; frequent rows shape these more."""
    source = Source.of(table, **known)
    count, width = source.matrix.shape
    if parts < 1 or width % parts:
        raise UserError(f"Rows {width} wide cannot be cut into {parts} parts: use a divisor.")
    if not (2 <= entries <= 256 and entries & (entries - 1) == 0):
        raise UserError(f"A pool of {entries} sub-vectors cannot be packed: use a power of two from 2 to 256.")
    weights = source.weights()
    rows, mean = centred(source.matrix, weights)
    points, mass = rows.reshape(count * parts, -1), weights.repeat_interleave(parts)
    pool = shared_pool(points, mass, entries, rounds, seed)
    made = SlimRows(count, width, parts, entries).to(rows.device)
    made.pool = frozen(stored_as(pool, FLOATS[made.dtype]))
    made.codes = pack(nearest(points, made.pool.float()).view(count, parts), made.bits)
    return CompactTable(made, mean, source.padding_idx)


def shared_pool(points: Tensor, mass: Tensor, entries: int, rounds: int, seed: int) -> Tensor:
    """The k-means of weighted points, (N, d) → (entries, d); it starts at points drawn by weight."""
    generator = torch.Generator(device=points.device).manual_seed(seed)
    if len(points) > MOST_LEARNED:
        drawn = torch.randperm(len(points), device=points.device, generator=generator)[:MOST_LEARNED]
        points, mass = points[drawn], mass[drawn]
    start = torch.multinomial(mass, min(entries, len(points)), generator=generator)
    pool = F.pad(points[start], (0, 0, 0, entries - len(start)))
    before = torch.inf
    for _ in range(rounds):
        codes = nearest(points, pool)
        error = float(((points - pool[codes]).square().sum(-1) * mass).sum())
        if before - error < LEAST_GAIN * error:
            break
        before, pool = error, centres(points, mass, codes, pool)
    return pool


def nearest(points: Tensor, pool: Tensor) -> Tensor:
    """The nearest entry of each point, (N,), a part of the points at a time."""
    half = pool.square().sum(-1) / 2
    return torch.cat([(half - some @ pool.T).argmin(-1) for some in points.split(POINTS_AT_ONCE)])


def centres(points: Tensor, mass: Tensor, codes: Tensor, pool: Tensor) -> Tensor:
    """The weighted means of the points of each entry; one that has none stays."""
    sums = torch.zeros_like(pool).index_add_(0, codes, points * mass.unsqueeze(-1))
    total = mass.new_zeros(len(pool)).index_add_(0, codes, mass).unsqueeze(-1)
    return torch.where(total > 0, sums / total, pool)


@dataclass(frozen=True)
class Slim(Method):
    """As many parts as fit, of a pool of ``entries``."""

    entries: int = 256

    def within(self, rows: int, width: int, budget: Budget) -> Iterator[Candidate]:
        fitting = [
            parts
            for parts in range(1, width + 1)
            if width % parts == 0 and budget.fits(partial(SlimRows, rows, width, parts, self.entries))
        ]
        if fitting and not budget.floats_only:
            make = partial(slim_table, parts=fitting[-1], entries=self.entries)
            yield Candidate(f"{fitting[-1]} parts of {self.entries} sub-vectors", make)
