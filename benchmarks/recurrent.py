"""The recurrence of QRNN and SRU in three ways, and training steps of QRNN and SRU beside an LSTM of equal size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels import both_passes
from benchmarks.measuring import Contestant, Group, Prepared, Setting, Work
from benchmarks.recorded import recorded
from benchmarks.records import Benchmark
from benchmarks.steps import NO_GPU, Place, our_step, text_batch
from torchdefine.ops import light_recurrence
from torchdefine.recipe import load_recipe

SIZES = {False: (140, 60, 2500), True: (70, 20, 400)}
"""Positions, rows and channels, by whether shapes are small."""
AUTOGRAD, SCAN, LOOP, KERNEL = "loop, by autograd", "scan of logarithmic depth", "ours, the loop", "ours, the kernel"
RECIPES = {False: ("ptb/awd-lstm", "ptb/qrnn"), True: ("recurrent/lstm", "recurrent/qrnn", "recurrent/sru")}


def loop_by_autograd(gates: Tensor, candidates: Tensor, start: Tensor) -> Tensor:
    cell, cells = start, []
    for gate, new in zip(gates, candidates, strict=True):
        cell = torch.lerp(new, cell, gate)
        cells.append(cell)
    return torch.stack(cells)


def scan(gates: Tensor, candidates: Tensor, start: Tensor) -> Tensor:
    """Hillis and Steele's: after each level, a position sums up twice as many positions before it."""
    decay, cells = gates, (1 - gates) * candidates
    cells = torch.cat((cells[:1] + gates[:1] * start, cells[1:]))
    reach = 1
    while reach < len(gates):
        cells = torch.cat((cells[:reach], torch.addcmul(cells[reach:], decay[reach:], cells[:-reach])))
        decay = torch.cat((decay[:reach], decay[reach:] * decay[:-reach]))
        reach *= 2
    return cells


def recurrence_ways(setting: Setting) -> dict[str, Work]:
    """Forward and backward."""
    length, rows, width = SIZES[setting.small]
    gates = torch.rand(length, rows, width, device=setting.device).requires_grad_()
    candidates, start = torch.randn_like(gates).requires_grad_(), torch.zeros_like(gates[0]).requires_grad_()
    given, upstream = (gates, candidates, start), (torch.randn_like(gates),)
    ways = {
        AUTOGRAD: loop_by_autograd,
        SCAN: scan,
        LOOP: partial(light_recurrence, impl="torch"),
        KERNEL: partial(light_recurrence, impl="kernel"),
    }
    return {
        name: partial(both_passes, lambda way=way: (way(*given),), given, upstream)  # type: ignore[misc]
        for name, way in ways.items()
    }


def groups(setting: Setting) -> Iterator[Group]:
    works = recurrence_ways(setting)

    def prepare(work: Work) -> Prepared:
        return Prepared(recorded(work) if setting.on_gpu else work)

    lacks = {KERNEL: "" if setting.on_gpu else NO_GPU}
    contestants = [Contestant(who, partial(prepare, work), lacks.get(who, "")) for who, work in works.items()]
    note = "{} positions, {} rows, {:,} channels".format(*SIZES[setting.small])
    yield Group("recurrence, forward and backward", contestants, note=note)
    recipes = {name: load_recipe(name) for name in RECIPES[setting.small]}
    first = next(iter(recipes.values()))
    size = 10_000 if setting.small else first.data.vocabulary_size
    place = Place(size, text_batch(first, size, setting), setting.device)
    steps = [Contestant(name, partial(our_step, recipe, place, setting.on_gpu), "") for name, recipe in recipes.items()]
    rows, length = place.inputs[0].shape
    yield Group("training steps", steps, note=f"{rows} rows of {length} tokens, {size:,} types")


BENCHMARK = Benchmark("recurrent", "the recurrence of QRNN and SRU, and their steps beside an LSTM's", groups)
