"""From a finished table, or any embedding, to a compact one: one function for each way of packing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from torchdefine.embedding import finished_table
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.inference.banded import in_bands
from torchdefine.inference.code_learning import CodeLearning, learn_code_rows
from torchdefine.inference.compact_table import CompactTable
from torchdefine.inference.factorised import FactorisedRows, principal_directions
from torchdefine.inference.product_codes import product_quantise_rows
from torchdefine.inference.quantised import quantise_rows, stored_rows
from torchdefine.inference.rows import DenseRows
from torchdefine.inference.tensor_train import tensor_train_rows

TableLike = Tensor | np.ndarray | nn.Module
Counts = Tensor | np.ndarray | Sequence[int] | Sequence[float]
"""How often each token occurs, by id."""

ROWS_AT_ONCE = 16_384
FREQUENCY_POWER = 0.75
"""A model is less sensitive to each occurrence of a frequent token's error than of a rare one's (about half as much for
ten times the count, in a sentence encoder), so a token's weight grows more slowly than its count."""


def dense_table(table: TableLike, dtype: str = "float16", *, padding_idx: int | None = None) -> CompactTable:
    """The table as it is, in another number type."""
    return CompactTable(DenseRows.of(as_matrix(table), dtype), padding_idx=padding_idx)


def quantised_table(
    table: TableLike,
    bits: int = 4,
    group_size: int = 32,
    *,
    padding_idx: int | None = None,
    progress: Progress | None = None,
) -> CompactTable:
    """Every number in ``bits`` bits, with a float16 step for each ``group_size`` of them."""
    rows, mean = centred(as_matrix(table))
    return CompactTable(quantise_rows(rows, bits, group_size, progress), mean, padding_idx)


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
    counts: Counts,
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


def coded_table(
    table: TableLike,
    codebooks: int = 32,
    entries: int = 16,
    *,
    counts: Counts | None = None,
    learning: CodeLearning | None = None,
    padding_idx: int | None = None,
    progress: Progress | None = None,
) -> CompactTable:
    """Compositional codes: each row is a sum of one entry from each codebook."""
    if codebooks < 1:
        raise UserError(f"codebooks is {codebooks}, but must be at least 1: use 32, say.")
    matrix = as_matrix(table)
    weights = None if counts is None else as_weights(counts, matrix)
    rows, mean = centred(matrix, weights)
    coded = learn_code_rows(rows, codebooks, entries, learning=learning, weights=weights, progress=progress)
    return CompactTable(coded, mean, padding_idx)


def product_quantised_table(
    table: TableLike,
    parts: int,
    entries: int = 256,
    *,
    counts: Counts | None = None,
    padding_idx: int | None = None,
    progress: Progress | None = None,
) -> CompactTable:
    """Each row cut into parts, each part the nearest of ``entries`` that k-means found."""
    matrix = as_matrix(table)
    weights = None if counts is None else as_weights(counts, matrix)
    rows, mean = centred(matrix, weights)
    return CompactTable(
        product_quantise_rows(rows, parts, entries, weights=weights, progress=progress), mean, padding_idx
    )


def tensor_train_table(
    table: TableLike,
    rank: int,
    *,
    counts: Counts | None = None,
    padding_idx: int | None = None,
) -> CompactTable:
    """A tensor train with ranks up to ``rank``. Rows are put in order of frequency first where counts are given."""
    matrix = as_matrix(table)
    if counts is None:
        rows, mean = centred(matrix)
        return CompactTable(tensor_train_rows(rows, rank), mean, padding_idx)
    weights = as_weights(counts, matrix)
    rows, mean = centred(matrix, weights)
    ranked = by_frequency(weights)
    return CompactTable(in_bands([tensor_train_rows(rows[ranked], rank)], ranked), mean, padding_idx)


def as_matrix(table: TableLike) -> Tensor:
    """The vectors of all tokens, (V, m) float32, of a tensor, an array or any embedding."""
    if not isinstance(table, Tensor | np.ndarray | nn.Module):
        raise TypeError(f"A table is a matrix or an embedding, not {type(table).__name__}: pass its weight, say.")
    matrix = finished_table(table) if isinstance(table, nn.Module) else torch.as_tensor(table).detach()
    if matrix.dim() != 2 or 0 in matrix.shape or not matrix.is_floating_point():
        raise UserError(f"A table is a matrix of floats, not {matrix.dtype} of the shape {tuple(matrix.shape)}.")
    if not bool(torch.isfinite(matrix).all()):
        raise UserError("The table has values that are not finite: repair it before packing it.")
    return matrix.float()


def as_weights(counts: Counts | None, matrix: Tensor, power: float = FREQUENCY_POWER) -> Tensor:
    """How much each row counts, (V,), float32, adding up to 1: (count + 1) to a power."""
    if counts is None:
        return torch.full((len(matrix),), 1 / len(matrix), device=matrix.device)
    given = torch.as_tensor(counts, dtype=torch.float64, device=matrix.device)
    if given.shape != (len(matrix),):
        raise UserError(f"There are {given.numel()} counts for {len(matrix)} rows: give one for each token id.")
    if not bool(torch.isfinite(given).all()) or bool((given < 0).any()):
        raise UserError("Some counts are negative or not finite: count each token's occurrences in some text.")
    weights = (given + 1) ** power
    return (weights / weights.sum()).float()


def centred(matrix: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows less their (weighted) mean, and the mean."""
    mean = matrix.mean(0) if weights is None else weights @ matrix
    return matrix - mean, mean


@torch.no_grad()
def lost_variance(table: nn.Module, matrix: Tensor, weights: Tensor | None = None) -> float:
    """The share of a matrix's (weighted) variance that a table made of it has lost."""
    mass = as_weights(None, matrix) if weights is None else weights
    rows, _ = centred(matrix, mass)
    variance = (rows.square().sum(-1) * mass).sum()
    lost = torch.zeros((), device=matrix.device)
    for ids in torch.arange(len(matrix), device=matrix.device).split(ROWS_AT_ONCE):
        lost += ((table(ids).float() - matrix[ids]).square().sum(-1) * mass[ids]).sum()
    return float(lost / variance.clamp(min=1e-30))


def by_frequency(weights: Tensor) -> Tensor:
    """Row numbers, most frequent first; ties stay in their order."""
    return torch.sort(weights, descending=True, stable=True).indices


def _low_rank(rows: Tensor, rank: int, weights: Tensor, storage: str) -> FactorisedRows:
    directions = principal_directions(rows, rank, weights)  # (r, m)
    coarse = storage.startswith("int")
    projection = stored_rows(directions, "int8" if coarse else storage, group_size=directions.shape[1])
    factor = rows @ directions.T if not coarse else rows @ torch.linalg.pinv(projection.matrix())
    return FactorisedRows(stored_rows(factor, storage), projection)
