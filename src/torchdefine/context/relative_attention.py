"""Attention over the positions up to one's own, with scores that depend on how far away each of them is.

score(i, j) = (qᵢ + u) · kⱼ + (qᵢ + v) · r(i - j), both parts over √head_dim: u asks what a position holds, v how far
back it lies. The second part is one matrix product with the vectors of all distances. Its result has a row for each
query and a column for each distance; read with rows one shorter than they are, it has a column for each key.

Our own kernels read it in place like that (`torchdefine.ops.relative_attention`). They take one kind of query, q + u;
the rest, (v - u) · r(i - j), is a feature of the distances that is multiplied by 1.

Elsewhere it is copied once, to rows at aligned addresses, and becomes the additive bias of torch's fused attention. A
mask is not added to it, which would copy it again: heads are padded to an aligned width anyway, and the first spare
feature is 1 in every query and ``BLOCKED`` in the keys and distances that no query may see.

Letters: B streams, T queries, M remembered positions, K = M + T keys, H heads, P padded head width, W distances.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchdefine.ops import Scoring, padded_inward, padded_outward, relative_attention

BLOCKED = -3e4
"""A score so low that its probability is zero in any precision; float16 can still hold it."""
ALIGNMENT = 16
"""Rows whose length is a multiple of this are read fast, and fused attention takes a bias of such rows as it is."""
HEAD_MULTIPLE = 8
BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The backends that give a gradient for the bias."""


class ScoreLayout(NamedTuple):
    """Where scores by distance lie, so that they can be read by key.

    A query's row holds ``width`` distances, falling from left to right: column c is for K - 1 - c. Query i finds key j
    in column T - 1 - i + j, one to the left of where query i - 1 finds it.
    """

    queries: int
    keys: int

    @property
    def width(self) -> int:
        return round_up(self.keys + max(self.queries - 1, 1), ALIGNMENT)

    def distances(self, device: torch.device) -> Tensor:
        """How far back each column lies, (W,); negative for positions yet to come."""
        return torch.arange(self.keys - 1, self.keys - 1 - self.width, -1, device=device)

    def by_key(self, scores: Tensor) -> Tensor:
        """(H, B, T, W) by distance, contiguous → a view (B, H, T, K) by key."""
        in_one_row = scores.flatten(2)[..., self.queries - 1 : self.queries * self.width - 1]
        return in_one_row.unflatten(2, (self.queries, self.width - 1))[..., : self.keys].transpose(0, 1)


