"""Truncated SVD with both factors in float16; every row counts the same."""

from __future__ import annotations

import torch

from leaderboard.board import Method, Packed, Table


def pack(table: Table, budget: int) -> Packed | None:
    matrix = table.source.matrix
    rank = min(budget // (2 * sum(matrix.shape)), min(matrix.shape))
    if rank < 1:
        return None
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    factor = (left[:, :rank] * values[:rank]).half().float()
    return Packed(factor @ right[:rank].half().float(), 2 * rank * sum(matrix.shape), f"rank {rank}")


METHOD = Method("SVD, float16", pack, {"factors": "float16", "weights": "none"})
