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
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.tables.budget import Budget
from torchdefine.tables.compact_table import CompactTable, table_bytes
from torchdefine.tables.low_rank import FactorisedRows, second_moments
from torchdefine.tables.quantised import stored_rows
from torchdefine.tables.rows import FLOATS, BandedRows, DenseRows, Rows, in_bands, in_order, sorted_within
from torchdefine.tables.source import ROWS_AT_ONCE, Candidate, Method, Source, TableLike
from torchdefine.tables.trellis import BITS, losses, memory_for
from torchdefine.tables.trellis_search import trellis_rows

BLOCK = 16
"""Columns that share a bit width: sixteen numbers of any width fill whole bytes. Floats need no blocks."""
PROJECTION_BITS = range(2, 9)
HALVINGS = 16
TRANSFORM_POWER = 0.5
"""The power of counts. Bits by weight favour frequent rows so much already that a milder power measured best."""
STEADINESS = 0.05
"""The even sensitivity added to a measured one, relative to its mean, so that no direction is forgotten."""
EVEN_LOSS = 3.9
"""What even steps leave of it, times four to the power of the bits."""

Ladder = tuple[tuple[float, ...], tuple[float, ...]]
"""Steps of increasing bits for a number, and the fraction of its variance that each still loses: a convex curve."""
LADDERS: dict[str, Ladder] = {
    "int4": ((0, 4.5), (1.0, 0.012)),  # with a float16 step for 32 numbers
    "int8": ((0, 8.5), (1.0, 0.0001)),
    "float16": ((0, 16), (1.0, 0.0)),
    "float32": ((0, 32), (1.0, 0.0)),
}


def ladder(storage: str, numbers: int) -> Ladder:
    """The steps of a table of so many numbers."""
    if storage == "mixed":
        return (0, *BITS), (1.0, *losses(memory_for(numbers)))
    if storage not in LADDERS:
        raise UserError(f"Numbers cannot be stored as {storage!r}: use one of {', '.join(('mixed', *LADDERS))}.")
    return LADDERS[storage]


@torch.no_grad()
def transform_table(table: TableLike | Source, budget: int, *, storage: str = "mixed", **known: Any) -> CompactTable:
    """The table of at most ``budget`` bytes that loses least, weighted by frequency if counts are given.

    ``storage`` is mixed (up to 8 bits by importance), float32, float16, int8 or int4. ``sensitivity``, (m, m), says how
    sensitive the model is to an error in each direction (``adapt.Behaviour.sensitivity``).
    """
    source = Source.of(table, **known)
    ladder(storage, source.matrix.numel())  # refuses what is none
    matrix, weights = source.matrix, source.weights(TRANSFORM_POWER)
    mean = weights @ matrix
    root, back = metric(source.sensitivity, matrix)
    directions = _directions(root @ second_moments(matrix, weights, mean).to(root.dtype) @ root, storage)  # (r, m)
    edges = band_edges(len(matrix))
    order = torch.sort(weights, descending=True, stable=True).indices
    order = sorted_within(order, [stop - start for start, stop in pairwise(edges)])
    coefficients = _coefficients(matrix, order, mean, root @ directions.T)  # (V, r), columns in order of variance
    ranked = not in_order(order)
    meant = partial(BandedRows, [DenseRows(stop - start, 1) for start, stop in pairwise(edges)], ranked)
    beside = table_bytes(meant) - 4 * len(matrix) + 4 * (matrix.shape[1] - 1)  # mean and places
    steps, widths = _affordable_steps(coefficients, weights[order], edges, matrix.shape[1], budget - beside, storage)
    rebuilt = in_bands([band.to(matrix.device) for band in _bands(steps, edges, storage, coefficients)], order)
    del coefficients
    best = _projection(rebuilt, matrix, mean, weights, (directions @ back)[: rebuilt.width])
    return CompactTable(FactorisedRows(rebuilt, _stored_projection(best, widths)), mean, source.padding_idx)


def _directions(moments: Tensor, storage: str) -> Tensor:
    """Orthonormal directions in order of variance, (r, m); empty ones fill the last block."""
    vectors = torch.linalg.eigh(moments.double()).eigenvectors  # ascending
    directions = vectors.flip(-1).T.float()
    return F.pad(directions, (0, 0, 0, -len(directions) % block_of(storage)))


def _coefficients(matrix: Tensor, order: Tensor, mean: Tensor, directions: Tensor) -> Tensor:
    """The rows in another order, less their mean, along directions: (V, m) → (V, r), a part at a time."""
    made = matrix.new_empty(len(matrix), directions.shape[1])
    for some, part in zip(order.split(ROWS_AT_ONCE), made.split(ROWS_AT_ONCE), strict=True):
        torch.mm(matrix[some] - mean, directions, out=part)
    return made


def block_of(storage: str) -> int:
    return 1 if storage in FLOATS else BLOCK


def band_edges(num_rows: int) -> list[int]:
    """Where bands begin and the last one ends: each is twice the last at the frequent end, half as far again later.

    Up to 78,000 rows there are 16 bands or fewer, so that a row's band takes four bits.
    """
    edges, edge = [0], 128
    while edge < 0.75 * num_rows:
        edges.append(edge)
        edge = 2 * edge if edge < 1024 else edge * 3 // 2
    return [*edges, num_rows]


