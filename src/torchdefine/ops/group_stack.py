"""A stack of group-linear layers with norms and activations between them as one operation: the unit of DeFINE.

torch goes from one batched product to the next in a dozen passes: transpose, bias, norm, activation, split, join,
conversion. Here each such seam is one pass, which reads the outputs of a product where they lie, group by group, and
writes the inputs of the next one as it wants them. Chunks that tensor cores would not take are filled up with zeros.

The same exists in plain torch, with the same numbers up to rounding.
Letters: T tokens, n features of the input, which skip connections lead to every layer, g groups, a and w features of a
group that enter and leave.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchdefine.ops.dtypes import exact_dtype
from torchdefine.ops.kernel_gate import Impl, by_kernel

ALIGNED = 8
"""Tensor cores need rows of a multiple of this many two-byte features."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "none": lambda x: x,
}


class StackLayer(NamedTuple):
    """One layer; ``bias`` and norm are those between its product and the next one, so the last layer has none."""

    weight: Tensor  # (g, a, w)
    bias: Tensor | None = None  # (g · w,)
    norm: tuple[Tensor, Tensor] | None = None  # weight and bias, (g · w,) each


class StackForm(NamedTuple):
    """Everything about a stack except its weights."""

    skipped: int
    """n, or 0 without skip connections."""
    mixed: bool
    """Whether every group has its part of the input; else the whole input stands before the previous output."""
    activation: str
    eps: float


class Seam(NamedTuple):
    """From outputs (g, T, room) of a product, ``chunk`` of them real, to inputs (g', T, next_room) of the next."""

    groups: int
    chunk: int
    room: int
    next_groups: int
    next_chunk: int
    next_room: int
    form: StackForm

    @property
    def width(self) -> int:
        return self.groups * self.chunk


Finish = Sequence[Tensor | None]
"""The bias of a product, and weight and bias of the norm behind it."""


def group_stack(
    x: Tensor, layers: Sequence[StackLayer], form: StackForm, dtype: torch.dtype, impl: Impl = "auto"
) -> Tensor:
    """(…, n) → (…, g · w of the last layer), with products in ``dtype``, everything else in full precision."""
    if by_kernel(impl, x):
        weights = [layer.weight for layer in layers]
        finishing: list[Tensor | None] = []
        for layer in layers[:-1]:
            finishing += [layer.bias, *(layer.norm or (None, None))]
        return _ByKernels.apply(x, len(layers), form, dtype, *weights, *finishing)
    exact, rows = exact_dtype(x), x.reshape(-1, x.shape[-1])  # (T, n)
    output = rows
    for index, (weight, bias, norm) in enumerate(layers):
        parts = [part.to(dtype) for part in ((rows, output) if index and form.skipped else (output,))]
        if form.mixed:
            entering = torch.cat([part.unflatten(1, (len(weight), -1)) for part in parts], -1)  # (T, g, a)
        else:
            entering = torch.cat(parts, -1).unflatten(1, (len(weight), -1))  # (T, g, a)
        output = torch.bmm(entering.transpose(0, 1), weight.to(dtype)).transpose(0, 1).flatten(1)  # (T, g · w)
        if index < len(layers) - 1:
            total = output.to(exact) if bias is None else output.to(exact) + bias
            normed = total if norm is None else F.layer_norm(total, total.shape[1:], *norm, form.eps)
            output = ACTIVATIONS[form.activation](normed)
    return output.view(*x.shape[:-1], output.shape[1])


