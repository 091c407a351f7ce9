"""Attention over the positions up to one's own, with scores that know how far away each of them is.

score(i, j) = (qᵢ + u) · kⱼ + (qᵢ + v) · r(i - j), both parts over √head_dim: u asks what a position holds, v how far
back it lies. The second part is one matrix product with the vectors of all distances. Its result has a row for each
query and a column for each distance; read with rows one shorter than they are, it has a column for each key. So it
becomes the additive bias of torch's fused attention as it lies, neither shifted nor copied.

No mask is added to it either, which would copy it: heads are padded to a width that the kernels like anyway, and the
first spare feature is 1 in every query and ``BLOCKED`` in the keys and distances that nobody may see.

Letters: B streams, T queries, M remembered positions, K = M + T keys, H heads, P padded head width, W distances.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchdefine.errors import UserError

BLOCKED = -3e4
"""A score from which no probability is left in any precision; float16 still holds it."""
ALIGNMENT = 16
"""Fused kernels take a bias as it lies only if its start and strides are multiples of this; else they copy it."""
HEAD_MULTIPLE = 8
BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Those that give a gradient for the bias."""


class ScoreLayout(NamedTuple):
    """Where scores by distance lie, so that they can be read by key.

    A query's row holds ``width`` distances, falling from left to right: column c is for K - T + offset - c. Query i
    finds key j in column offset - i + j, one to the left of where query i - 1 finds it.
    """

    queries: int
    keys: int
    rows: int
    """Queries and padding."""
    width: int
    offset: int

    @classmethod
    def of(cls, queries: int, keys: int) -> Self:
        offset = _round_up(queries - 1, ALIGNMENT)
        read_width = _round_up(max(offset + keys - 1, keys), ALIGNMENT)
        return cls(queries, keys, _round_up(queries, ALIGNMENT), read_width + 1, offset)

    def distances(self, device: torch.device) -> Tensor:
        """How far back each column lies, (W,); negative for positions yet to come."""
        farthest = self.keys - self.queries + self.offset
        return torch.arange(farthest, farthest - self.width, -1, device=device)

    def by_key(self, scores: Tensor) -> Tensor:
        """(H, B, rows, W) by distance, contiguous → a view (B, H, T, K) by key."""
        in_one_row = scores.flatten(2)[..., self.offset : self.offset + self.queries * (self.width - 1)]
        return in_one_row.unflatten(2, (self.queries, self.width - 1))[..., : self.keys].transpose(0, 1)


class _ByKey(torch.autograd.Function):
    """``ScoreLayout.by_key``, whose gradient torch would otherwise move twice."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, layout: ScoreLayout) -> Tensor:
        ctx.shape, ctx.layout = scores.shape, layout
        return layout.by_key(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        by_distance = gradient.new_zeros(ctx.shape)  # (H, B, rows, W)
        ctx.layout.by_key(by_distance).copy_(gradient)
        return by_distance, None


class Surroundings(NamedTuple):
    """What every layer needs to know of a segment's positions."""

    layout: ScoreLayout
    distance_vectors: Tensor
    """(W, d): one for each column of the layout."""
    blocked_distances: Tensor
    """(W,): 0, or ``BLOCKED`` for what lies ahead or out of reach."""
    blocked_keys: Tensor
    """(K,): 0, or ``BLOCKED`` for a part of the memory that nothing was written to yet."""


