"""Tables of the sizes of models that people have, in few bits: time and memory to make, look-up and output layer.

The numbers are drawn: a spectrum that falls as 1 / rank, rarer rows smaller, Zipf counts in no order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measuring import Contestant, Goal, Group, PeakMemory, Prepared, Rows, Setting
from benchmarks.records import Benchmark
from torchdefine.tables import CompactTable, transform_table

MODELS = {
    "EmbeddingGemma": (262_144, 768),
    "mE5-small": (250_037, 384),
    "Gemma-3-270M": (262_144, 640),
    "XLM-R": (250_002, 768),
}
SMALL_ROWS, SMALL_WIDTH = 64, 4
"""Rows and columns are so many times fewer in a small setting."""
BITS = 3
"""A number, on average."""
TOKENS, HIDDEN = 8_192, 32
MOST_SECONDS, MOST_TIMES = 300.0, 3.0


def drawn(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A table and the counts of its rows."""
    generator = torch.Generator().manual_seed(0)
    spectrum = (1 / (1 + torch.arange(width)).float()).sqrt()
    mixing = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q * spectrum[:, None]
    counts = (1e7 / (1 + torch.arange(rows)))[torch.randperm(rows, generator=generator)].round()
    table = torch.empty(rows, width)
    for part, often in zip(table.split(16_384), counts.split(16_384), strict=True):
        sizes = 0.5 + (often + 1).log() / 16
        part.copy_(torch.randn(part.shape, generator=generator) @ mixing * sizes[:, None])
    return table.to(device), counts


@lru_cache(maxsize=1)
def made(rows: int, width: int, device: torch.device) -> tuple[Tensor, CompactTable, dict[str, Any]]:
    """The table, what was packed of it, and what that took."""
    table, counts = drawn(rows, width, device)
    memory = PeakMemory(device)
    memory.start()
    began = time.perf_counter()
    packed = transform_table(table, rows * width * BITS // 8, counts=counts)
    seconds, peak = time.perf_counter() - began, memory.peak_mib()
    facts = {
        "rows": rows,
        "width": width,
        "stored MiB": round(packed.stored_bytes / 2**20, 4),
        "float32 MiB": round(table.nbytes / 2**20, 4),
        "seconds to make": round(seconds, 3),
        "peak MiB to make, with the table": None if peak is None else round(peak + table.nbytes / 2**20, 1),
    }
    return table, packed, facts


def prepared(what: str, who: str, rows: int, width: int, device: torch.device) -> Prepared:
    table, packed, facts = made(rows, width, device)
    ids = (rows ** torch.rand(TOKENS, generator=torch.Generator().manual_seed(1))).long().clamp(max=rows - 1).to(device)
    hidden = torch.randn(HIDDEN, width, device=device)
    modules: dict[str, nn.Module] = {"nn.Embedding": nn.Embedding.from_pretrained(table), "bits": packed}

    @torch.inference_mode()
    def look_up() -> Tensor:
        vectors: Tensor = modules[who](ids)
        return vectors

    @torch.inference_mode()
    def logits() -> Tensor:
        return hidden @ table.T if who == "nn.Embedding" else packed.logits(hidden)

    return Prepared(look_up if what == "look-up" else logits, lambda: facts if who == "bits" else {})


def made_within(what: str, limit: float, value: str) -> Goal:
    def found(rows: Rows) -> float:
        facts = rows["bits"].facts
        if value == "seconds":
            return float(facts["seconds to make"])
        return float((facts["peak MiB to make, with the table"] or float("nan")) / facts["float32 MiB"])

    return Goal(what, found, limit, at_most=True, gpu_only=False)


def groups(name: str, setting: Setting) -> Iterator[Group]:
    rows, width = MODELS[name]
    if setting.small:
        rows, width = rows // SMALL_ROWS, width // SMALL_WIDTH
    for what in ("look-up", "output layer"):
        contestants = [
            Contestant(who, partial(prepared, what, who, rows, width, setting.device))
            for who in ("nn.Embedding", "bits")
        ]
        goals = [
            made_within("seconds to make", MOST_SECONDS, "seconds"),
            made_within("peak memory to make, by the table's bytes", MOST_TIMES, "memory"),
        ]
        work = f"{TOKENS:,} ids" if what == "look-up" else f"{HIDDEN} hidden vectors"
        note = f"{rows:,} × {width}, {BITS} bits a number; {work}"
        yield Group(f"{name}, {what}", contestants, goals if what == "look-up" else [], note)


BENCHMARKS = [
    Benchmark(f"shrunk-{name}", f"a table of the size of {name}'s in few bits: making, look-up, output layer", made_of)
    for name in MODELS
    for made_of in [partial(groups, name)]
]
"""One for each size, so that one size at a time needs memory."""
