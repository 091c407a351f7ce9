"""One LSTM layer over a segment: by a persistent kernel of our own, by cuDNN or by torch.

cuDNN starts kernels for every position unless the width is a multiple of 128 up to 1024, and then waits on latency
most of the time. In ours, the programs stay on the GPU for all positions and wait for each other: each keeps sixteen
hidden units for the whole segment; the products with the inputs and all sums for the weights' gradients cover all
positions at once, as large matrix products outside the kernel. Widths are padded with units that stay zero, so that
memory is read in whole lines. The two loops over positions exist twice: as kernels, and in plain torch
(`forward_loop`, `backward_loop`) with the same numbers, which run off the GPU.

Shapes: T positions, B rows, H hidden units, P of them with padding, D inputs; gates in the order i, f, g, o.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchdefine.ops.dtypes import HALF, exact_dtype, product_dtype
from torchdefine.ops.kernel_gate import kernels_run

UNITS_PER_PROGRAM = 16
PADDED_TO = 128
ALIGNED_TO = 8  # inputs too are padded, so that matrix products take their fast kernels
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
    """(T, B, D) and the state h, c (1, B, H) → all outputs, and the state after the last position.

    ``weights`` are weight_ih, weight_hh, bias_ih and bias_hh, of any dtype; they may be made anew for every call, such
    as dropped ones. The arithmetic is that of autocast; the state is carried, not trained through. "auto" takes our
    persistent kernel where one fits, else cuDNN on a GPU, else torch's own.
    """
    if impl == "auto":
        on_gpu = x.is_cuda and torch.backends.cudnn.is_acceptable(x)
        impl = "kernel" if has_kernel(x, h.shape[-1]) else "cudnn" if on_gpu else "torch"
    outputs: tuple[Tensor, Tensor, Tensor]
    if impl == "torch":
        outputs = torch._VF.lstm(x, (h, c), list(weights), True, 1, 0.0, True, False, False)
        return outputs
    dtype = product_dtype(x)
    if impl == "kernel":
        outputs = _PersistentLSTM.apply(x.to(dtype), h.detach(), c.detach(), *weights)
    else:
        outputs = _PackedLSTM.apply(x.to(dtype), h.to(dtype), c.to(dtype), *weights)
    return outputs


def has_kernel(x: Tensor, hidden_dim: int) -> bool:
    """Whether a layer of ``hidden_dim`` units runs as kernels on inputs (T, B, D): half precision on a newer GPU."""
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


class _PersistentLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length, rows, ctx.input_dim = x.shape
        hidden_dim = h.shape[-1]
        width = padded(hidden_dim)
        with torch.autocast(x.device.type, enabled=False):  # the dtype is already chosen
            x = _widened(x, -(-ctx.input_dim // ALIGNED_TO) * ALIGNED_TO).contiguous()
            weight_ih, weight_hh = (weight.to(x.dtype).view(4, hidden_dim, -1) for weight in weights[:2])
            inward = _widened(weight_ih, x.shape[-1], width).reshape(4 * width, -1)  # (4P, D)
            recurrent = _widened(weight_hh, width, width).contiguous()  # (4, P, P)
            bias = _widened((weights[2] + weights[3]).to(x.dtype).view(4, hidden_dim), width).reshape(4 * width)
            from_inputs = torch.addmm(bias, x.view(length * rows, -1), inward.T).view(length, rows, 4, width)
            outputs = x.new_empty(length + 1, rows, width)
            cells = x.new_empty(length + 1, rows, width, dtype=exact_dtype(x))
            outputs[0], cells[0] = _widened(h[0], width), _widened(c[0], width)  # the state before
            gates = torch.empty_like(from_inputs)
            _loops(x)[0](from_inputs, recurrent, outputs, cells, gates)
        ctx.save_for_backward(x, inward, recurrent, outputs, cells, gates)
        ctx.hidden_dim, ctx.dtypes = hidden_dim, [weight.dtype for weight in weights]
        y = outputs[1:, :, :hidden_dim].contiguous()
        after_h, after_c = y[-1:].clone(), cells[-1:, :, :hidden_dim].to(c.dtype, copy=True)
        ctx.mark_non_differentiable(after_h, after_c)
        return y, after_h, after_c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, inward, recurrent, outputs, cells, gates = ctx.saved_tensors
        (length, rows, _), input_dim = x.shape, ctx.input_dim
        hidden_dim, width = ctx.hidden_dim, outputs.shape[-1]
        with torch.autocast(x.device.type, enabled=False):
            incoming = _widened(grad_y.to(x.dtype), width).contiguous()
            grad_gates = torch.empty_like(gates)  # (T, B, 4, P)
            _loops(x)[1](incoming, recurrent, cells, gates, grad_gates)
            flat = grad_gates.view(length * rows, 4 * width)
            grad_x = (flat @ inward).view_as(x)[..., :input_dim] if ctx.needs_input_grad[0] else None
            grad_inward = (flat.T @ x.view(length * rows, -1)).view(4, width, -1)[:, :hidden_dim, :input_dim]
            before = outputs[:-1].reshape(length * rows, width)
            grad_recurrent = (flat.T @ before).view(4, width, width)[:, :hidden_dim, :hidden_dim]
            grad_bias = flat.sum(0, dtype=exact_dtype(x)).view(4, width)[:, :hidden_dim].reshape(-1)
        gradients = (
            grad_inward.reshape(4 * hidden_dim, input_dim),
            grad_recurrent.reshape(4 * hidden_dim, hidden_dim),
            grad_bias,
            grad_bias.clone(),  # separate tensors, so an in-place change affects only one
        )
        return grad_x, None, None, *(g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))


def _widened(tensor: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """Zeros added behind the last dimension, and behind the one before it; the same tensor if there are none to add."""
    added = (0, columns - tensor.shape[-1], *((0, rows - tensor.shape[-2]) if rows is not None else ()))
    return F.pad(tensor, added) if any(added) else tensor


def _loops(like: Tensor) -> tuple[Any, Any]:
    if not like.is_cuda:
        return forward_loop, backward_loop
    from torchdefine.ops import recurrence_kernels

    return recurrence_kernels.forward_loop, recurrence_kernels.backward_loop


def forward_loop(from_inputs: Tensor, recurrent: Tensor, outputs: Tensor, cells: Tensor, gates: Tensor) -> None:
    """Fill ``outputs`` and ``cells`` (T + 1, B, P) from their first rows on, and ``gates`` (T, B, 4, P)."""
    exact = cells.dtype
    for t in range(len(from_inputs)):
        products = torch.einsum("bk,guk->bgu", outputs[t].to(exact), recurrent.to(exact))  # (B, 4, P)
        i, f, g, o = (from_inputs[t].to(exact) + products).unbind(1)  # (B, P) each
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cells[t + 1] = f * cells[t] + i * g
        outputs[t + 1] = o * cells[t + 1].tanh()
        gates[t] = torch.stack((i, f, g, o), 1)


def backward_loop(incoming: Tensor, recurrent: Tensor, cells: Tensor, gates: Tensor, grad_gates: Tensor) -> None:
    """Fill ``grad_gates`` (T, B, 4, P) from the gradients of the outputs (T, B, P), the last position first."""
    exact = cells.dtype
    grad_cell = torch.zeros_like(cells[0])
    for t in reversed(range(len(incoming))):
        grad_output = incoming[t].to(exact)  # (B, P)
        if t + 1 < len(incoming):
            grad_output = grad_output + torch.einsum("bgr,gru->bu", grad_gates[t + 1].to(exact), recurrent.to(exact))
        i, f, g, o = gates[t].to(exact).unbind(1)
        squashed = cells[t + 1].tanh()
        grad_cell = grad_cell + grad_output * o * (1 - squashed.square())
        of_i, of_f = grad_cell * g * i * (1 - i), grad_cell * cells[t] * f * (1 - f)
        of_g, of_o = grad_cell * i * (1 - g.square()), grad_output * squashed * o * (1 - o)
        grad_gates[t] = torch.stack((of_i, of_f, of_g, of_o), 1)
        grad_cell = grad_cell * f


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
