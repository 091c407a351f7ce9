"""SVD at its best: rows weighted by counts, 4 bits a coefficient with a scale for each 32 of them."""

from __future__ import annotations

from leaderboard.board import Method, Packed, Table
from leaderboard.methods._ours import unpacked
from torchdefine.tables import Budget, table_method


def pack(table: Table, budget: int) -> Packed | None:
    """The highest rank that fits."""
    rows, width = table.source.matrix.shape
    candidates = table_method("svd").within(rows, width, Budget(budget))
    chosen = next((one for one in candidates if one.label.endswith("int4")), None)
    return unpacked(chosen.build(table.source), chosen.label) if chosen else None


METHOD = Method("SVD by counts, 4 bits", pack, {"coefficients": "int4", "projection": "int8", "weights": "counts"})
