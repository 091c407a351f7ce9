"""How many bytes a table would take, and the largest that fits; nothing is allocated to find out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchdefine.inference.compact_table import CompactTable
from torchdefine.inference.factorised import FactorisedRows
from torchdefine.inference.quantised import QuantisedRows
from torchdefine.inference.rows import FLOATS, DenseRows, Rows


def table_bytes(kind: type[Rows], *sizes: Any) -> int:
    """The bytes of a table of such rows."""
    with torch.device("meta"):
        return CompactTable(kind(*sizes)).stored_bytes


def largest_fitting(highest: int, bytes_of: Callable[[int], int], budget: int) -> int:
    """The largest size from 1 to ``highest`` whose bytes are within the budget, by halving; 0 where none is."""
    low, high = 0, highest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_of(middle) <= budget else (low, middle - 1)
    return low


def low_rank_bytes(rows: int, width: int, storage: str, kept: int, rank: int) -> int:
    """The bytes of a table of low rank whose first ``kept`` rows are whole."""
    with torch.device("meta"):
        projection = empty_rows("int8" if storage.startswith("int") else storage, rank, width, width)
        rest = FactorisedRows(empty_rows(storage, rows - kept, rank), projection)
        size = CompactTable(rest).stored_bytes
        if kept:
            whole = CompactTable(empty_rows(storage, kept, width)).stored_bytes - 4 * width
            size += whole + place_bytes(rows)
        return size


def place_bytes(rows: int) -> int:
    """The bytes a banded table spends on the order of its rows."""
    return rows * (2 if rows <= 1 << 16 else 4)


def empty_rows(storage: str, rows: int, width: int, group: int = 32) -> Rows:
    """Rows without values, as ``stored_rows`` would hold them."""
    if storage in FLOATS:
        return DenseRows(rows, width, storage)
    return QuantisedRows(rows, width, int(storage.removeprefix("int")), group)
