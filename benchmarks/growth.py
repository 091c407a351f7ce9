"""How time and memory grow with the vocabulary, the depth of the unit and the number of tokens.

``results/benchmark_tables.py`` draws the rows: each has the name of its line, of its axis and its place there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.measuring import Contestant, Group, Prepared, Setting
from benchmarks.records import Benchmark
from benchmarks.texts import real_text
from torchdefine import DeFINE, StandardMap
from torchdefine.embedding import TokenEmbedding
from torchdefine.training.precision import Precision

MAP_DIM, EXPAND_DIM, WIDTH = 128, 1024, 384
PASSES = ("forward", "forward and backward")


class Point(NamedTuple):
    """One size of everything; all but one stay the same along an axis."""

    vocabulary: int = 50_000
    depth: int = 3
    shape: tuple[int, int] = (64, 140)

    def at(self, axis: str) -> int:
        return {"vocabulary": self.vocabulary, "depth": self.depth, "tokens": self.shape[0] * self.shape[1]}[axis]


AXES: dict[str, list[Point]] = {
    "vocabulary": [Point(vocabulary=size) for size in (10_000, 100_000, 1_000_000, 10_000_000)],
    "depth": [Point(depth=depth) for depth in (1, 2, 4, 8, 16)],
    "tokens": [Point(shape=shape) for shape in ((1, 128), (8, 128), (64, 128), (128, 256), (256, 512))],
}
SMALL = Point(vocabulary=10_000, shape=(4, 64))
SMALL_AXES: dict[str, list[Point]] = {
    "vocabulary": [SMALL._replace(vocabulary=size) for size in (10_000, 100_000)],
    "depth": [SMALL._replace(depth=depth) for depth in (1, 4, 16)],
    "tokens": [SMALL._replace(shape=shape) for shape in ((1, 64), (4, 64), (16, 64))],
}

LINES: dict[str, Callable[[Point], nn.Module]] = {
    "nn.Embedding": lambda point: nn.Embedding(point.vocabulary, WIDTH),
    "table and projection": lambda point: TokenEmbedding(
        StandardMap(point.vocabulary, MAP_DIM), nn.Linear(MAP_DIM, WIDTH, bias=False), WIDTH
    ),
    "DeFINE": lambda point: DeFINE(point.vocabulary, WIDTH, MAP_DIM, EXPAND_DIM, depth=point.depth),
}


def prepared(line: str, axis: str, point: Point, passes: str, setting: Setting) -> Prepared:
    with setting.device:
        module = LINES[line](point)
    cutoffs = (point.vocabulary // 13, point.vocabulary // 7, 3 * point.vocabulary // 4)
    ids = real_text(setting.data).wide_ids(point.shape, setting.device, point.vocabulary, cutoffs)
    precision = Precision("bf16", setting.device)
    parameters = sum(p.numel() for p in module.parameters())
    facts: dict[str, Any] = {"line": line, "axis": axis, "at": point.at(axis), "parameters": parameters}
    work = partial(look_up if passes == "forward" else learn, module, ids, precision)
    return Prepared(work, lambda: facts, precision.matmul_mode)


@torch.no_grad()
def look_up(module: nn.Module, ids: Tensor, precision: Precision) -> Tensor:
    with precision.autocast():
        vectors: Tensor = module(ids)
    return vectors


def learn(module: nn.Module, ids: Tensor, precision: Precision) -> None:
    module.zero_grad()
    with precision.autocast():
        vectors: Tensor = module(ids)
    vectors.sum().backward()


def lacks_memory(line: str, point: Point, setting: Setting) -> str:
    """A table and its dense gradient have to fit, with as much again for what passes through."""
    width = WIDTH if line == "nn.Embedding" else MAP_DIM
    needed, free = 2.5 * 4 * point.vocabulary * width, free_bytes(setting.device)
    if free is None or needed < free:
        return ""
    return f"it needs about {needed / 2**30:.0f} GiB of memory, and {free / 2**30:.0f} are free"


def free_bytes(device: torch.device) -> float | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def groups(setting: Setting) -> Iterator[Group]:
    for axis, points in (SMALL_AXES if setting.small else AXES).items():
        fixed = {"vocabulary", "depth", "tokens"} - {axis}
        note = ", ".join(f"{name} {points[0].at(name):,}" for name in sorted(fixed))
        for passes in PASSES:
            contestants = [
                Contestant(
                    f"{line}, {axis} {point.at(axis):,}",
                    partial(prepared, line, axis, point, passes, setting),
                    lacks_memory(line, point, setting),
                )
                for point in points
                for line in LINES
                if axis != "depth" or line == "DeFINE" or point is points[0]
            ]
            yield Group(f"{axis}, {passes}", contestants, note=note)


BENCHMARK = Benchmark("growth", "time and memory against vocabulary, depth and tokens", groups)
