"""Our kernels, between the products of a step and for a recurrence, each beside what it stands for in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measuring import Contestant, Group, Prepared, Setting, Work
from benchmarks.recorded import recorded
from benchmarks.records import Benchmark
from benchmarks.steps import NO_GPU
from torchdefine.ops import lstm, relu_dropout, residual_norm, softmax_loss
from torchdefine.ops.softmax_loss import Classes

LSTM_SIZES = {False: (140, 64, 1024), True: (6, 3, 20)}
"""Positions, rows and units, by whether it is a small trial."""
TORCHS, OURS = "torch, one operation after another", "ours"
DROPOUT = 0.1


class Sizes(NamedTuple):
    rows: int
    width: int
    inner: int
    chunk: int
    """Rows of logits at once."""
    classes: int


def sizes_of(setting: Setting) -> Sizes:
    return Sizes(256, 64, 160, 32, 1003) if setting.small else Sizes(9000, 384, 1920, 838, 20_003)


def dtype_of(setting: Setting) -> torch.dtype:
    return torch.bfloat16 if setting.on_gpu else torch.float32


def residual_ways(setting: Setting, dropout: float = DROPOUT) -> dict[str, Work]:
    """Forward and backward of a residual connection and its norm, which feeds the stream and a product."""
    sizes, dtype, device = sizes_of(setting), dtype_of(setting), setting.device
    norm = nn.LayerNorm(sizes.width, device=device)
    x = torch.randn(sizes.rows, sizes.width, device=device, requires_grad=True)
    update = torch.randn_like(x).to(dtype).requires_grad_()
    bias = torch.randn(sizes.width, device=device, requires_grad=True)
    upstream = torch.randn_like(x), torch.randn_like(update)

    def torchs() -> Sequence[Tensor]:
        normed = norm(x + F.dropout(update + bias.to(dtype), dropout))
        return normed, normed.to(dtype) if setting.on_gpu else normed.clone()

    def ours() -> Sequence[Tensor]:
        return residual_norm(x, update, norm, dropout, update_bias=bias)

    inputs = (x, update, bias, norm.weight, norm.bias)
    return {TORCHS: partial(both_passes, torchs, inputs, upstream), OURS: partial(both_passes, ours, inputs, upstream)}


def relu_ways(setting: Setting, dropout: float = DROPOUT) -> dict[str, Work]:
    """Forward and backward of what stands between the two products of a feed-forward part."""
    sizes, dtype, device = sizes_of(setting), dtype_of(setting), setting.device
    z = torch.randn(sizes.rows, sizes.inner, device=device).to(dtype).requires_grad_()
    bias = torch.randn(sizes.inner, device=device, requires_grad=True)
    upstream = (torch.randn_like(z),)

    def torchs() -> Sequence[Tensor]:
        return (F.dropout(F.relu(z + bias.to(dtype)), dropout),)

    def ours() -> Sequence[Tensor]:
        return (relu_dropout(z, dropout, bias),)

    return {
        TORCHS: partial(both_passes, torchs, (z, bias), upstream),
        OURS: partial(both_passes, ours, (z, bias), upstream),
    }


def softmax_ways(setting: Setting) -> dict[str, Work]:
    """Losses and gradient of a chunk of logits, in the dtype of the products, from a copy of the logits."""
    sizes, dtype, device = sizes_of(setting), dtype_of(setting), setting.device
    columns = -(-sizes.classes // 16) * 16
    logits = torch.randn(sizes.chunk, columns, device=device).to(dtype)
    targets = torch.randint(0, sizes.classes, (sizes.chunk,), device=device)
    counted = torch.ones_like(targets, dtype=torch.bool)
    classes = Classes(targets, counted, sizes.classes, torch.randn(columns, device=device))

    def work(way: Callable[..., tuple[Tensor, Tensor | None]]) -> Sequence[Tensor]:
        losses, gradient = way(logits.clone(), classes, with_gradient=True)
        assert gradient is not None
        return losses, gradient.to(dtype)

    return {TORCHS: partial(work, partial(softmax_loss, impl="torch")), OURS: partial(work, softmax_loss)}


def lstm_ways(setting: Setting) -> dict[str, Work]:
    """Forward and backward of a layer as wide as its inputs, under autocast; torch's is cuDNN's on a GPU."""
    length, rows, width = LSTM_SIZES[setting.small]
    module = nn.LSTM(width, width, device=setting.device)
    x = torch.randn(length, rows, width, device=setting.device).to(dtype_of(setting)).requires_grad_()
    state = torch.zeros(1, rows, width, device=setting.device)
    weights = list(module.parameters())  # in the order that ours takes, too
    half = partial(torch.autocast, setting.device.type, torch.bfloat16, enabled=setting.on_gpu)

    def torchs() -> Sequence[Tensor]:
        with half():
            return (module(x, (state, state))[0],)

    def ours() -> Sequence[Tensor]:
        with half():
            return (lstm(x, state, state, weights)[0],)

    inputs, upstream = (x, *weights), (torch.randn_like(x),)
    return {TORCHS: partial(both_passes, torchs, inputs, upstream), OURS: partial(both_passes, ours, inputs, upstream)}


def both_passes(
    forward: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> Sequence[Tensor]:
    outputs = forward()
    return (*(output.detach() for output in outputs), *torch.autograd.grad(outputs, inputs, upstream))


def groups(setting: Setting) -> Iterator[Group]:
    sizes = sizes_of(setting)

    def prepare(work: Work) -> Prepared:
        return Prepared(recorded(work) if setting.on_gpu else work)

    for name, ways, note in (
        ("residual, dropout and norm, forward and backward", residual_ways, f"{sizes.rows:,} × {sizes.width}"),
        ("bias, ReLU and dropout, forward and backward", relu_ways, f"{sizes.rows:,} × {sizes.inner:,}"),
        ("losses and gradient of a chunk of logits", softmax_ways, f"{sizes.chunk:,} × {sizes.classes:,}"),
        ("an LSTM layer, forward and backward", lstm_ways, "{} × {} × {:,}".format(*LSTM_SIZES[setting.small])),
    ):
        torch.manual_seed(0)
        works = ways(setting)
        lacks = {OURS: "" if setting.on_gpu else NO_GPU}
        contestants = [Contestant(who, partial(prepare, work), lacks.get(who, "")) for who, work in works.items()]
        yield Group(name, contestants, note=note)


BENCHMARK = Benchmark("kernels", "our kernels beside torch's operations", groups)
