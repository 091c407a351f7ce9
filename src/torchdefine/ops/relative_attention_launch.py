"""How the kernels of `relative_attention` are started: over which grid, in which blocks, and into which memory.

See there for what they compute and for the letters. Projections hold the segments' rows (B · T, 3 · H · P), and behind
them the memories' (B · M, 2 · H · P).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchdefine.ops import relative_attention_kernels as kernels
from torchdefine.ops.relative_attention import Scoring
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
    def features(self) -> int:
        return self.heads * self.width

    @property
    def runtime(self) -> tuple[int, int, int, int]:
        return self.streams, self.queries, self.remembered, self.columns

    @property
    def constants(self) -> dict[str, int]:
        padded = max(16, triton.next_power_of_2(self.width))  # tl.dot takes no fewer than 16
        return {"heads": self.heads, "width": self.width, "padded": padded}

    def parts(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """The segments' rows and the memories'."""
        own = self.streams * self.queries * 3 * self.features
        return projected[:own].view(-1, 3 * self.features), projected[own:].view(-1, 2 * self.features)

    def query_heads(self, of_own: Tensor) -> Tensor:
        """(B · T, 3 · H · P) → (H, B · T, P), a view that matrix products take as it is."""
        return of_own[:, : self.features].view(-1, self.heads, self.width).transpose(0, 1)


def _blocks(queries: int, keys: int, num_warps: int, num_stages: int) -> dict[str, int]:
    """Queries and keys that a program takes at once, and how it runs."""
    return {"block_queries": queries, "block_keys": keys, "num_warps": num_warps, "num_stages": num_stages}


FORWARD = {64: _blocks(64, 64, 4, 1), 128: _blocks(64, 64, 4, 2)}
KEY_GRADIENTS = {64: _blocks(16, 64, 4, 2), 128: _blocks(32, 64, 8, 2)}
QUERY_GRADIENTS = {64: _blocks(64, 64, 4, 3), 128: _blocks(64, 64, 4, 2)}
"""By the power of two that a head fits into; narrower heads use the settings of 64.

