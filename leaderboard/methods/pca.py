"""PCA as model2vec reduces a table, with its int8 for the coefficients."""

from __future__ import annotations

import torch

from leaderboard.board import Method, Packed, Table


def pack(table: Table, budget: int) -> Packed | None:
    matrix = table.source.matrix
    rows, width = matrix.shape
    beside = 4 * width + 4 * rows  # the mean, and a scale a row
    rank = min((budget - beside) // (rows + 4 * width), width)
    if rank < 1:
        return None
    mean = matrix.double().mean(0)
    centred = matrix - mean
    directions = torch.linalg.svd(centred, full_matrices=False)[2][:rank]
    coefficients = (centred @ directions.T).float()
    scale = coefficients.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    back = (coefficients / scale).round() * scale @ directions.float() + mean.float()
    return Packed(back, beside + rank * (rows + 4 * width), f"rank {rank}")


METHOD = Method("PCA as model2vec, int8", pack, {"coefficients": "int8", "weights": "none"})
