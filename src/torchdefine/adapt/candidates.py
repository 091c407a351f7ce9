"""Every way of packing a table into a budget: one candidate per method, as large as the budget allows.

For a budget of bytes the large parts are packed, as no table of floats comes close; for one of parameters none is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchdefine.adapt.budget import Budget
from torchdefine.adapt.unit_fitting import UnitFitting, make_unit, unit_table
from torchdefine.files import Progress
from torchdefine.inference import (
    CodedRows,
    CodeLearning,
    CompactTable,
    QuantisedRows,
    TensorTrainRows,
    UnitRows,
    coded_table,
    frequent_rows_table,
    product_quantised_table,
    quantised_table,
    svd_table,
    tensor_train_table,
    transform_table,
)
from torchdefine.inference.sizes import empty_rows, largest_fitting, low_rank_bytes, place_bytes, table_bytes
from torchdefine.inference.tables import Counts
from torchdefine.inference.tensor_train import train_shape

FAMILIES = (
    "transform",
    "weighted SVD",
    "frequent rows whole",
    "quantised",
    "product codes",
    "tensor train",
    "DeFINE",
    "MLP",
    "compositional codes",
)
KEPT_SHARES = (0.05, 0.15)
ENTRIES = 16
MOST_CODEBOOKS = 64
"""Of compositional codes: learning more takes long, and the codebooks alone are large."""
Build = Callable[[Progress | None], CompactTable]


@dataclass(frozen=True)
class Candidate:
    """A method at one size; ``build`` makes the table."""

    family: str
    name: str
    build: Build


@dataclass(frozen=True)
class Source:
    """The table to be replaced, and what is known of it."""

    table: Tensor
    counts: Counts
    sensitivity: Tensor | None = None
    padding_idx: int | None = None


def candidates(
    source: Source, budget: Budget, *, units: UnitFitting | None = None, codes: CodeLearning | None = None
) -> Iterator[Candidate]:
    """All candidates that fit the budget, in order of how long they take."""
    yield from _transforms(source, budget)
    yield from _low_rank(source, budget)
    if not budget.floats_only:
        yield from _quantised(source, budget)
        yield from _product_codes(source, budget)
    yield from _tensor_train(source, budget)
    yield from _units(source, budget, units or UnitFitting())
    if not budget.floats_only:
        yield from _compositional_codes(source, budget, codes)


def _transforms(source: Source, budget: Budget) -> Iterator[Candidate]:
    for storage in ("float32",) if budget.floats_only else ("mixed", "int4", "int8"):
        name = "bits by importance" if storage == "mixed" else f"ranks by frequency, {storage}"
        make = partial(transform_table, source.table, budget.bytes, storage=storage, sensitivity=source.sensitivity)
        yield Candidate("transform", name, _build(source, make))


def _low_rank(source: Source, budget: Budget) -> Iterator[Candidate]:
    rows, width = source.table.shape
    storages = ("float32",) if budget.floats_only else ("int8", "int4")
    for storage in storages:
        rank = largest_fitting(width, partial(low_rank_bytes, rows, width, storage, 0), budget.bytes)
        if rank:
            make = partial(svd_table, source.table, rank, storage=storage)
            yield Candidate("weighted SVD", f"SVD {rank}, {storage}", _build(source, make))
    storage = storages[-1]  # the smallest
    for kept in (int(share * rows) for share in KEPT_SHARES):
        rank = largest_fitting(width, partial(low_rank_bytes, rows, width, storage, kept), budget.bytes)
        if rank and 0 < kept < rows:
            make = partial(frequent_rows_table, source.table, rank, kept, storage=storage)
            name = f"{kept} rows whole, rest SVD {rank}, {storage}"
            yield Candidate("frequent rows whole", name, _build(source, make))


def _quantised(source: Source, budget: Budget) -> Iterator[Candidate]:
    rows, width = source.table.shape
    for group in sorted({width, 32}, reverse=True):
        sizes = [table_bytes(QuantisedRows, rows, width, bits, group) for bits in range(1, 9)]
        bits = sum(size <= budget.bytes for size in sizes)
        if bits and group <= width:
            per = "row" if group == width else f"{group} numbers"
            make = partial(quantised_table, source.table, bits, group)
            yield Candidate("quantised", f"int{bits}, a step a {per}", _build(source, make, counted=False))


def _product_codes(source: Source, budget: Budget) -> Iterator[Candidate]:
    rows, width = source.table.shape
    divisors = [parts for parts in range(1, width + 1) if width % parts == 0]
    fitting = [parts for parts in divisors if table_bytes(CodedRows, rows, width, parts, 1, ENTRIES) <= budget.bytes]
    if fitting and rows >= ENTRIES:
        make = partial(product_quantised_table, source.table, fitting[-1], ENTRIES)
        yield Candidate("product codes", f"product codes {fitting[-1]} × {ENTRIES}", _build(source, make))


def _compositional_codes(source: Source, budget: Budget, learning: CodeLearning | None) -> Iterator[Candidate]:
    rows, width = source.table.shape
    books = largest_fitting(
        MOST_CODEBOOKS, lambda books: table_bytes(CodedRows, rows, width, 1, books, ENTRIES), budget.bytes
    )
    if books and rows >= ENTRIES:
        make = partial(coded_table, source.table, books, ENTRIES, learning=learning)
        yield Candidate("compositional codes", f"codes {books} × {ENTRIES}", _build(source, make, reports=True))


def _tensor_train(source: Source, budget: Budget) -> Iterator[Candidate]:
    rows, width = source.table.shape
    left = budget.bytes - place_bytes(rows)
    rank = largest_fitting(
        4 * width, lambda rank: table_bytes(TensorTrainRows, rows, *train_shape(rows, width, rank)), left
    )
    if rank:
        make = partial(tensor_train_table, source.table, rank)
        yield Candidate("tensor train", f"tensor train, ranks to {rank}", _build(source, make))


def _units(source: Source, budget: Budget, fitting: UnitFitting) -> Iterator[Candidate]:
    rows, width = source.table.shape
    fitting = replace(fitting, storage="float32" if budget.floats_only else "int4")
    for unit, label in (("define", "DeFINE"), ("mlp", "MLP")):
        n = 4 * largest_fitting(width // 4, partial(_unit_bytes, rows, width, unit, fitting.storage), budget.bytes)
        if n:
            make = partial(unit_table, source.table, unit, n, sensitivity=source.sensitivity, fitting=fitting)
            yield Candidate(label, f"{label} {n}, {fitting.storage}", _build(source, make, reports=True))


def _build(source: Source, make: Callable[..., CompactTable], *, counted: bool = True, reports: bool = False) -> Build:
    def build(progress: Progress | None) -> CompactTable:
        more: dict[str, Any] = {"counts": source.counts} if counted else {}
        if reports:
            more["progress"] = progress
        return make(padding_idx=source.padding_idx, **more)

    return build


def _unit_bytes(rows: int, width: int, unit: str, storage: str, quarter: int) -> int:
    with torch.device("meta"):
        map_dim = 4 * quarter  # as the groups of a DeFINE unit need
        made = make_unit(unit, map_dim, width)
        made = made if storage == "float32" else made.half()
        return CompactTable(UnitRows(empty_rows(storage, rows, map_dim), made)).stored_bytes
