"""The table that spends a given number of bytes best: rotated, cut into bands by frequency, with bits by importance.

A rotation makes a few columns carry most of the variance; frequent rows weigh more than rare ones. Rate-distortion
theory then gives the bits for each number: half the logarithm of weight × variance, less a constant. With floats
instead of bits the same rule gives the number of columns each band keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from torchdefine.errors import UserError
from torchdefine.tables.banded import already_in, in_bands, place_bytes
from torchdefine.tables.budget import Budget
from torchdefine.tables.compact_table import CompactTable
from torchdefine.tables.low_rank import FactorisedRows, principal_directions
from torchdefine.tables.mixed_bits import mixed_bit_rows
from torchdefine.tables.quantised import quantise_rows, stored_rows
from torchdefine.tables.rows import FLOATS, DenseRows, Rows, packed_width
from torchdefine.tables.source import (
    ROWS_AT_ONCE,
    Candidate,
    Counts,
    Method,
    Source,
    TableLike,
    as_matrix,
    as_weights,
    by_frequency,
    candidate,
    centred,
)

BLOCK = 8
"""Columns that share a bit width: eight numbers of any width fill whole bytes. Floats need no blocks."""
PROJECTION_BITS = 6
HALVINGS = 16
TRANSFORM_POWER = 0.5
"""The power of counts. Bits by weight favour frequent rows so much already that a milder power measured best."""
STEADINESS = 0.05
"""The even sensitivity added to a measured one, relative to its mean, so that no direction is forgotten."""


LOSSES = (1.0, 0.3634, 0.1175, 0.03454, 0.009497, 0.002499, 0.000642, 0.000163, 0.0000412)
"""What is left of a normal variable's variance after rounding to the best 2^bits levels, for 0 to 8 bits."""


@dataclass(frozen=True)
class Ladder:
    """Steps of increasing bits for a number, and the fraction of its variance that each still loses: a convex curve."""

    bits: tuple[float, ...]
    losses: tuple[float, ...]


LADDERS = {
    "mixed": Ladder(tuple(range(9)), LOSSES),
    "int4": Ladder((0, 4.5), (1.0, 0.012)),  # with a float16 step for 32 numbers
    "int8": Ladder((0, 8.5), (1.0, 0.0001)),
    "float16": Ladder((0, 16), (1.0, 0.0)),
    "float32": Ladder((0, 32), (1.0, 0.0)),
}


@dataclass(frozen=True)
class _Plan:
    """The ladder's step of every band and block of columns, and the first row of every band."""

    edges: list[int]
    steps: Tensor  # (bands, blocks)
    storage: str

    @property
    def columns(self) -> list[int]:
        return [int((row > 0).sum()) * block_of(self.storage) for row in self.steps]

    def runs(self, band: int) -> list[list[int]]:
        widths = self.steps[band][self.steps[band] > 0]
        return [[int(bits), int((widths == bits).sum()) * BLOCK] for bits in widths.unique().flip(0)]


@torch.no_grad()
def transform_table(
    table: TableLike,
    budget: int,
    *,
    counts: Counts | None = None,
    storage: str = "mixed",
    sensitivity: Tensor | None = None,
    padding_idx: int | None = None,
) -> CompactTable:
    """The table of at most ``budget`` bytes that loses least, weighted by frequency if counts are given.

    ``storage`` is mixed (1 to 8 bits by importance), float32, float16, int8 or int4. ``sensitivity``, (m, m), says how
    sensitive the model is to an error in each direction (``adapt.Behaviour.sensitivity``).
    """
    if storage not in LADDERS:
        raise UserError(f"Numbers cannot be stored as {storage!r}: use one of {', '.join(LADDERS)}.")
    matrix = as_matrix(table)
    weights = as_weights(counts, matrix, TRANSFORM_POWER)
    rows, mean = centred(matrix, weights)
    order = by_frequency(weights)
    root, back = metric(sensitivity, rows)
    directions = principal_directions(rows @ root, min(rows.shape), weights)  # (r, m)
    directions = F.pad(directions, (0, 0, 0, -len(directions) % block_of(storage)))  # the last block may be part empty
    coefficients = ((rows @ root) @ directions.T)[order]  # (V, r), columns in order of variance
    overhead = 4 * rows.shape[1] + (0 if already_in(order) else place_bytes(len(order)))  # the mean, and the places
    plan = _plan(coefficients, weights[order], rows.shape[1], budget - overhead, storage)
    rank = max(plan.columns)
    packed = _pack(coefficients, plan)
    rebuilt = in_bands(packed, order)
    projection = _projection(rebuilt, rows, weights, (directions @ back)[:rank], storage)
    return CompactTable(FactorisedRows(rebuilt, projection), mean, padding_idx)