def metric(sensitivity: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
    """A square root of the sensitivity and its inverse, (m, m) each."""
    even = torch.eye(rows.shape[1], device=rows.device)
    if sensitivity is None:
        return even, even
    given = sensitivity.to(rows.device).double()
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
    more_bits, more_loss = (torch.tensor(one, dtype=torch.float64).diff() for one in ladder)
    saved_by_bit = importance.double().cpu().unsqueeze(-1) * (-more_loss / more_bits)  # (bands, columns, steps)
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


def _affordable_steps(
    coefficients: Tensor, weights: Tensor, edges: list[int], width: int, budget: int, storage: str
) -> tuple[Tensor, list[str]]:
    """The ladder's steps for every band and block of columns, the highest first: (bands, blocks); and how each row of
    the projection is stored.

    Scales and the projection take some of the budget, so how much the numbers may take is found by bisection.
    """
    block, (bits, shares) = block_of(storage), ladder(storage, coefficients.numel())
    means = [_mean_squares(coefficients[a:b], weights[a:b]) for a, b in pairwise(edges)]
    importance = torch.stack(means).unflatten(1, (-1, block)).mean(-1)  # (bands, blocks)
    sizes = torch.tensor(edges).diff()
    low, high = 0.0, float(budget)
    best, most = None, 0

    def empty() -> Rows:
        bands = BandedRows(_bands(steps, edges, storage, coefficients.to("meta")), ranked=False)
        return FactorisedRows(bands, _stored_projection(torch.empty(len(widths), width), widths))

    for _ in range(HALVINGS):
        middle = (low + high) / 2
        steps = allocate(importance, sizes * block, (bits, shares), 8 * middle).sort(dim=1, descending=True).values
        widths = _of_projection(importance.cpu(), sizes, torch.tensor(shares)[steps], width, storage)
        size = table_bytes(empty) - 4 * width  # beside the mean
        low, high = (low, middle) if size > budget else (middle, high)
        if most < size <= budget:
            best, most = (steps, widths), size
    if best is None or not best[0].any():
        raise UserError(
            f"{max(budget, 0)} bytes, after the mean and the row order, are too few for one column: allow more."
        )
    return best


def _mean_squares(rows: Tensor, weights: Tensor) -> Tensor:
    """Of weighted rows, (rows, width) → (width,), a part at a time."""
    parts = zip(rows.split(ROWS_AT_ONCE), weights.split(ROWS_AT_ONCE), strict=True)
    return torch.stack([mass @ some.square() for some, mass in parts]).sum(0) / len(rows)


def _bands(steps: Tensor, edges: list[int], storage: str, coefficients: Tensor) -> list[Rows]:
    """Each band's rows in as many columns and bits as its steps say."""
    made: list[Rows] = []
    memory = memory_for(coefficients.numel())
    for row, (start, stop) in zip(steps, pairwise(edges), strict=True):
        used = row[row > 0]
        part = coefficients[start:stop, : len(used) * block_of(storage)]
        if not len(used):  # a band that gets no bits: its rows are the mean
            made.append(DenseRows(stop - start, 1, "float32" if storage == "float32" else "float16"))
        elif storage == "mixed":
            runs = [[BITS[step - 1], int((used == step).sum()) * BLOCK] for step in used.unique().flip(0).tolist()]
            made.append(trellis_rows(part, runs, memory))
        else:
            made.append(stored_rows(part, storage))
    return made


def _of_projection(importance: Tensor, sizes: Tensor, shares: Tensor, width: int, storage: str) -> list[str]:
    """How each row of the projection is stored, so that one of its numbers loses what a number of the table loses.

    ``shares`` of its variance are lost by each band and block.
    """
    block = block_of(storage)
    used = (shares < 1).any(0)
    if storage in FLOATS:
        return [storage] * int(used.sum()) * block
    lost = importance * shares  # (bands, blocks)
    even = lost[shares < 1].median().clamp(min=1e-30)
    carried = (sizes.unsqueeze(1) * importance).sum(0)[used] / width  # by each number of a row of the projection
    bits = (EVEN_LOSS * carried / even).log2().div(2).round().clamp(PROJECTION_BITS[0], PROJECTION_BITS[-1])
    return [f"int{one}" for one in bits.int().tolist() for _ in range(block)]


def _stored_projection(matrix: Tensor, widths: list[str]) -> Rows:
    """Rows of a matrix, each as its width says, with a step a row."""
    kinds = list(dict.fromkeys(widths)) or ["int8"]
    parts = matrix.split([widths.count(kind) for kind in kinds])
    rows = [stored_rows(part, kind, matrix.shape[1]) for kind, part in zip(kinds, parts, strict=True)]
    return rows[0] if len(rows) == 1 else BandedRows(rows, ranked=False)


def _projection(packed: Rows, matrix: Tensor, mean: Tensor, weights: Tensor, start: Tensor) -> Tensor:
    """The projection that loses least for the rounded rows; a ridge keeps it near its start."""
    rank = len(start)
    both = torch.zeros(rank, rank, dtype=torch.float64, device=matrix.device)
    towards = torch.zeros(rank, matrix.shape[1], dtype=torch.float64, device=matrix.device)
    for ids in torch.arange(len(matrix), device=matrix.device).split(ROWS_AT_ONCE):
        decoded = packed(ids, torch.float32).double()
        weighted = decoded * weights[ids, None]
        both += weighted.T @ decoded
        towards += weighted.T @ (matrix[ids] - mean).double()
    ridge = 1e-3 * both.diagonal().mean().clamp(min=1e-30) * torch.eye(rank, dtype=torch.float64, device=matrix.device)
    return torch.linalg.solve(both + ridge, towards + ridge @ start.double()).float()


@dataclass(frozen=True)
class Bits(Method):
    """As many bits for each number as it is worth; or whole ranks by frequency, in float32."""

    sure_of_its_size: ClassVar[bool] = False

    def within(self, rows: int, width: int, budget: Budget) -> Iterator[Candidate]:
        storage = "float32" if budget.floats_only else "mixed"
        label = f"ranks by frequency, {storage}" if budget.floats_only else "bits by importance"
        yield Candidate(label, partial(transform_table, budget=budget.bytes, storage=storage))
