"""Rows of few numbers that a projection turns into wide ones; frequent rows may stay whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.tables.banded import in_bands, place_bytes
from torchdefine.tables.budget import Budget
from torchdefine.tables.compact_table import CompactTable
from torchdefine.tables.quantised import empty_rows, stored_rows
from torchdefine.tables.rows import Rows
from torchdefine.tables.source import (
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

ROWS_AT_ONCE = 65_536


class FactorisedRows(Rows):
    """(V × r) times (r × m); either factor is any kind of rows."""

    kind = "factorised"
    settings = ("factor", "projection")

    def __init__(self, factor: Rows, projection: Rows) -> None:
        super().__init__(factor.num_rows, projection.width)
        self.factor, self.projection = factor, projection

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return self.factor(rows, dtype) @ self.projection.matrix(dtype)  # (…, r) → (…, m)


def svd_table(
    table: TableLike,
    rank: int,
    *,
    counts: Counts | None = None,
    storage: str = "float32",
    padding_idx: int | None = None,
) -> CompactTable:
    """The best table of rank ``rank``, weighted by ``counts`` where given; both factors as ``storage`` says.

    ``storage`` is float32, float16, bfloat16, or int8 … int1; the projection is never packed below int8.
    """
    matrix = as_matrix(table)
    weights = as_weights(counts, matrix)
    rows, mean = centred(matrix, weights)
    return CompactTable(_low_rank(rows, rank, weights, storage), mean, padding_idx)


def frequent_rows_table(
    table: TableLike,
    rank: int,
    kept: int,
    *,
    counts: Counts | None,
    storage: str = "float32",
    padding_idx: int | None = None,
) -> CompactTable:
    """The ``kept`` most frequent rows whole, the rest of rank ``rank``; all of it as ``storage`` says."""
    matrix = as_matrix(table)
    if not 0 < kept < len(matrix):
        raise UserError(f"{kept} rows of {len(matrix)} cannot be kept whole: use 1 to {len(matrix) - 1}.")
    weights = as_weights(counts, matrix)
    rows, mean = centred(matrix, weights)
    order = by_frequency(weights)
    whole, rest = order[:kept], order[kept:]
    bands = [stored_rows(rows[whole], storage), _low_rank(rows[rest], rank, weights[rest], storage)]
    return CompactTable(in_bands(bands, order), mean, padding_idx)


def _low_rank(rows: Tensor, rank: int, weights: Tensor, storage: str) -> FactorisedRows:
    directions = principal_directions(rows, rank, weights)  # (r, m)
    coarse = storage.startswith("int")
    projection = stored_rows(directions, "int8" if coarse else storage, group_size=directions.shape[1])
    factor = rows @ directions.T if not coarse else rows @ torch.linalg.pinv(projection.matrix())
    return FactorisedRows(stored_rows(factor, storage), projection)


@torch.no_grad()
def principal_directions(matrix: Tensor, rank: int, weights: Tensor | None = None) -> Tensor:
    """The r directions that keep most of the (weighted) squares of the rows: (V, m) → (r, m), orthonormal.

    They are the right singular vectors of diag(√weights) · matrix, found through the m × m second moments, so that a
    table of ten million rows needs no more memory than a small one.
    """
    width = matrix.shape[1]
    if not 1 <= rank <= width:
        raise UserError(f"The rank {rank} does not fit a table {width} wide: use 1 to {width}.")
    moments = torch.zeros(width, width, dtype=torch.float64, device=matrix.device)
    for start in range(0, len(matrix), ROWS_AT_ONCE):
        chunk = matrix[start : start + ROWS_AT_ONCE].double()  # (rows, m)
        weighted = chunk if weights is None else chunk * weights[start : start + ROWS_AT_ONCE, None].double()
        moments += chunk.T @ weighted
    _, vectors = torch.linalg.eigh(moments)  # ascending
    return vectors.flip(-1)[:, :rank].T.to(matrix.dtype).contiguous()


@dataclass(frozen=True)
class LowRank(Method):
    """The highest rank that fits, in 8 bits and in 4, or in float32."""

    def within(self, source: Source, budget: Budget) -> Iterator[Candidate]:
        rows, width = source.matrix.shape
        for storage in storages(budget):
            rank = budget.largest(width, partial(_bytes, rows, width, storage, 0))
            if rank:
                make = partial(svd_table, source.matrix, rank, storage=storage)
                yield candidate(f"SVD {rank}, {storage}", source, make)


@dataclass(frozen=True)
class FrequentRows(Method):
    """A fraction of the rows whole, and the highest rank that fits beside them for the others."""

    fractions: ClassVar[tuple[float, ...]] = (0.05, 0.15)

    def within(self, source: Source, budget: Budget) -> Iterator[Candidate]:
        rows, width = source.matrix.shape
        storage = storages(budget)[-1]  # the smallest
        for kept in (int(fraction * rows) for fraction in self.fractions):
            rank = budget.largest(width, partial(_bytes, rows, width, storage, kept))
            if rank and 0 < kept < rows:
                label = f"{kept} rows whole, rest SVD {rank}, {storage}"
                make = partial(frequent_rows_table, source.matrix, rank, kept, storage=storage)
                yield candidate(label, source, make)


def storages(budget: Budget) -> tuple[str, ...]:
    """How the numbers of a low rank may be held."""
    return ("float32",) if budget.floats_only else ("int8", "int4")


def _bytes(rows: int, width: int, storage: str, kept: int, rank: int) -> int:
    """The bytes of a table of low rank whose first ``kept`` rows are whole."""
    with torch.device("meta"):
        projection = empty_rows("int8" if storage.startswith("int") else storage, rank, width, width)
        size = CompactTable(FactorisedRows(empty_rows(storage, rows - kept, rank), projection)).stored_bytes
        if kept:
            whole = CompactTable(empty_rows(storage, kept, width)).stored_bytes - 4 * width
            size += whole + place_bytes(rows)
        return size