def block_of(storage: str) -> int:
    return 1 if storage in FLOATS else BLOCK


def band_edges(num_rows: int) -> list[int]:
    """Where bands begin and the last one ends: each is four times the last at the frequent end, twice further on."""
    edges, edge = [0], 64
    while edge < 0.7 * num_rows:
        edges.append(edge)
        edge *= 4 if edge < 1024 else 2
    return [*edges, num_rows]


def metric(sensitivity: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
    """A square root of the sensitivity and its inverse, (m, m) each."""
    width = rows.shape[1]
    even = torch.eye(width, device=rows.device)
    if sensitivity is None:
        return even, even
    if sensitivity.shape != (width, width):
        raise UserError(f"The sensitivity has the shape {tuple(sensitivity.shape)}, but rows are {width} wide.")
    given = sensitivity.to(rows.device).double()
    if not bool(torch.isfinite(given).all()) or not float(given.diagonal().mean()) > 0:
        raise UserError(
            "The sensitivity has values that are not finite, or nothing above zero on its diagonal: measure it again "
            "by Behaviour.sensitivity."
        )
    mixed = given / given.diagonal().mean() + STEADINESS * even
    values, vectors = torch.linalg.eigh((mixed + mixed.T) / 2)
    roots = values.clamp(min=STEADINESS).sqrt()
    return ((vectors * roots) @ vectors.T).float(), ((vectors / roots) @ vectors.T).float()


def allocate(importance: Tensor, rows: Tensor, ladder: Ladder, budget_bits: float) -> Tensor:
    """The step of the ladder for every band and column, (bands, columns), such that the loss is least.

    ``importance`` is each band's and column's variance × the mean weight of the band's rows; ``rows`` counts those. As
    the ladder is convex, taking the steps in order of savings per bit is optimal until one is too expensive; then its
    column stays as it is, and cheaper ones go on.
    """
    more_bits = torch.tensor(ladder.bits, dtype=torch.float64).diff()
    less_loss = -torch.tensor(ladder.losses, dtype=torch.float64).diff()
    saved_by_bit = importance.double().cpu().unsqueeze(-1) * (less_loss / more_bits)  # (bands, columns, steps)
    price = (rows.double().cpu()[:, None, None] * more_bits).expand_as(saved_by_bit)
    order = saved_by_bit.flatten().argsort(descending=True)
    prices, left, steps = price.flatten().tolist(), budget_bits, len(more_bits)
    taken = [0] * importance.numel()
    for index in order.tolist():
        cell, step = divmod(index, steps)
        if step == taken[cell] and prices[index] <= left:
            taken[cell] += 1
            left -= prices[index]
    return torch.tensor(taken).reshape(importance.shape)


def _plan(coefficients: Tensor, weights: Tensor, width: int, budget: int, storage: str) -> _Plan:
    """Spend the budget; scales and the projection take some of it, so the rest is found by bisection."""
    edges = band_edges(len(coefficients))
    block = block_of(storage)
    bands = list(pairwise(edges))
    means = [(weights[a:b, None] * coefficients[a:b].square()).mean(0) for a, b in bands]
    importance = torch.stack(means).unflatten(1, (-1, block)).mean(-1)  # (bands, blocks)
    sizes = torch.tensor([b - a for a, b in bands])
    low, high = 0.0, float(budget)
    best, most = None, 0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        steps = allocate(importance, sizes * block, LADDERS[storage], 8 * middle)
        plan = _Plan(edges, steps.sort(dim=1, descending=True).values, storage)
        size = _bytes(plan, width)
        low, high = (low, middle) if size > budget else (middle, high)
        if most < size <= budget:
            best, most = plan, size
    if best is None or not best.steps.any():
        raise UserError(f"{max(budget, 0)} bytes beside mean and places are too few for any column: allow more.")
    return best


def _bytes(plan: _Plan, width: int) -> int:
    rank = max(plan.columns)
    total = rank * (packed_width(width, PROJECTION_BITS) + 2) if plan.storage not in FLOATS else 0
    total += rank * width * FLOATS[plan.storage].itemsize if plan.storage in FLOATS else 0
    for band, (start, stop) in enumerate(pairwise(plan.edges)):
        columns, count = plan.columns[band], stop - start
        if plan.storage in FLOATS:
            total += count * max(columns, 1) * FLOATS[plan.storage].itemsize
        elif plan.storage == "mixed":
            total += sum(count * packed_width(n, bits) + 2 * 2**bits for bits, n in plan.runs(band)) + 2 * columns
            total += 0 if columns else 2 * count
        else:
            bits = int(plan.storage.removeprefix("int"))
            total += count * (packed_width(columns, bits) + 2 * -(-columns // 32)) if columns else 2 * count
    return total


def _pack(coefficients: Tensor, plan: _Plan) -> list[Rows]:
    packed: list[Rows] = []
    for band, (start, stop) in enumerate(pairwise(plan.edges)):
        part = coefficients[start:stop, : plan.columns[band]]
        if not plan.columns[band]:  # a band that gets no bits: its rows are the mean
            packed.append(DenseRows(stop - start, 1, "float32" if plan.storage == "float32" else "float16"))
        elif plan.storage == "mixed":
            packed.append(mixed_bit_rows(part, plan.runs(band)))
        else:
            packed.append(stored_rows(part, plan.storage))
    return [rows.to(coefficients.device) for rows in packed]


def _projection(packed: Rows, rows: Tensor, weights: Tensor, start: Tensor, storage: str) -> Rows:
    """The projection that loses least for the rounded rows; a ridge keeps it near its start."""
    rank = len(start)
    both = torch.zeros(rank, rank, dtype=torch.float64, device=rows.device)
    towards = torch.zeros(rank, rows.shape[1], dtype=torch.float64, device=rows.device)
    for ids in torch.arange(len(rows), device=rows.device).split(ROWS_AT_ONCE):
        decoded = packed(ids, torch.float32).double()
        weighted = decoded * weights[ids, None]
        both += weighted.T @ decoded
        towards += weighted.T @ rows[ids].double()
    ridge = 1e-3 * both.diagonal().mean().clamp(min=1e-30) * torch.eye(rank, dtype=torch.float64, device=rows.device)
    best = torch.linalg.solve(both + ridge, towards + ridge @ start.double()).float()
    if storage in FLOATS:
        return DenseRows.of(best, storage)
    return quantise_rows(best, PROJECTION_BITS, group_size=best.shape[1])


@dataclass(frozen=True)
class Bits(Method):
    """As many bits for each number as it is worth; or whole ranks by frequency, in 4 and in 8 bits, or in float32."""

    sure_of_its_size: ClassVar[bool] = False

    def within(self, source: Source, budget: Budget) -> Iterator[Candidate]:
        for storage in ("float32",) if budget.floats_only else ("mixed", "int4", "int8"):
            label = "bits by importance" if storage == "mixed" else f"ranks by frequency, {storage}"
            make = partial(transform_table, source.matrix, budget.bytes)
            yield candidate(label, source, partial(make, storage=storage, sensitivity=source.sensitivity))