class _ByKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, form: StackForm, dtype: torch.dtype, *parameters: Any) -> Tensor:
        from torchdefine.ops.group_stack_kernels import forward_seam

        weights, finishing = parameters[:depth], parameters[depth:]
        rows = x.reshape(-1, x.shape[-1]).contiguous()  # (T, n)
        padded = [_filled_up(weight, dtype) for weight in weights]
        entering = _split(rows.to(dtype), weights[0].shape[0], padded[0].shape[1])  # (g, T, a)
        kept: list[Tensor] = []
        seams: list[Seam] = []
        for index, (one, other) in enumerate(itertools.pairwise(weights)):
            (groups, _, chunk), (next_groups, next_chunk, _) = one.shape, other.shape
            seam = Seam(groups, chunk, _aligned(chunk), next_groups, next_chunk, _aligned(next_chunk), form)
            leaving = torch.bmm(entering, padded[index])  # (g, T, w)
            following, *statistics = forward_seam(leaving, finishing[3 * index : 3 * index + 3], rows, seam)
            kept += [entering, leaving, *statistics]
            entering = following
            seams.append(seam)
        leaving = torch.bmm(entering, padded[-1])
        ctx.save_for_backward(*kept, entering, *padded, *finishing)
        ctx.seams, ctx.form, ctx.shape, ctx.dtype = seams, form, x.shape, x.dtype
        ctx.weights = [(weight.shape, weight.dtype) for weight in weights]
        output = _joined(leaving, weights[-1].shape[2])
        return output.view(*x.shape[:-1], output.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from torchdefine.ops.group_stack_kernels import backward_seam

        seams, depth = ctx.seams, len(ctx.weights)
        saved = ctx.saved_tensors  # a checkpoint gives them once
        kept, rest = saved[: 4 * len(seams)], saved[4 * len(seams) :]
        entering, padded, finishing = rest[0], rest[1 : 1 + depth], rest[1 + depth :]
        tokens = entering.shape[1]
        grad_x = entering.new_empty(tokens, ctx.shape[-1], dtype=torch.float32)
        of_weights: list[Tensor] = []
        of_finishing: list[Tensor | None] = []
        rows = gradient.reshape(tokens, gradient.shape[-1]).to(entering.dtype)
        leaving = _split(rows, padded[-1].shape[0], padded[-1].shape[2])  # (g, T, w)
        for index in reversed(range(depth)):
            shape, dtype = ctx.weights[index]
            of_weight = torch.bmm(entering.mT, leaving)  # (g, a, w)
            of_weights.append(of_weight[:, : shape[1], : shape[2]].to(dtype))
            of_entering = torch.bmm(leaving, padded[index].mT)  # (g, T, a)
            if index == 0:
                break
            finish, fresh = finishing[3 * index - 3 : 3 * index], index == depth - 1
            entering, outputs, *statistics = kept[4 * index - 4 : 4 * index]
            leaving, sums = backward_seam(of_entering, outputs, finish, seams[index - 1], statistics, fresh, grad_x)
            totals = zip(finish, sums, strict=True)
            of_finishing[:0] = [None if given is None else total.to(given.dtype) for given, total in totals]
        first = _joined(of_entering, ctx.shape[-1] // ctx.weights[0][0][0])
        summed = first if not (seams and ctx.form.skipped) else grad_x.add_(first)
        return summed.to(ctx.dtype).view(ctx.shape), None, None, None, *of_weights[::-1], *of_finishing


def _aligned(features: int) -> int:
    return -(-features // ALIGNED) * ALIGNED


def _filled_up(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(g, a, w) → the same in ``dtype``, with rows and columns of zeros where it is not aligned."""
    groups, entering, leaving = weight.shape
    if entering % ALIGNED == 0 and leaving % ALIGNED == 0:
        return weight.to(dtype)
    filled = weight.new_zeros(groups, _aligned(entering), _aligned(leaving), dtype=dtype)
    filled[:, :entering, :leaving] = weight
    return filled


def _split(rows: Tensor, groups: int, room: int) -> Tensor:
    """(T, features) → (g, T, room); a view where nothing has to be filled up."""
    chunks = rows.unflatten(1, (groups, -1)).transpose(0, 1)
    return F.pad(chunks, (0, room - chunks.shape[2])) if chunks.shape[2] < room else chunks


def _joined(chunks: Tensor, chunk: int) -> Tensor:
    """(g, T, room) → (T, g · chunk)."""
    return chunks[:, :, :chunk].transpose(0, 1).flatten(1)
