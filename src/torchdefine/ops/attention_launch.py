"""How the kernels of `relative_attention` are started: over which grid, in which blocks, and into which memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from torchdefine.ops import attention_kernels as kernels
from torchdefine.ops.sum_kernels import sum_rows


class Sizes(NamedTuple):
    streams: int
    queries: int
    remembered: int
    heads: int
    width: int
    """P, the width of a head with its padding."""
    columns: int

    @property
    def keys(self) -> int:
        return self.remembered + self.queries

    @property
    def features(self) -> int:
        return self.heads * self.width


class Launch(NamedTuple):
    """Queries and keys that a program takes at once, and how it runs."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    def blocks(self) -> dict[str, int]:
        return {
            "block_queries": self.queries,
            "block_keys": self.keys,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


FORWARD = {64: Launch(64, 64, 4, 1), 128: Launch(64, 64, 4, 2)}
KEY_GRADIENTS = {64: Launch(16, 64, 4, 2), 128: Launch(32, 64, 8, 2)}
QUERY_GRADIENTS = {64: Launch(64, 64, 4, 3), 128: Launch(64, 64, 4, 2)}
"""By the power of two that a head fits into; narrower heads use the settings of 64.

Those of 64 were tuned on an H200 with 10 heads of 48 features, 150 queries and as many remembered positions; those of
128 were calculated, not tuned.
"""
PREPARE = {"block_queries": 16, "num_warps": 2}
"""Small blocks, so few real columns are zeroed needlessly; must divide the padded query count."""

SPARE_ROWS = 192
"""Spare rows behind the scores: the last block reads past the end, and those values are unused."""


def distance_scores(queries: Tensor, distances: Tensor) -> Tensor:
    """(H, B · T, P) and (W, H, P) → (H, B · T, W), with readable memory behind it."""
    (heads, rows, _), columns = queries.shape, len(distances)
    held = queries.new_empty(heads * rows + SPARE_ROWS, columns)
    scores = held[: heads * rows].view(heads, rows, columns)
    return torch.bmm(queries, distances.permute(1, 2, 0), out=scores)


def forward(
    projected: Tensor, scores: Tensor, filled: Tensor, sizes: Sizes, scale: float, same_length: bool
) -> tuple[Tensor, Tensor]:
    """What every head of every query reads, (B, T, H · P), and the log-sums of its scores, (B, H, T')."""
    mixed = projected.new_empty(sizes.streams, sizes.queries, sizes.features)
    rows = triton.cdiv(sizes.queries, kernels.ROWS.value) * kernels.ROWS.value
    log_sums = projected.new_empty(sizes.streams, sizes.heads, rows, dtype=torch.float32)
    launch = _of_width(FORWARD, sizes)
    kernels.attention_forward[(triton.cdiv(sizes.queries, launch.queries), sizes.streams * sizes.heads)](
        projected,
        scores,
        filled,
        mixed,
        log_sums,
        *_runtime(sizes),
        scale * math.log2(math.e),
        same_length=same_length,
        **_constants(sizes),
        **launch.blocks(),
    )
    return mixed, log_sums


def backward(
    grad_mixed: Tensor,
    made: tuple[Tensor, Tensor, Tensor, Tensor],
    distances: Tensor,
    filled: Tensor,
    sizes: Sizes,
    scale: float,
    same_length: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of what ``forward`` read, in the same layouts, and that of the bias, (3 · H · P,).

    ``made`` are projections, scores by distance, and the two results of ``forward``.
    """
    projected, scores, mixed, log_sums = made
    grad_projected, grad_scores = torch.empty_like(projected), torch.empty_like(scores)
    overlaps = torch.empty_like(log_sums)
    pairs, constants = sizes.streams * sizes.heads, _constants(sizes)
    kernels.attention_prepare[(overlaps.shape[2] // PREPARE["block_queries"], pairs)](
        mixed, grad_mixed, overlaps, grad_scores, *_runtime(sizes), **constants, **PREPARE
    )
    launch = _of_width(KEY_GRADIENTS, sizes)
    kernels.attention_key_gradients[(triton.cdiv(sizes.keys, launch.keys), pairs)](
        projected,
        scores,
        filled,
        grad_mixed,
        log_sums,
        overlaps,
        grad_projected,
        grad_scores,
        *_runtime(sizes),
        scale,
        scale * math.log2(math.e),
        same_length=same_length,
        **constants,
        **launch.blocks(),
    )
    launch = _of_width(QUERY_GRADIENTS, sizes)
    blocks = triton.cdiv(sizes.queries, launch.queries)
    sums = log_sums.new_empty(sizes.streams * blocks, sizes.features)
    kernels.attention_query_gradients[(blocks, pairs)](
        projected, distances, grad_scores, grad_projected, sums, *_runtime(sizes), **constants, **launch.blocks()
    )
    grad_bias = projected.new_zeros(1, 3 * sizes.features)
    sum_rows(sums[None], grad_bias[:, : sizes.features])
    return grad_projected, grad_scores, grad_bias[0]


def _of_width(launches: dict[int, Launch], sizes: Sizes) -> Launch:
    return launches[max(triton.next_power_of_2(sizes.width), min(launches))]


def _runtime(sizes: Sizes) -> tuple[int, int, int, int]:
    return sizes.streams, sizes.queries, sizes.remembered, sizes.columns


def _constants(sizes: Sizes) -> dict[str, int]:
    padded = max(16, triton.next_power_of_2(sizes.width))  # tl.dot takes no fewer than 16
    return {"heads": sizes.heads, "width": sizes.width, "padded": padded}
