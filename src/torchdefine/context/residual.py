"""The operations between the products of a Transformer: residual sums, norms, dropout, ReLU and biases.

On a GPU in half precision all of it runs as a few kernels in a model that was prepared, else in plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.ops import has_fused_kernels, relu_dropout, residual_norm

DenseWeights = tuple[Tensor, Tensor]
"""The weights of two linear layers in the dtype of the products."""


class Stream(NamedTuple):
    """Vectors between two parts of a network, (…, d) each."""

    past: Tensor  # the residual stream, which bypasses the next part, in full precision
    read: Tensor  # what that part reads: the same, or its norm, maybe in the dtype of the products already


class Update(NamedTuple):
    """What a part adds to the stream."""

    values: Tensor  # (…, d)
    bias: Tensor | None = None  # (d,), not yet added to the values; it is added together with them to the stream

    def whole(self) -> Tensor:
        return self.values if self.bias is None else self.values + self.bias


def closing(x: Tensor, linear: nn.Linear, fused: bool, weight: Tensor | None = None) -> Update:
    """The linear layer at the end of a part; ``weight`` is its own in the dtype of the products, if there is one."""
    if fused and has_fused_kernels(x):
        return Update(F.linear(x, linear.weight if weight is None else weight), linear.bias)
    return Update(linear(x))


def feed_forward(
    x: Tensor, expand: nn.Linear, reduce: nn.Linear, dropout: float, fused: bool, weights: DenseWeights | None = None
) -> Update:
    """Two linear layers with ReLU and dropout between them; ``weights`` as in ``closing``."""
    first, second = weights or (expand.weight, None)
    if fused and has_fused_kernels(x):
        hidden = relu_dropout(F.linear(x, first), dropout, expand.bias)
    else:
        hidden = F.dropout(F.relu(expand(x)), dropout)
    return closing(hidden, reduce, fused, second)


def add_and_norm(past: Tensor, update: Update, norm: nn.LayerNorm, dropout: float, fused: bool, pre: bool) -> Stream:
    """The norm of the sum, for both fields of the stream; with ``pre``, the sum bypasses the next part."""
    if fused and has_fused_kernels(past):
        return Stream(*residual_norm(past, update.values, norm, dropout, pre=pre, update_bias=update.bias))
    total = past + F.dropout(update.whole(), dropout)
    normed = norm(total)
    return Stream(total if pre else normed, normed)
