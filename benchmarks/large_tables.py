"""Training steps and memory of large tables with sparse gradients: what they cost against the number of rows.

Every batch has the same number of ids and of different ids, so only the table grows. All contestants compute equal ids
once, and all tables are trained by row-wise Adagrad.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.growth import free_bytes
from benchmarks.measuring import Contestant, Goal, Group, Prepared, Rows, Setting
from benchmarks.records import Benchmark
from torchdefine import DeFINE, HostMap, StandardMap
from torchdefine.embedding import TokenEmbedding
from torchdefine.embedding.token_embedding import embedded
from torchdefine.modes import prepare
from torchdefine.training import OPTIMIZERS

IDS, DIFFERENT = 16_384, 4_096
BATCHES = 8
"""They take turns, so that the rows of a batch are not in the processor's cache."""


class Widths(NamedTuple):
    map_dim: int
    expand_dim: int
    width: int


ON_CPU, ON_GPU = Widths(16, 64, 64), Widths(32, 128, 128)

LINES: dict[str, Callable[[int, Widths], TokenEmbedding]] = {
    "nn.Embedding": lambda rows, of: TokenEmbedding(StandardMap(rows, of.width, sparse=True)),
    "table and linear": lambda rows, of: TokenEmbedding(
        StandardMap(rows, of.map_dim, sparse=True), nn.Linear(of.map_dim, of.width, bias=False), of.width
    ),
    "DeFINE": lambda rows, of: DeFINE(rows, of.width, of.map_dim, of.expand_dim, sparse=True),
}


IN_HOST_MEMORY = "DeFINE, table in host memory"
CACHE_ROWS = 3 * DIFFERENT
"""Of a table in host memory: no batch finds rows of the one before its last, so that all of its own are fetched."""


def widths(setting: Setting) -> Widths:
    return ON_GPU if setting.on_gpu else ON_CPU


def some_ids(rows: int, device: torch.device) -> Tensor:
    """Of ``DIFFERENT`` random rows, all at least once, and low ones more often, as words and items are."""
    drawn = torch.randint(rows, (2 * DIFFERENT,)).unique()
    different = drawn[torch.randperm(len(drawn))[:DIFFERENT]]
    more = (len(different) ** torch.rand(IDS - len(different))).long() - 1
    return torch.cat((different, different[more.clamp(0)]))[torch.randperm(IDS)].to(device)


def prepared(line: str, rows: int, setting: Setting) -> Prepared:
    with setting.device:
        model = LINES[line](rows, widths(setting))
        head = nn.Linear(widths(setting).width, 1)
    return Prepared(stepping(model, head, rows, setting.device), lambda: {"rows": rows, **sizes(model)})


def stepping(model: TokenEmbedding, head: nn.Linear, rows: int, device: torch.device) -> Callable[[], None]:
    """A training step: look-up, unit, one logit for each id, backward and both optimisers."""
    config = OPTIMIZERS.read({"kind": "adam", "sparse": "rowwise-adagrad", "sparse_lr": 0.05})
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = config.build_with_tables(parameters, [model.map.table.weight], device)  # type: ignore[attr-defined]
    batches = cycle([some_ids(rows, device) for _ in range(BATCHES)])
    prepare(model.train())

    def step() -> None:
        optimizer.zero_grad()
        head(embedded(model, next(batches), None if device.type == "cpu" else DIFFERENT)).square().mean().backward()
        optimizer.step()

    return step


def prepared_in_host_memory(rows: int, setting: Setting) -> Prepared:
    of = widths(setting)
    table = HostMap(StandardMap(rows, of.map_dim), CACHE_ROWS)
    with setting.device:
        model, head = DeFINE.over(table, of.width, expand_dim=of.expand_dim), nn.Linear(of.width, 1)
    return Prepared(
        stepping_from_host_memory(model.to(setting.device), head, rows, setting.device), lambda: {"rows": rows}
    )


def stepping_from_host_memory(model: DeFINE, head: nn.Linear, rows: int, device: torch.device) -> Callable[[], None]:
    """The step of ``stepping``, with the rows of the next batch on their way while it runs."""
    table = cast("HostMap", model.map)
    config = OPTIMIZERS.read({"kind": "adam", "sparse": "rowwise-adagrad", "sparse_lr": 0.05})
    optimizer = config.build_with_tables([*model.parameters(), *head.parameters()], [table.cache], device)
    table.follow(optimizer)
    some = [some_ids(rows, torch.device("cpu")).unique(return_inverse=True) for _ in range(BATCHES)]
    batches = cycle([(types, places.to(device)) for types, places in some])
    prepare(model.train())
    types, places = next(batches)
    coming = [(table.prefetch(types), places)]

    def step() -> None:
        types, places = coming.pop()
        following, places_then = next(batches)
        coming.append((table.prefetch(following), places_then))
        optimizer.zero_grad()
        head(F.embedding(places, model(types))).square().mean().backward()
        optimizer.step()

    return step


