"""A smaller vocabulary: the most frequent rows in torchao's 4 bits. Other tokens are split, or have no vector."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from leaderboard.board import Method, Packed, Table
from leaderboard.methods.torchao_int import GROUP, bytes_of, rounded


def pack(table: Table, budget: int) -> Packed | None:
    rows, width = table.source.matrix.shape
    room = bisect_right(range(1, rows + 1), budget, key=lambda some: bytes_of(some, width, 4))
    if room in (0, rows):  # all of them are the same as torchao's four bits
        return replace(rounded(table.source.matrix, 4), label="all rows, int4") if room else None
    kept = table.frequent(room)
    return replace(rounded(table.source.matrix[kept], 4), label=f"{len(kept):,} rows, int4", kept=kept)


METHOD = Method(
    "trimmed + int4", pack, {"group": GROUP, "bits": 4}, ("torchao",), suits=lambda table: table.may_lose_rows
)
