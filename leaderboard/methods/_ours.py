"""Methods of torchdefine's own list."""

from __future__ import annotations

from functools import partial

import torch

from leaderboard.board import Method, Packed, Table
from torchdefine.errors import UserError
from torchdefine.tables import Budget, CompactTable, table_method
from torchdefine.tables.source import lost_variance


def unpacked(table: CompactTable, label: str = "") -> Packed:
    vectors = table(torch.arange(table.num_embeddings)).detach().float()
    return Packed(vectors, table.stored_bytes, label)


def best(name: str, table: Table, budget: int) -> Packed | None:
    """Of the candidates that fit, the one that loses least, rows weighted by counts."""
    source, found = table.source, []
    rows, width = source.matrix.shape
    for candidate in table_method(name).within(rows, width, Budget(budget)):
        try:
            made = candidate.build(source)
        except UserError:  # too few bytes, which this method knows only now
            continue
        found.append((lost_variance(made, source.matrix, source.weights(1.0)), made, candidate.label))
    if not found:
        return None
    _, made, label = min(found, key=lambda one: one[0])
    return unpacked(made, label)


def of_ours(name: str, title: str) -> Method:
    return Method(title, partial(best, name), {"torchdefine method": name})
