"""Attention whose scores depend on how far away each position is, from a layer's inputs to what its heads read.

score(i, j) = (qᵢ · kⱼ + qᵢ · r(i - j)) · scale. Two matrix products come before the kernels: one makes the segment's
queries, keys and values, the other the memory's keys and values. The memory gets a gradient only if it needs one.

The scores by distance are one product of all queries with the vectors of all distances. The kernels read its rows by
key where they lie, and mask by position. Their gradient comes out in the same layout, ready for the next products.

The kernels want heads of an aligned width. The weights are padded with zeros rather than their outputs, which are
larger, and cast to the dtype of the products in the same copy; torch's own pad would fill, copy and cast in separate
passes, and the gradients would take as many.

Letters: B streams, T queries, M remembered positions, K = M + T keys, H heads, D features of a head, P with padding,
d features of a position, W ≥ K columns of distances: column c is for K - 1 - c.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdefine.ops.dtypes import HALF, exact_dtype
from torchdefine.ops.kernel_gate import Impl, by_kernel, gpu_takes_kernels, kernels_allowed

WIDEST_HEAD = 128


class Scoring(NamedTuple):
    """Which of the keys up to their own queries may see, and the factor of all scores."""

    filled: Tensor
    """(1,): how many of the remembered positions were ever written, the last ones."""
    same_length: bool
    """Whether each query sees M positions, its own among them, rather than all."""
    scale: float


def relative_attention(
    own: Tensor,
    remembered: Tensor,
    weight: Tensor,
    bias: Tensor,
    distances: Tensor,
    scoring: Scoring,
    impl: Impl = "auto",
) -> Tensor:
    """(B, T, d) and (B, M, d) → what the heads of each position read, (B, T, H · P).

    ``weight`` (3 · H · P, d) makes queries, keys and values, and ``distances`` are (W, H, P). Of ``bias`` (3 · H · P,)
    only the queries' third may be other than zero, and gets a gradient. All in one dtype.
    """
    if by_kernel(impl, own):
        from torchdefine.ops.relative_attention_launch import AttentionByKernels

        return AttentionByKernels.apply(own, remembered, weight, bias, distances, scoring)
    (_, heads, width), features = distances.shape, distances[0].numel()
    exact = exact_dtype(own)  # the kernels' precision at every place

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, width)).transpose(1, 2)  # (B, H, …, P)

    queries, *of_own = F.linear(own, weight, bias).chunk(3, dim=-1)
    of_memory = F.linear(remembered, weight[features:]).chunk(2, dim=-1)
    q = by_head(queries)  # (B, H, T, P)
    k, v = (by_head(torch.cat(parts, dim=1)) for parts in zip(of_memory, of_own, strict=True))  # (B, H, K, P)
    by_distance = q @ distances.permute(1, 2, 0)  # (B, H, T, W)
    i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
    column = (q.shape[2] - 1 - i + j).clamp(max=k.shape[2] - 1).expand(*q.shape[:3], -1)
    scores = q.to(exact) @ k.to(exact).mT + by_distance.gather(3, column).to(exact)  # (B, H, T, K)
    hidden = ~visible(q.shape[2], remembered.shape[1], scoring)
    probabilities = (scores * scoring.scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return (probabilities.to(v.dtype).to(exact) @ v.to(exact)).to(v.dtype).transpose(1, 2).flatten(2)


def has_attention_kernel(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether kernels handle heads of ``width``, padding included: half precision on a newer GPU."""
    fits = device.type == "cuda" and dtype in HALF and width <= WIDEST_HEAD and width % 8 == 0
    return fits and kernels_allowed() and gpu_takes_kernels(device)


def visible(queries: int, remembered: int, scoring: Scoring) -> Tensor:
    """Which query may see which key, (T, K)."""
    device = scoring.filled.device
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(remembered + queries, device=device)
    seen = (j <= remembered + i) & (j >= remembered - scoring.filled)
    return seen & (j > i) if scoring.same_length else seen


def padded_inward(
    weight: Tensor, difference: Tensor, width: int, dtype: torch.dtype, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """(4 · H · D, d) → (3 · H · P, d) to queries, keys and values, and (H · P, d) to distances.

    The first spare feature of a distance is the product of the others with ``difference`` (H, D).
    """
    if by_kernel(impl, weight):
        from torchdefine.ops.padding_kernels import PaddedInward

        return PaddedInward.apply(weight, difference, width, dtype)
    heads, head_dim = difference.shape
    by_head = weight.unflatten(0, (4, heads, head_dim))
    padded = weight.new_zeros(4, heads, width, weight.shape[1], dtype=dtype)
    padded[:, :, :head_dim] = by_head
    padded[3, :, head_dim] = (difference[:, :, None] * by_head[3]).sum(1)
    return padded[:3].flatten(0, 2), padded[3].flatten(0, 1)


def padded_outward(weight: Tensor, heads: int, width: int, dtype: torch.dtype, impl: Impl = "auto") -> Tensor:
    """(d, H · D) → (d, H · P)."""
    if by_kernel(impl, weight):
        from torchdefine.ops.padding_kernels import PaddedOutward

        return PaddedOutward.apply(weight, heads, width, dtype)
    by_head = weight.unflatten(1, (heads, -1)).to(dtype)  # (d, H, D)
    return F.pad(by_head, (0, width - by_head.shape[2])).flatten(1)
