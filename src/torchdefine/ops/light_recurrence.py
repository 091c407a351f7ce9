"""The recurrence of QRNNs and SRUs: a cell that forgets channel by channel, and no matrix between two positions.

On a CPU a loop over the positions, with one gradient formula for all of them, beats a parallel scan of logarithmic
depth, which reads and writes everything once for each of its levels (`python -m benchmarks recurrent`). Its backward
pass is a linear recurrence too, in the other direction. On a GPU a kernel keeps the cells of a block of channels in
registers. Both are operators of torch's, so compilers take them whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchdefine.ops.dtypes import exact_dtype
from torchdefine.ops.kernel_gate import Impl, by_kernel


def light_recurrence(
    forget: Tensor, candidates: Tensor, start: Tensor, peephole: Tensor | None = None, impl: Impl = "auto"
) -> Tensor:
    """The cells c[t] = f[t] · c[t-1] + (1 - f[t]) · candidates[t] of all positions, (T, B, H), with c[-1] = ``start``.

    Without a peephole f is ``forget``, (T, B, H). With one, v of (H,), f[t] = sigmoid(forget[t] + v · c[t-1]). Half
    precision is for what is read and returned; the cell itself is carried in single precision.
    """
    cells: Tensor = _forward(forget, candidates, start, peephole, impl)
    return cells


@torch.library.custom_op("torchdefine::light_recurrence", mutates_args=())
def _forward(forget: Tensor, candidates: Tensor, start: Tensor, peephole: Tensor | None, impl: str) -> Tensor:
    if by_kernel(impl, candidates):  # type: ignore[arg-type]
        from torchdefine.ops import light_recurrence_kernels as kernels

        return kernels.forward(forget, candidates, start, peephole)
    exact, dtype = exact_dtype(candidates), candidates.dtype
    gates, cells = forget.to(exact), torch.empty(candidates.shape, dtype=exact, device=candidates.device)
    cell = start.to(exact)
    for gate, new, after in zip(gates.unbind(), candidates.to(exact).unbind(), cells.unbind(), strict=True):
        if peephole is not None:
            gate = torch.addcmul(gate, cell, peephole).sigmoid_()  # (B, H)
        cell = torch.lerp(new, cell, gate, out=after)
    return cells.to(dtype)


@_forward.register_fake
def _(forget: Tensor, candidates: Tensor, start: Tensor, peephole: Tensor | None, impl: str) -> Tensor:
    return torch.empty(candidates.shape, dtype=candidates.dtype, device=candidates.device)


@torch.library.custom_op("torchdefine::light_recurrence_backward", mutates_args=())
def _backward(
    upstream: Tensor,
    forget: Tensor,
    candidates: Tensor,
    start: Tensor,
    peephole: Tensor | None,
    cells: Tensor,
    impl: str,
) -> list[Tensor]:
    """The gradients of forget, candidates, start and, if there is one, peephole."""
    if by_kernel(impl, candidates):  # type: ignore[arg-type]
        from torchdefine.ops import light_recurrence_kernels as kernels

        return kernels.backward(upstream, forget, candidates, start, peephole, cells)
    exact = exact_dtype(candidates)
    gates, before = forget.to(exact), torch.cat((start[None].to(exact), cells[:-1].to(exact)))  # (T, B, H)
    slope = before - candidates  # of a cell by its gate, or else by the gate's logit
    decay = gates  # the slope of a cell by the one before
    if peephole is not None:
        gates = torch.addcmul(gates, before, peephole).sigmoid_()
        slope.mul_(gates).mul_(1 - gates)
        decay = torch.addcmul(gates, slope, peephole)
    total = upstream.to(exact, copy=True)
    of_positions, decays = total.unbind(), decay.unbind()
    for position in range(len(total) - 1, 0, -1):
        of_positions[position - 1].addcmul_(of_positions[position], decays[position])
    of_forget, of_start = slope.mul_(total), total[0] * decay[0]
    of_candidates = torch.addcmul(total, total, gates, value=-1)
    found = [of_forget.to(forget.dtype), of_candidates.to(candidates.dtype), of_start.to(start.dtype)]
    return found if peephole is None else [*found, (of_forget * before).sum((0, 1)).to(peephole.dtype)]


@_backward.register_fake
def _(
    upstream: Tensor,
    forget: Tensor,
    candidates: Tensor,
    start: Tensor,
    peephole: Tensor | None,
    cells: Tensor,
    impl: str,
) -> list[Tensor]:
    inputs = [forget, candidates, start, *([] if peephole is None else [peephole])]
    return [torch.empty(given.shape, dtype=given.dtype, device=given.device) for given in inputs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.impl = inputs
    ctx.save_for_backward(*tensors, output)


def _gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, cells = ctx.saved_tensors
    found = _backward(upstream, *tensors, cells, ctx.impl)
    return (*found, *[None] * (5 - len(found)))


_forward.register_autograd(_gradients, setup_context=_keep)