class RelativeAttention(nn.Module):
    """(B, T, d) queries over (B, K, d) positions, the last T of which are the queries' own → (B, T, d)."""

    def __init__(self, dim: int, heads: int, head_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("heads", heads), ("head_dim", head_dim)):
            if value < 1:
                raise UserError(f"The {name} of an attention layer is {value}, but must be at least 1.")
        self.heads, self.head_dim, self.dropout = heads, head_dim, dropout
        self.padded_dim = _round_up(head_dim + 1, HEAD_MULTIPLE)
        self.query = nn.Linear(dim, heads * head_dim, bias=False)
        self.key = nn.Linear(dim, heads * head_dim, bias=False)
        self.value = nn.Linear(dim, heads * head_dim, bias=False)
        self.distance = nn.Linear(dim, heads * head_dim, bias=False)
        self.output = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(
        self, x: Tensor, seen: Tensor, around: Surroundings, content_bias: Tensor, distance_bias: Tensor
    ) -> Tensor:
        """``content_bias`` and ``distance_bias`` are u and v, (H, head_dim)."""
        scale = self.head_dim**-0.5
        queries = self._heads_of(x, self.query.weight)  # (B, T, H, P)
        about_content = queries + self._asking(content_bias, queries)  # (B, T, H, P)
        about_distance = queries * scale + self._asking(distance_bias * scale, queries)  # (B, T, H, P)
        keys, values = self._keys_and_values(seen, around)  # (B, K, H, P) each
        bias = self._distance_scores(about_distance, around)  # (B, H, T, K)
        with sdpa_kernel(BACKENDS):
            mixed = F.scaled_dot_product_attention(
                about_content.transpose(1, 2),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=bias,
                dropout_p=self.dropout if self.training else 0.0,
                scale=scale,
            )  # (B, H, T, P)
        return self.output(mixed[..., : self.head_dim].transpose(1, 2).flatten(2))  # (B, T, d)

    def _keys_and_values(self, seen: Tensor, around: Surroundings) -> tuple[Tensor, Tensor]:
        weight = torch.cat((self.key.weight, self.value.weight))  # (2 · H · head_dim, d)
        keys, values = self._heads_of(seen, weight).chunk(2, dim=2)  # (B, K, H, P) each
        return keys + self._spare_feature(around.blocked_keys, keys), values

    def _distance_scores(self, about_distance: Tensor, around: Surroundings) -> Tensor:
        layout = around.layout
        vectors = self._heads_of(around.distance_vectors, self.distance.weight)  # (W, H, P)
        vectors = vectors + self._spare_feature(around.blocked_distances, vectors)
        padding = (0, 0, 0, 0, 0, layout.rows - layout.queries)
        queries = F.pad(about_distance, padding).permute(2, 0, 1, 3)  # (H, B, rows, P)
        scores = queries.flatten(1, 2) @ vectors.permute(1, 2, 0)  # (H, B · rows, W)
        by_key: Tensor = _ByKey.apply(scores.unflatten(1, queries.shape[1:3]), layout)  # (B, H, T, K)
        return by_key

    def _heads_of(self, x: Tensor, weight: Tensor) -> Tensor:
        """(…, d) → (…, heads in weight, P): the weight is padded, since it is smaller than what it gives."""
        spare = self.padded_dim - self.head_dim
        padded = F.pad(weight.unflatten(0, (-1, self.head_dim)), (0, 0, 0, spare))  # (H, P, d)
        return F.linear(x, padded.flatten(0, 1)).unflatten(-1, (-1, self.padded_dim))

    def _asking(self, bias: Tensor, like: Tensor) -> Tensor:
        """A bias of all queries with a 1 in the spare feature: (H, head_dim) → (H, P)."""
        rest = self.padded_dim - self.head_dim - 1
        return F.pad(F.pad(bias, (0, 1), value=1.0), (0, rest)).to(like.dtype)

    def _spare_feature(self, values: Tensor, like: Tensor) -> Tensor:
        """(K,) → (K, 1, P), zero in every other feature."""
        rest = self.padded_dim - self.head_dim - 1
        return F.pad(values[:, None, None], (self.head_dim, rest)).to(like.dtype)


def sinusoids(distances: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Sines, then cosines, of ``dim / 2`` wave lengths from 2π to 20,000π: (W,) → (W, dim)."""
    exponents = torch.arange(0, dim, 2, device=distances.device, dtype=dtype) / dim
    angles = distances.to(dtype)[:, None] * torch.exp(-math.log(10_000.0) * exponents)  # (W, dim / 2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
