"""cuDNN's LSTM with weights that are made anew for every call, such as dropped ones.

torch copies such weights twice: autocast casts them into a buffer, and weights that are not one piece of memory are
packed into another. Here they are cast and packed in one copy each, and their gradients come back unpacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchdefine.ops.dtypes import product_dtype

LSTM_MODE = 2  # cuDNN's number for it


def cudnn_lstm(x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """One layer over (T, B, input) from the state h, c (1, B, output): all outputs and the state after the last.

    ``weights`` are weight_ih, weight_hh, bias_ih and bias_hh, of any dtype; the arithmetic is that of autocast.
    """
    dtype = product_dtype(x)
    outputs: tuple[Tensor, Tensor, Tensor] = _PackedLSTM.apply(x.to(dtype), h.to(dtype), c.to(dtype), *weights)
    return outputs


class _PackedLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.contiguous()
        flat, views = _packed(x, weights)
        options = _options(h.shape[-1])
        with torch.autocast("cuda", enabled=False):  # it would pack the weights a second time
            y, after_h, after_c, reserve, _ = torch.ops.aten._cudnn_rnn(x, views, 4, flat, h, c, *options, [], None)
        ctx.save_for_backward(x, flat, h, c, y, reserve)
        ctx.dtypes = [weight.dtype for weight in weights]
        ctx.mark_non_differentiable(after_h, after_c)
        return y, after_h, after_c

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, flat, h, c, y, reserve = ctx.saved_tensors
        views = _views(flat, x.shape[-1], h.shape[-1])
        with torch.autocast("cuda", enabled=False):
            grad_x, _, _, grad_weights = torch.ops.aten._cudnn_rnn_backward(
                x,
                views,
                4,
                flat,
                h,
                c,
                y,
                grad_y.contiguous(),
                None,
                None,
                *_options(h.shape[-1]),
                [],
                None,
                reserve,
                [ctx.needs_input_grad[0], False, False, True],
            )
        cast = [grad.to(dtype) for grad, dtype in zip(grad_weights, ctx.dtypes, strict=True)]
        return (grad_x if ctx.needs_input_grad[0] else None, None, None, *cast)


def _options(hidden_dim: int) -> tuple[int, int, int, int, bool, float, bool, bool]:
    """Mode, hidden and projected width, layers, batch first, dropout, training, both directions."""
    return LSTM_MODE, hidden_dim, 0, 1, False, 0.0, True, False


def _packed(like: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The weights in one piece of memory, in the dtype of ``like``, and a view of each of them in it."""
    input_dim, hidden_dim = like.shape[-1], weights[1].shape[-1]
    size, _ = _layout(input_dim, hidden_dim, like.dtype, like.device)
    flat = like.new_empty(size)
    views = _views(flat, input_dim, hidden_dim)
    for view, weight in zip(views, weights, strict=True):
        view.copy_(weight)
    return flat, views


def _views(flat: Tensor, input_dim: int, hidden_dim: int) -> list[Tensor]:
    _, offsets = _layout(input_dim, hidden_dim, flat.dtype, flat.device)
    shapes = _shapes(input_dim, hidden_dim)
    return [flat[offset : offset + shape.numel()].view(shape) for offset, shape in zip(offsets, shapes, strict=True)]


def _shapes(input_dim: int, hidden_dim: int) -> list[torch.Size]:
    gates = 4 * hidden_dim
    return [torch.Size(s) for s in ((gates, input_dim), (gates, hidden_dim), (gates,), (gates,))]


@lru_cache(maxsize=64)
def _layout(input_dim: int, hidden_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[int, tuple[int, ...]]:
    """The size of cuDNN's piece of memory, and where each weight starts in it; cuDNN is asked once for each shape."""
    weights = [torch.empty(shape, dtype=dtype, device=device) for shape in _shapes(input_dim, hidden_dim)]
    flat = torch._cudnn_rnn_flatten_weight(weights, 4, input_dim, LSTM_MODE, hidden_dim, 0, 1, False, False)
    return flat.numel(), tuple(int(weight.storage_offset()) for weight in weights)
