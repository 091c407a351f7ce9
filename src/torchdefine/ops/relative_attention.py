"""Attention whose scores depend on how far away each position is, from a layer's inputs to what its heads read.

score(i, j) = (qᵢ · kⱼ + qᵢ · r(i - j)) · scale. Two matrix products come before the kernels: one makes the segment's
queries, keys and values, the other the memory's keys and values. The memory gets a gradient only if it needs one.

The scores by distance are one product of all queries with the vectors of all distances. The kernels read its rows by
key where they lie, and mask by position. Their gradient comes out in the same layout, ready for the next products.

Letters: B streams, T queries, M remembered positions, K = M + T keys, H heads, P padded head width, W ≥ K columns of
distances: column c is for K - 1 - c.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchdefine.ops.dtypes import exact_dtype
from torchdefine.ops.kernel_gate import Impl, gpu_takes_kernels, kernels_allowed

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
    if own.is_cuda if impl == "auto" else impl == "kernel":
        mixed: Tensor = _ByKernels.apply(own, remembered, weight, bias, distances, scoring)
        return mixed
    return attend_plainly(own, remembered, weight, bias, distances, scoring)


def has_attention_kernel(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether kernels handle heads of ``width``, padding included: half precision on a newer GPU."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or width > WIDEST_HEAD or width % 8:
        return False
    return kernels_allowed() and gpu_takes_kernels(device)


def attend_plainly(
    own: Tensor, remembered: Tensor, weight: Tensor, bias: Tensor, distances: Tensor, scoring: Scoring
) -> Tensor:
    """The same in plain torch, with the kernels' precision at every place."""
    (_, heads, width), features = distances.shape, distances[0].numel()
    exact = exact_dtype(own)

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
    shares = (scores * scoring.scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return (shares.to(v.dtype).to(exact) @ v.to(exact)).to(v.dtype).transpose(1, 2).flatten(2)


def visible(queries: int, remembered: int, scoring: Scoring) -> Tensor:
    """Which query may see which key, (T, K)."""
    device = scoring.filled.device
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(remembered + queries, device=device)
    seen = (j <= remembered + i) & (j >= remembered - scoring.filled)
    return seen & (j > i) if scoring.same_length else seen


class _ByKernels(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, remembered: Tensor, weight: Tensor, bias: Tensor, distances: Tensor, scoring: Scoring
    ) -> Tensor:
        from torchdefine.ops import attention_launch

        (streams, length, _), memory = own.shape, remembered.shape[1]
        columns, heads, width = distances.shape
        sizes = attention_launch.Sizes(streams, length, memory, heads, width, columns)
        distances = distances.contiguous()
        with torch.autocast(own.device.type, enabled=False):  # the dtype is already chosen
            own, remembered = own.reshape(streams * length, -1), remembered.reshape(streams * memory, -1)
            projected = own.new_empty(3 * len(own) * sizes.features + 2 * len(remembered) * sizes.features)
            of_own, of_memory = _parts(projected, len(own), sizes.features)
            torch.addmm(bias, own, weight.T, out=of_own)
            torch.mm(remembered, weight[sizes.features :].T, out=of_memory)
            scores = attention_launch.distance_scores(_queries(of_own, heads, width), distances)  # (H, B · T, W)
            mixed, log_sums = attention_launch.forward(
                projected, scores, scoring.filled, sizes, scoring.scale, scoring.same_length
            )
        ctx.save_for_backward(own, remembered, weight, distances, projected, scores, mixed, log_sums, scoring.filled)
        ctx.sizes, ctx.scale, ctx.same_length = sizes, scoring.scale, scoring.same_length
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mixed: Tensor) -> tuple[Tensor | None, ...]:
        from torchdefine.ops import attention_launch

        own, remembered, weight, distances, *made, filled = ctx.saved_tensors
        sizes, features = ctx.sizes, ctx.sizes.features
        with torch.autocast(own.device.type, enabled=False):
            grad_projected, grad_scores, grad_bias = attention_launch.backward(
                grad_mixed.contiguous(), tuple(made), distances, filled, sizes, ctx.scale, ctx.same_length
            )
            of_own, of_memory = _parts(grad_projected, len(own), features)
            queries = _queries(_parts(made[0], len(own), features)[0], sizes.heads, sizes.width)
            grad_distances = torch.bmm(grad_scores.mT, queries)  # (H, W, P)
            grad_weight = of_own.T @ own  # (3 · H · P, d)
            grad_weight[features:].addmm_(of_memory.T, remembered)
            grad_own, grad_remembered = None, None
            if ctx.needs_input_grad[0]:
                grad_own = (of_own @ weight).view(sizes.streams, sizes.queries, -1)
            if ctx.needs_input_grad[1]:
                grad_remembered = (of_memory @ weight[features:]).view(sizes.streams, sizes.remembered, -1)
        return grad_own, grad_remembered, grad_weight, grad_bias, grad_distances.transpose(0, 1), None


def _parts(projected: Tensor, rows: int, features: int) -> tuple[Tensor, Tensor]:
    """The segments' rows (B · T, 3 · H · P), and the memories' (B · M, 2 · H · P)."""
    own = rows * 3 * features
    return projected[:own].view(rows, 3 * features), projected[own:].view(-1, 2 * features)


def _queries(of_own: Tensor, heads: int, width: int) -> Tensor:
    """(B · T, 3 · H · P) → (H, B · T, P), a view that matrix products take as it is."""
    return of_own[:, : heads * width].view(-1, heads, width).transpose(0, 1)