class _ByKey(torch.autograd.Function):
    """``ScoreLayout.by_key``, copied to aligned rows; torch itself would move the gradient twice."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, layout: ScoreLayout) -> Tensor:
        ctx.shape, ctx.layout = scores.shape, layout
        heads, batch = scores.shape[:2]
        aligned = scores.new_empty(batch, heads, layout.queries, round_up(layout.keys, ALIGNMENT))
        by_key = aligned[..., : layout.keys]  # (B, H, T, K)
        by_key.copy_(layout.by_key(scores))
        return by_key

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        by_distance = gradient.new_zeros(ctx.shape)  # (H, B, T, W)
        ctx.layout.by_key(by_distance).copy_(gradient)
        return by_distance, None


class Surroundings(NamedTuple):
    """What all layers of a model have in common in one segment, in the dtype that attention computes in.

    Distances ahead or out of reach, and memory that nothing was written to yet, have a non-zero spare feature.
    """

    layout: ScoreLayout
    distance_vectors: Tensor  # (W, d): one for each column of the layout
    blocked_distances: Tensor  # (W, 1, P): zero but for the spare feature
    blocked_keys: Tensor  # (K, 1, P): the same
    content_bias: Tensor  # (H, P): u, with a 1 in the spare feature
    distance_bias: Tensor  # (H, P): v / √head_dim, with a 1 in the spare feature


class KernelSurroundings(NamedTuple):
    """The same for our own kernels, which mask by position."""

    distance_vectors: Tensor  # (W, d): one for each of the distances from K - 1 down to 0, and padding
    query_bias: Tensor  # (3 · H · P,): u for the queries, with a 1 in the spare feature; nothing for keys and values
    bias_difference: Tensor  # (H, head_dim): v - u, in the dtype of the parameters
    scoring: Scoring


class PlainSurroundings(NamedTuple):
    """The same for a step in plain torch operations, whose length may be any even once it is traced."""

    distance_vectors: Tensor  # (K, d): column c is for the distance K - 1 - c
    columns: Tensor  # (T, K): where a query finds the distance to a key; any column for a key that it must not see
    blocked: Tensor  # (T, K): True for keys that lie ahead, out of reach, or in memory not yet written
    content_bias: Tensor  # (H, head_dim): u
    distance_bias: Tensor  # (H, head_dim): v


class RelativeAttention(nn.Module):
    """(B, T, d) positions that ask and (B, M, d) remembered ones → (B, T, d)."""

    fused = False
    """Set by the model."""

    def __init__(self, dim: int, heads: int, head_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dropout = heads, head_dim, dropout
        self.spare = padded_width(head_dim) - head_dim
        self.inward = nn.Linear(dim, 4 * heads * head_dim, bias=False)
        """To queries, keys, values and distances: one weight, so that it is padded in one go."""
        self.outward = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(
        self, own: Tensor, remembered: Tensor, around: Surroundings | KernelSurroundings | PlainSurroundings
    ) -> Tensor:
        dtype = around.distance_vectors.dtype
        own, remembered = own.to(dtype), remembered.to(dtype)
        if isinstance(around, KernelSurroundings):
            with torch.cuda.device_of(own):  # kernels start on the current device
                return self._by_our_kernels(own, remembered, around)
        seen = torch.cat((remembered, own), dim=1)  # (B, K, d)
        if isinstance(around, PlainSurroundings):
            return self._by_plain_products(own, seen, around)
        return self._by_fused_attention(own, seen, around)

    def _by_our_kernels(self, own: Tensor, remembered: Tensor, around: KernelSurroundings) -> Tensor:
        width = self.head_dim + self.spare
        inward, to_distances = padded_inward(self.inward.weight, around.bias_difference, width, own.dtype)
        distances = self._heads(F.linear(around.distance_vectors, to_distances))  # (W, H, P)
        mixed = relative_attention(own, remembered, inward, around.query_bias, distances, around.scoring)
        return F.linear(mixed, padded_outward(self.outward.weight, self.heads, width, own.dtype))  # (B, T, d)

    def _by_fused_attention(self, own: Tensor, seen: Tensor, around: Surroundings) -> Tensor:
        scale = self.head_dim**-0.5
        queries, keys, values, distances = self._inward(own, seen, around.distance_vectors)
        bias = distance_scores(
            torch.add(around.distance_bias, queries, alpha=scale), distances + around.blocked_distances, around.layout
        )  # (B, H, T, K)
        with sdpa_kernel(BACKENDS):
            mixed = F.scaled_dot_product_attention(
                (queries + around.content_bias).transpose(1, 2),
                (keys + around.blocked_keys).transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=bias,
                dropout_p=self.dropout if self.training else 0.0,
                scale=scale,
            ).transpose(1, 2)  # (B, T, H, P)
        if not self.fused:
            return self.outward(mixed[..., : self.head_dim].flatten(2))
        from_heads = F.pad(self.outward.weight.unflatten(1, (self.heads, -1)), (0, self.spare))
        return F.linear(mixed.flatten(2), from_heads.flatten(1).to(mixed.dtype))  # (B, T, d)

    def _by_plain_products(self, own: Tensor, seen: Tensor, around: PlainSurroundings) -> Tensor:
        def by_head(x: Tensor, weight: Tensor) -> Tensor:
            return F.linear(x, weight).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, D)

        to_queries, to_keys, to_values, to_distances = self.inward.weight.chunk(4)
        queries, keys, values = by_head(own, to_queries), by_head(seen, to_keys), by_head(seen, to_values)
        distances = by_head(around.distance_vectors[None], to_distances)  # (1, H, K, D)
        by_content = (queries + around.content_bias[:, None]) @ keys.transpose(2, 3)  # (B, H, T, K)
        by_distance = (queries + around.distance_bias[:, None]) @ distances.transpose(2, 3)
        scores = by_content + by_distance.gather(3, around.columns.expand_as(by_distance))  # (B, H, T, K)
        scores = (scores * self.head_dim**-0.5).masked_fill(around.blocked, -torch.inf)
        mixed = scores.softmax(-1).to(values.dtype) @ values  # (B, H, T, D)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.outward.weight)  # (B, T, d)

    def _inward(self, own: Tensor, seen: Tensor, distance_vectors: Tensor) -> tuple[Tensor, ...]:
        """Queries (B, T, H, P), keys and values (B, K, H, P) each, distances (W, H, P)."""
        if not self.fused:  # a layer may do more than multiply, so everything goes through it whole
            by_head = (self.inward(x).unflatten(-1, (-1, self.head_dim)) for x in (seen, distance_vectors))
            of_seen, of_distances = (F.pad(x, (0, self.spare)).chunk(4, dim=-2) for x in by_head)
            return of_seen[0][:, seen.shape[1] - own.shape[1] :], of_seen[1], of_seen[2], of_distances[3]
        # Weights are padded rather than their outputs, which are larger.
        weight = self.inward.weight.to(seen.dtype).unflatten(0, (4 * self.heads, self.head_dim))
        parts = F.pad(weight, (0, 0, 0, self.spare)).split((self.heads, 2 * self.heads, self.heads))  # (…, P, d)
        to_queries, to_keys_and_values, to_distances = (part.flatten(0, 1) for part in parts)
        keys, values = self._heads(F.linear(seen, to_keys_and_values)).chunk(2, dim=2)
        queries, distances = F.linear(own, to_queries), F.linear(distance_vectors, to_distances)
        return self._heads(queries), keys, values, self._heads(distances)

    def _heads(self, x: Tensor) -> Tensor:
        """(…, heads · P) → (…, heads, P)."""
        return x.unflatten(-1, (-1, self.head_dim + self.spare))


def distance_scores(queries: Tensor, distances: Tensor, layout: ScoreLayout) -> Tensor:
    """The part of the scores that depends on distance: (B, T, H, P) and (W, H, P) → (B, H, T, K)."""
    by_head = queries.permute(2, 0, 1, 3)  # (H, B, T, P)
    scores = by_head.flatten(1, 2) @ distances.permute(1, 2, 0)  # (H, B · T, W)
    return _ByKey.apply(scores.unflatten(1, by_head.shape[1:3]), layout)  # (B, H, T, K)


def padded_width(head_dim: int) -> int:
    """P: at least one feature is spare."""
    return round_up(head_dim + 1, HEAD_MULTIPLE)


def with_one(bias: Tensor) -> Tensor:
    """A bias of all queries with a 1 in the spare feature: (H, head_dim) → (H, P)."""
    head_dim = bias.shape[1]
    return F.pad(F.pad(bias, (0, 1), value=1.0), (0, padded_width(head_dim) - head_dim - 1))


def blocking(out_of_bounds: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """What to add to the heads of keys or distances that no query may see: (K,) → (K, 1, P)."""
    blocked = torch.where(out_of_bounds, BLOCKED, 0.0).to(dtype)
    return F.pad(blocked[:, None, None], (head_dim, padded_width(head_dim) - head_dim - 1))


def sinusoids(distances: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Sines, then cosines, of ``dim / 2`` wave lengths from 2π to 20,000π: (W,) → (W, dim)."""
    exponents = torch.arange(0, dim, 2, device=distances.device, dtype=dtype) / dim
    angles = distances.to(dtype)[:, None] * torch.exp(-math.log(10_000.0) * exponents)  # (W, dim / 2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
