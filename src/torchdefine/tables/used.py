"""The rows that a text uses in all the bytes, and one vector for all others: a vocabulary that stays, at no cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.tables.bits import transform_table
from torchdefine.tables.budget import Budget
from torchdefine.tables.compact_table import CompactTable, table_bytes
from torchdefine.tables.rows import BandedRows, DenseRows, Rows, frozen, in_bands, stored_as
from torchdefine.tables.source import Candidate, Method, Source, TableLike


class OneRow(Rows):
    """The same vector for every row, in float16."""

    kind = "one row"

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__(num_rows, width)
        self.vector = frozen(torch.zeros(width, dtype=torch.float16))

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return self.vector.to(dtype).expand(*rows.shape, self.width)


@torch.no_grad()
def used_table(table: TableLike | Source, budget: int, **known: object) -> CompactTable:
    """``transform_table`` of the rows with a count above zero; all others get their mean.

    It takes ``counts``, and refuses them if every row is used: then ``transform_table`` has nothing to gain from it.
    """
    source = Source.of(table, **known)
    if source.counts is None:
        raise UserError("Without counts no row is known to be unused: give them, or take transform_table (bits).")
    source.weights()  # refuses counts of another size
    counts = torch.as_tensor(source.counts, device=source.matrix.device)
    used, unused = (counts > 0).nonzero().squeeze(-1), (counts == 0).nonzero().squeeze(-1)
    if not len(unused) or not len(used):
        which = "Every row" if len(used) else "No row"
        raise UserError(
            f"{which} of this table is used, so there is nothing to leave out: take transform_table (bits)."
        )
    width = source.matrix.shape[1]

    def bands(inner: Rows) -> list[Rows]:
        return [inner, OneRow(len(unused), width)]

    plain = partial(DenseRows, len(used), width)
    beside = table_bytes(lambda: BandedRows(bands(plain()))) - table_bytes(plain)
    some = replace(source, matrix=source.matrix[used], counts=counts[used], padding_idx=None)
    packed = transform_table(some, budget - beside)
    made = bands(packed.rows)
    made[1].vector = frozen(stored_as(source.matrix[unused].mean(0) - packed.mean, torch.float16))
    rows = in_bands(made, torch.cat([used, unused]))
    return CompactTable(rows, packed.mean, source.padding_idx)


@dataclass(frozen=True)
class Used(Method):
    """As many bits for each number of a used row as it is worth, and none for the others."""

    sure_of_its_size: ClassVar[bool] = False

    def within(self, rows: int, width: int, budget: Budget) -> Iterator[Candidate]:
        if not budget.floats_only:
            yield Candidate("bits by importance, used rows", partial(used_table, budget=budget.bytes))