def sizes(model: nn.Module) -> dict[str, Any]:
    return {"parameters": sum(p.numel() for p in model.parameters())}


def lacks_memory(line: str, rows: int, setting: Setting) -> str:
    of = widths(setting)
    needed, free = 4.4 * rows * (of.width if line == "nn.Embedding" else of.map_dim), free_bytes(setting.device)
    if free is None or needed < free:
        return ""
    return f"it needs about {needed / 2**30:.0f} GiB of memory, and {free / 2**30:.0f} are free"


def step_group(setting: Setting) -> Group:
    sweep = [100_000, 1_000_000] if setting.small else [100_000, 1_000_000, 10_000_000]
    sweep += [100_000_000] if setting.on_gpu and not setting.small else []
    contestants = [
        Contestant(f"{line}, {rows:,} rows", partial(prepared, line, rows, setting), lacks_memory(line, rows, setting))
        for rows in sweep
        for line in LINES
    ]
    contestants += [
        Contestant(
            f"{IN_HOST_MEMORY}, {rows:,} rows",
            partial(prepared_in_host_memory, rows, setting),
            "" if setting.on_gpu else "it is for a GPU, and this is the host",
        )
        for rows in sweep
    ]
    pairs = [(f"DeFINE, {rows:,} rows", f"table and linear, {rows:,} rows") for rows in sweep]
    goals = [least_times_as_long(*pair, 1.5) for pair in [*pairs, (pairs[-1][0], pairs[0][0])]]
    of = widths(setting)
    note = f"{IDS:,} ids, {DIFFERENT:,} different; {of.map_dim} → {of.width}, at most {of.expand_dim}"
    return Group("training step", contestants, goals, note, taking_turns=True)


def least_times_as_long(who: str, than: str, at_most: float) -> Goal:
    """By the quickest repeats: whatever else the machine does only adds to the others."""
    what = f"{who}: times as long as {than}, quickest repeats"
    return Goal(what, lambda rows: rows[who].least_ms / rows[than].least_ms, at_most, True, gpu_only=False)


def memory_work(what: str, rows: int, setting: Setting) -> Prepared:
    of, folder = widths(setting), tempfile.TemporaryDirectory()
    build = cast("Callable[[], DeFINE]", partial(LINES["DeFINE"], rows, of))
    if what == "build":
        return Prepared(build)
    made = build()
    if what == "step":
        return Prepared(stepping(made, nn.Linear(of.width, 1), rows, setting.device))
    if what == "resize":
        others = cycle([rows + 1000, rows])
        return Prepared(partial(resize, made, others))
    if what == "cached":
        return Prepared(made.cached)
    made.save(folder.name)
    if what == "save":
        return Prepared(partial(made.save, folder.name), lambda: {"files": len(list(Path(folder.name).iterdir()))})
    del made
    return Prepared(partial(DeFINE.load, folder.name), lambda: {"files": len(list(Path(folder.name).iterdir()))})


def resize(model: TokenEmbedding, sizes: Iterator[int]) -> None:
    model.resize(next(sizes))


def memory_group(setting: Setting) -> Group:
    """The embedding's own memory is counted; ``least`` is what has to be there at once, by the bytes of its table."""
    rows, of = 1_000_000 if setting.small else 10_000_000, widths(setting)
    table = 4 * rows * of.map_dim / 2**20
    least = {"build": 1.0, "step": 1 + 1 / of.map_dim, "save": 1.0, "load": 1.0, "resize": 2.0}
    least["cached"] = 1 + of.width / of.map_dim

    def times(what: str, found: Rows) -> float:
        return (found[what].peak_mib or math.nan) / (table * least[what])

    return Group(
        "peak memory",
        [Contestant(what, partial(memory_work, what, rows, setting)) for what in least],
        [
            Goal(f"{what}: peak memory over {parts:.4g} × the table", partial(times, what), 1.1, True, gpu_only=False)
            for what, parts in least.items()
        ],
        f"{rows:,} rows × {of.map_dim}, {table:,.0f} MiB",
    )


def groups(setting: Setting) -> Iterator[Group]:
    yield step_group(setting)
    if not setting.on_gpu:
        yield memory_group(setting)


BENCHMARK = Benchmark("large-tables", "training steps and memory of tables with sparse gradients, by rows", groups)