Those of 64 were tuned on an H200 with 10 heads of 48 features, 150 queries and as many remembered positions; those of
128 were calculated, not tuned.
"""
PREPARE = {"block_queries": 16, "num_warps": 2}
"""Small blocks, so few real columns are zeroed needlessly; must divide the padded query count."""

SPARE_ROWS = 192
"""Spare rows behind the scores: the last block reads past the end, and those values are unused."""


def _launch(launches: dict[int, dict[str, int]], sizes: Sizes) -> dict[str, int]:
    return launches[max(triton.next_power_of_2(sizes.width), min(launches))]


class AttentionByKernels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, remembered: Tensor, weight: Tensor, bias: Tensor, distances: Tensor, scoring: Scoring
    ) -> Tensor:
        (streams, length, _), memory = own.shape, remembered.shape[1]
        columns, heads, width = distances.shape
        sizes = Sizes(streams, length, memory, heads, width, columns)
        distances = distances.contiguous()
        with torch.autocast(own.device.type, enabled=False):  # the dtype is already chosen
            own, remembered = own.flatten(0, 1), remembered.flatten(0, 1)
            projected = own.new_empty(3 * len(own) * sizes.features + 2 * len(remembered) * sizes.features)
            of_own, of_memory = sizes.parts(projected)
            torch.addmm(bias, own, weight.T, out=of_own)
            torch.mm(remembered, weight[sizes.features :].T, out=of_memory)
            held = own.new_empty(heads * len(own) + SPARE_ROWS, columns)
            scores = held[:-SPARE_ROWS].view(heads, len(own), columns)
            torch.bmm(sizes.query_heads(of_own), distances.permute(1, 2, 0), out=scores)
        mixed = own.new_empty(streams, length, sizes.features)
        padded_length = triton.cdiv(length, kernels.ROWS.value) * kernels.ROWS.value
        log_sums = own.new_empty(streams, heads, padded_length, dtype=torch.float32)
        launch, kinds = _launch(FORWARD, sizes), {**sizes.constants, "same_length": scoring.same_length}
        numbers = (*sizes.runtime, scoring.scale * math.log2(math.e))
        kernels.attention_forward[(triton.cdiv(length, launch["block_queries"]), streams * heads)](
            projected, scores, scoring.filled, mixed, log_sums, *numbers, **kinds, **launch
        )
        ctx.save_for_backward(own, remembered, weight, distances, projected, scores, mixed, log_sums, scoring.filled)
        ctx.sizes, ctx.scale, ctx.same_length = sizes, scoring.scale, scoring.same_length
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mixed: Tensor) -> tuple[Tensor | None, ...]:
        own, remembered, weight, distances, *made, filled = ctx.saved_tensors
        sizes, features = ctx.sizes, ctx.sizes.features
        scoring = Scoring(filled, ctx.same_length, ctx.scale)
        with torch.autocast(own.device.type, enabled=False):
            grad_projected, grad_scores, grad_bias = _backward(grad_mixed.contiguous(), made, distances, sizes, scoring)
            of_own, of_memory = sizes.parts(grad_projected)
            grad_distances = torch.bmm(grad_scores.mT, sizes.query_heads(sizes.parts(made[0])[0]))  # (H, W, P)
            grad_weight = of_own.T @ own  # (3 · H · P, d)
            grad_weight[features:].addmm_(of_memory.T, remembered)
            grad_own, grad_remembered = None, None
            if ctx.needs_input_grad[0]:
                grad_own = (of_own @ weight).unflatten(0, (sizes.streams, sizes.queries))
            if ctx.needs_input_grad[1]:
                grad_remembered = (of_memory @ weight[features:]).unflatten(0, (sizes.streams, sizes.remembered))
        return grad_own, grad_remembered, grad_weight, grad_bias, grad_distances.transpose(0, 1), None


def _backward(
    grad_mixed: Tensor, made: Sequence[Tensor], distances: Tensor, sizes: Sizes, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of projections and scores by distance, in the same layouts, and of the bias, (3 · H · P,).

    ``made`` are projections, scores by distance, what the heads read, and the log-sums of the scores.
    """
    projected, scores, mixed, log_sums = made
    grad_projected, grad_scores = torch.empty_like(projected), torch.empty_like(scores)
    overlaps, pairs = torch.empty_like(log_sums), sizes.streams * sizes.heads
    runtime, constants = sizes.runtime, sizes.constants
    kernels.attention_prepare[(overlaps.shape[2] // PREPARE["block_queries"], pairs)](
        mixed, grad_mixed, overlaps, grad_scores, *runtime, **constants, **PREPARE
    )
    launch, kinds = _launch(KEY_GRADIENTS, sizes), {**constants, "same_length": scoring.same_length}
    given = (projected, scores, scoring.filled, grad_mixed, log_sums, overlaps)
    numbers = (*runtime, scoring.scale, scoring.scale * math.log2(math.e))
    kernels.attention_key_gradients[(triton.cdiv(sizes.remembered + sizes.queries, launch["block_keys"]), pairs)](
        *given, grad_projected, grad_scores, *numbers, **kinds, **launch
    )
    launch = _launch(QUERY_GRADIENTS, sizes)
    blocks = triton.cdiv(sizes.queries, launch["block_queries"])
    sums = log_sums.new_empty(sizes.streams * blocks, sizes.features)
    kernels.attention_query_gradients[(blocks, pairs)](
        projected, distances, grad_scores, grad_projected, sums, *runtime, **constants, **launch
    )
    grad_bias = projected.new_zeros(1, 3 * sizes.features)
    sum_rows(sums[None], grad_bias[:, : sizes.features])
    return grad_projected, grad_scores, grad_bias[0]
