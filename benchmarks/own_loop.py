"""A training step in somebody's own eager loop, as docs/benchmarks.md has it, with other tables beside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from benchmarks.measuring import Contestant, Group, Prepared, Setting
from benchmarks.records import Benchmark
from torchdefine import DeFINE

TYPES, WIDTH, MAP_DIM, EXPAND_DIM, SHAPE = 10_000, 256, 64, 256, (32, 20)

TABLES: dict[str, Callable[[], nn.Module]] = {
    "nn.Embedding": lambda: nn.Embedding(TYPES, WIDTH),
    "table and linear": lambda: nn.Sequential(nn.Embedding(TYPES, MAP_DIM), nn.Linear(MAP_DIM, WIDTH, bias=False)),
    "DeFINE": lambda: DeFINE(TYPES, WIDTH, map_dim=MAP_DIM, expand_dim=EXPAND_DIM),
}
WAYS = ("", ", compiled")


def stepping(make: Callable[[], nn.Module], way: str, setting: Setting) -> Prepared:
    device = setting.device
    made, head = make().to(device), nn.Linear(WIDTH, 2).to(device)
    embedding: Callable[..., torch.Tensor] = torch.compile(made) if way else made
    optimizer = torch.optim.AdamW([*made.parameters(), *head.parameters()], fused=True)
    ids, labels = torch.randint(TYPES, SHAPE, device=device), torch.randint(2, SHAPE[:1], device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=setting.on_gpu):
            loss = nn.functional.cross_entropy(head(embedding(ids).mean(1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    facts = {"parameters": sum(p.numel() for p in made.parameters())}
    return Prepared(step, lambda: facts)


def lacks(name: str, setting: Setting) -> str:
    if "compiled" in name and setting.small:
        return "the small version leaves out what has to be compiled first"
    if "compiled" in name and not setting.on_gpu and not shutil.which(os.environ.get("CXX", "g++")):
        return "there is no C++ compiler"
    return ""


def groups(setting: Setting) -> Iterator[Group]:
    contestants = [
        Contestant(name + way, partial(stepping, make, way, setting), lacks(name + way, setting))
        for way in WAYS
        for name, make in TABLES.items()
    ]
    note = f"{SHAPE[0]} × {SHAPE[1]} ids of {TYPES:,}, {WIDTH} wide, " + ("bfloat16" if setting.on_gpu else "float32")
    yield Group("training step", contestants, note=note, taking_turns=True)


BENCHMARK = Benchmark("own-loop", "a training step of a user's own eager loop, by table", groups)
