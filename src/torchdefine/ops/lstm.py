"""One LSTM layer over a segment: by a persistent kernel of our own, by cuDNN or by torch.

cuDNN starts kernels for every position unless the width is a multiple of 128 up to 1024, and then waits on latency
most of the time. In ours, the programs stay on the GPU for all positions and wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from torchdefine.ops.dtypes import HALF, product_dtype
from torchdefine.ops.kernel_gate import kernels_run

UNITS_PER_PROGRAM = 16
PADDED_TO = 128
ROWS_PER_PROGRAM = 128  # at most
MOST_GATES = 2**31 - 1  # kernels index them with 32 bits
LSTM_MODE = 2  # cuDNN's number for it


def lstm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: Sequence[Tensor],
    impl: Literal["auto", "kernel", "cudnn", "torch"] = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(T, B, input) and the state h, c (1, B, output) → all outputs, and the state after the last position.

    ``weights`` are weight_ih, weight_hh, bias_ih and bias_hh, of any dtype; they may be made anew for every call, such
    as dropped ones. The arithmetic is that of autocast; the state is carried, not trained through. "auto" takes our
    persistent kernel where one fits, else cuDNN on a GPU, else torch's own.
    """
    if impl == "auto":
        on_gpu = x.is_cuda and torch.backends.cudnn.is_acceptable(x)
        impl = "kernel" if has_kernel(x, h.shape[-1]) else "cudnn" if on_gpu else "torch"
    if impl == "torch":
        return torch._VF.lstm(x, (h, c), list(weights), True, 1, 0.0, True, False, False)
    dtype = product_dtype(x)
    if impl == "kernel":
        from torchdefine.ops.lstm_kernels import PersistentLSTM

        return PersistentLSTM.apply(x.to(dtype), h.detach(), c.detach(), *weights)
    return _PackedLSTM.apply(x.to(dtype), h.to(dtype), c.to(dtype), *weights)


def has_kernel(x: Tensor, hidden_dim: int) -> bool:
    """Whether ``hidden_dim`` units run as a kernel on inputs (T, B, input): half precision on a newer GPU."""
    if not kernels_run(x) or x.numel() == 0 or product_dtype(x) not in HALF:
        return False
    width = padded(hidden_dim)
    if x.shape[0] * x.shape[1] * 4 * width > MOST_GATES:
        return False
    at_once = torch.cuda.get_device_properties(x.device).multi_processor_count  # this many programs surely run at once
    return width // UNITS_PER_PROGRAM * row_blocks(x.shape[1]) <= at_once


def row_blocks(rows: int) -> int:
    """How many programs share the rows of a batch."""
    return -(-rows // ROWS_PER_PROGRAM)


def padded(hidden_dim: int) -> int:
    return -(-hidden_dim // PADDED_TO) * PADDED_TO


class _PackedLSTM(torch.autograd.Function):
    """cuDNN's LSTM with weights cast and packed in one copy each, and gradients that come back unpacked.

    torch copies weights that are not one piece of memory twice: autocast casts them into a buffer, and packing them
    fills another.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, hidden_dim = x.contiguous(), h.shape[-1]
        size, places = _layout(x.shape[-1], hidden_dim, x.dtype, x.device)
        flat = x.new_empty(size)
        views = _views(flat, places)
        for view, weight in zip(views, weights, strict=True):
            view.copy_(weight)
        with torch.autocast("cuda", enabled=False):  # it would pack the weights a second time
            found = torch.ops.aten._cudnn_rnn(x, views, 4, flat, h, c, *_options(hidden_dim), [], None)
        y, after_h, after_c, reserve, _ = found
        ctx.save_for_backward(x, flat, h, c, y, reserve)
        ctx.dtypes, ctx.places = [weight.dtype for weight in weights], places
        ctx.mark_non_differentiable(after_h, after_c)
        return y, after_h, after_c

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, flat, h, c, y, reserve = ctx.saved_tensors
        given = (x, _views(flat, ctx.places), 4, flat, h, c, y, grad_y.contiguous(), None, None)
        wanted = [ctx.needs_input_grad[0], False, False, True]
        with torch.autocast("cuda", enabled=False):
            grad_x, _, _, grad_weights = torch.ops.aten._cudnn_rnn_backward(
                *given, *_options(h.shape[-1]), [], None, reserve, wanted
            )
        cast = [grad.to(dtype) for grad, dtype in zip(grad_weights, ctx.dtypes, strict=True)]
        return (grad_x if ctx.needs_input_grad[0] else None, None, None, *cast)


def _options(hidden_dim: int) -> tuple[int, int, int, int, bool, float, bool, bool]:
    """Mode, hidden and projected width, layers, batch first, dropout, training, both directions."""
    return LSTM_MODE, hidden_dim, 0, 1, False, 0.0, True, False


def _views(flat: Tensor, places: Sequence[tuple[int, torch.Size]]) -> list[Tensor]:
    return [flat[start : start + shape.numel()].view(shape) for start, shape in places]


@lru_cache(maxsize=64)
def _layout(
    input_dim: int, hidden_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, list[tuple[int, torch.Size]]]:
    """The size of cuDNN's piece of memory, and where each weight starts in it; cuDNN is asked once for each shape."""
    shapes = [(4 * hidden_dim, input_dim), (4 * hidden_dim, hidden_dim), (4 * hidden_dim,), (4 * hidden_dim,)]
    weights = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    flat = torch._cudnn_rnn_flatten_weight(weights, 4, input_dim, LSTM_MODE, hidden_dim, 0, 1, False, False)
    return flat.numel(), [(int(weight.storage_offset()), weight.shape) for weight in weights]
