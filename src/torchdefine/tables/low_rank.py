"""Rows of few numbers that a projection turns into wide ones; frequent rows may stay whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.tables.budget import Budget
from torchdefine.tables.compact_table import CompactTable
from torchdefine.tables.quantised import stored_rows
from torchdefine.tables.rows import BandedRows, Rows, in_bands, sorted_within
from torchdefine.tables.source import ROWS_AT_ONCE, Candidate, Method, Source, TableLike, centred


class FactorisedRows(Rows):
    """(V × r) times (r × m); either factor is any kind of rows."""

    kind = "factorised"

    def __init__(self, factor: Rows, projection: Rows) -> None:
        super().__init__(factor.num_rows, projection.width)
        self.factor, self.projection = factor, projection
        self.refuses = factor.refuses

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return self.factor.times(rows, self.projection.kept_matrix(dtype))  # (…, m)


def svd_table(
    table: TableLike | Source, rank: int, kept: int = 0, *, storage: str = "float32", **known: Any
) -> CompactTable:
    """The best table of rank ``rank``, weighted by ``counts`` where given; its ``kept`` most frequent rows stay whole.

    ``storage`` is float32, float16, bfloat16, or int8 … int1; the projection is never packed below int8.
    """
    source = Source.of(table, **known)
    if not 0 <= kept < len(source.matrix):
        count = len(source.matrix)
        raise UserError(f"{kept} rows of {count} cannot be kept whole: use 0 to {count - 1}.")
    weights = source.weights()
    rows, mean = centred(source.matrix, weights)
    if not kept:
        return CompactTable(low_rank_rows(rows, rank, weights, storage), mean, source.padding_idx)
    order = torch.sort(weights, descending=True, stable=True).indices  # ties stay as they are
    order = sorted_within(order, [kept, len(rows) - kept])
    whole, rest = order[:kept], order[kept:]
    bands = [stored_rows(rows[whole], storage), low_rank_rows(rows[rest], rank, weights[rest], storage)]
    return CompactTable(in_bands(bands, order), mean, source.padding_idx)


def low_rank_rows(rows: Tensor, rank: int, weights: Tensor, storage: str) -> FactorisedRows:
    """The rows of rank ``rank`` with the least weighted error."""
    directions, coarse = principal_directions(rows, rank, weights), storage.startswith("int")  # (r, m)
    projection = stored_rows(directions, "int8" if coarse else storage, group_size=directions.shape[1])
    back = torch.linalg.pinv(projection.matrix()) if coarse else directions.T  # (m, r)
    return FactorisedRows(stored_rows(rows @ back, storage), projection)


@torch.no_grad()
def principal_directions(matrix: Tensor, rank: int, weights: Tensor | None = None) -> Tensor:
    """The r directions that keep most of the (weighted) squares of the rows: (V, m) → (r, m), orthonormal.

    They are the right singular vectors of diag(√weights) · matrix, found through the m × m second moments, so that a
    table of ten million rows needs no more memory than a small one.
    """
    width = matrix.shape[1]
    if not 1 <= rank <= width:
        raise UserError(f"The rank {rank} does not fit a table {width} wide: use 1 to {width}.")
    moments = second_moments(matrix, weights)
    _, vectors = torch.linalg.eigh(moments)  # ascending
    return vectors.flip(-1)[:, :rank].T.to(matrix.dtype).contiguous()


def second_moments(matrix: Tensor, weights: Tensor | None = None, mean: Tensor | None = None) -> Tensor:
    """The (weighted) sum of the outer products of rows, less ``mean``, with themselves: (V, m) → (m, m), float64."""
    width = matrix.shape[1]
    moments = torch.zeros(width, width, dtype=torch.float64, device=matrix.device)
    for start in range(0, len(matrix), ROWS_AT_ONCE):
        chunk = matrix[start : start + ROWS_AT_ONCE].double()  # (rows, m)
        chunk = chunk if mean is None else chunk - mean
        weighted = chunk if weights is None else chunk * weights[start : start + ROWS_AT_ONCE, None].double()
        moments += chunk.T @ weighted
    return moments


@dataclass(frozen=True)
class LowRank(Method):
    """The highest rank that fits, in 8 bits and in 4, or in float32; ``kept`` are fractions of the rows kept whole."""

    kept: tuple[float, ...] = ()

    def within(self, rows: int, width: int, budget: Budget) -> Iterator[Candidate]:
        storages = ("float32",) if budget.floats_only else ("int8", "int4")
        sizes = [(0, storage) for storage in storages]
        if self.kept:
            sizes = [(kept, storages[-1]) for fraction in self.kept if (kept := int(fraction * rows))]
        for kept, storage in sizes:
            rank = budget.largest(width, partial(_empty, rows, width, storage, kept))
            if rank:
                label = f"{kept} rows whole, rest SVD {rank}, {storage}" if kept else f"SVD {rank}, {storage}"
                yield Candidate(label, partial(svd_table, rank=rank, kept=kept, storage=storage))


def _empty(rows: int, width: int, storage: str, kept: int, rank: int) -> Rows:
    """Rows without values of low rank, the first ``kept`` of them whole."""
    rest = empty_low_rank(rows - kept, rank, width, storage)
    return BandedRows([stored_rows(torch.empty(kept, width), storage), rest]) if kept else rest


def empty_low_rank(rows: int, rank: int, width: int, storage: str) -> FactorisedRows:
    """What ``low_rank_rows`` makes, without values."""
    projection = stored_rows(torch.empty(rank, width), "int8" if storage.startswith("int") else storage, width)
    return FactorisedRows(stored_rows(torch.empty(rows, rank), storage), projection)
