"""The DeFINE unit alone, forward, backward and both, beside a projection, an MLP of its size and a loop over groups.

Every contestant takes the map's vectors of the same tokens of real text to vectors m wide.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.measuring import Contestant, Goal, Group, Prepared, Rows, Setting, Work, milliseconds, times_faster
from benchmarks.plain_step import in_plain_torch
from benchmarks.recorded import recorded
from benchmarks.records import Benchmark
from benchmarks.steps import NO_GPU
from benchmarks.texts import WIKIPEDIA_SIZE, real_text
from torchdefine.embedding import DefineUnit, DenseMLP, VocabularyFacts, build_embedding
from torchdefine.embedding.unit import ExpansionLayer
from torchdefine.modes import prepare
from torchdefine.ops import plain_torch
from torchdefine.ops.group_stack import ACTIVATIONS
from torchdefine.recipe import load_recipe
from torchdefine.training.cuda_graphs import room_for
from torchdefine.training.precision import Precision

SHAPE = (64, 140)  # 8,960 tokens
RECIPES = {"R3": "table1a/r3", "R4": "table1a/r4", "R5": "table1a/r5"}
GOALS = {"R3": 5.0, "R5": 4.0}
TWIN = "eager twin, layer by layer"
MLP = "an MLP of the unit's size"
FEW = 64
CALLS = ("forward", "backward", "both")


class LoopOverGroups(nn.Module):
    """A unit with the weights of ours, as the paper's equations read: split, one product a group, join."""

    def __init__(self, ours: DefineUnit) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for index, layer in enumerate([*self.ours.expansions, self.ours.last]):
            linear: Any = layer.linear if isinstance(layer, ExpansionLayer) else layer
            groups = [hidden] if linear.groups == 1 else list(hidden.chunk(linear.groups, -1))
            if index:
                groups = [torch.cat(pair, -1) for pair in zip(x.chunk(linear.groups, -1), groups, strict=True)]
            hidden = torch.cat([group @ weight for group, weight in zip(groups, linear.used_weight(), strict=True)], -1)
            if (bias := linear.used_bias()) is not None:
                hidden = hidden + bias
            if isinstance(layer, ExpansionLayer):
                hidden = hidden if layer.norm is None else layer.norm(hidden)
                hidden = ACTIVATIONS[layer.activation](hidden)
        return hidden


class DistinctTokens(nn.Module):
    """The unit over each distinct token once, in a room of fixed size, and its vectors dealt out again."""

    def __init__(self, unit: nn.Module, ids: Tensor) -> None:
        super().__init__()
        self.unit = unit
        distinct, places = torch.unique(ids.flatten(), return_inverse=True)
        self.count, self.room = len(distinct), min(room_for(len(distinct)), ids.numel())
        first = torch.zeros(self.room, dtype=torch.long, device=ids.device)
        first[places] = torch.arange(ids.numel(), device=ids.device)
        self.first, self.places = first, places

    def forward(self, x: Tensor) -> Tensor:
        """(T, n) → (T, m); rows of equal ids are equal, so any of them will do."""
        return self.unit(x.index_select(0, self.first)).index_select(0, self.places)


class Behind(nn.Module):
    """A unit behind a module of its own, whose forward torch replaces when it records it."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.unit(x)
        return found


class Passes:
    """Forward, backward or both, through a module that takes (T, n) to (T, m)."""

    def __init__(self, module: nn.Module, x: Tensor, precision: Precision) -> None:
        self.module, self.x, self.precision = module, x.detach().clone().requires_grad_(), precision

    def forward(self) -> Tensor:
        with self.precision.autocast():
            y: Tensor = self.module(self.x)
        return y

    def both(self) -> Tensor:
        y = self.forward()
        self._forget_gradients()
        y.backward(torch.ones_like(y))
        return y.detach()

    def backward(self) -> Work:
        """Backward alone, again and again through one graph."""
        y = self.forward()
        ones = torch.ones_like(y)

        def again() -> None:
            self._forget_gradients()
            y.backward(ones, retain_graph=True)

        return again

    def _forget_gradients(self) -> None:
        self.x.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None


class Way(NamedTuple):
    """How a contestant gets from the map's vectors to the finished ones."""

    module: nn.Module
    recorded: bool = False
    compiled: bool = False
    plain: bool = False
    """Without kernels of ours."""
    graphed: bool = False
    """Forward and backward as two CUDA graphs of torch's own, called from an eager loop."""


def ways(unit: DefineUnit, ids: Tensor) -> dict[str, Way]:
    """The first is the reference of the ratios. Modules are shared by all passes, so that each compiles once."""
    prepare(unit)  # as a training loop does; what runs in plain torch says so
    n, m = unit.plan.map_dim, unit.plan.embedding_dim
    weights = sum(p.numel() for p in unit.parameters())
    compiled: nn.Module = torch.compile(unit)  # type: ignore[assignment]
    fewest_launches: nn.Module = torch.compile(unit, mode="reduce-overhead")  # type: ignore[assignment]
    distinct = DistinctTokens(unit, ids)
    return {
        TWIN: Way(unit, plain=True),
        "eager twin, recorded": Way(unit, recorded=True, plain=True),
        "eager twin, compiled": Way(compiled, compiled=True),
        "eager twin, compiled, recorded": Way(compiled, recorded=True, compiled=True),
        "eager twin, compiled to CUDA graphs": Way(fewest_launches, compiled=True),
        "ours, kernel by kernel": Way(unit),
        "ours, graphed by torch": Way(unit, graphed=True),
        "ours, recorded": Way(unit, recorded=True),
        "ours, distinct tokens": Way(distinct),
        "ours, distinct tokens, recorded": Way(distinct, recorded=True),
        "a loop over groups": Way(LoopOverGroups(unit), plain=True),
        "one dense projection": Way(nn.Linear(n, m, bias=False)),
        MLP: Way(DenseMLP(n, weights // (n + m), m)),
    }


def prepared(way: Way, x: Tensor, call: str, setting: Setting) -> Prepared:
    precision = Precision("bf16", setting.device)
    module = graphed(way.module, x) if way.graphed else way.module
    passes = Passes(module, x, precision)
    facts = {"parameters": sum(p.numel() for p in way.module.parameters())}
    kernels = plain_torch() if way.plain else nullcontext()
    with precision.matmul_mode(), kernels:  # what is compiled or recorded here belongs to the mode that it will run in
        work: Work = {"forward": passes.forward, "both": passes.both}.get(call) or passes.backward()
        work = recorded(work) if way.recorded else work
    return Prepared(in_plain_torch(work) if way.plain else work, lambda: facts, precision.matmul_mode)


def graphed(unit: nn.Module, x: Tensor) -> nn.Module:
    """As a user does it for whom shapes are fixed."""
    module = Behind(unit)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        torch.cuda.make_graphed_callables(module, (x.detach().clone().requires_grad_(),))  # replaces its forward
    return module


def why_not(way: Way, call: str, setting: Setting) -> str:
    if (way.recorded or way.graphed) and not setting.on_gpu:
        return NO_GPU
    if way.recorded and call == "backward":
        return "what is recorded is forward and backward together"
    if way.compiled and setting.small:
        return "the small version leaves out what has to be compiled first"
    if way.compiled and not setting.on_gpu and not shutil.which(os.environ.get("CXX", "g++")):
        return "there is no C++ compiler"
    return ""


def unit_and_ids(recipe_name: str, setting: Setting) -> tuple[DefineUnit, Tensor, Tensor]:
    """The recipe's unit, ids (T,) of real text and the map's vectors of them (T, n)."""
    text, device = real_text(setting.data), setting.device
    torch.manual_seed(1)
    if setting.small:
        recipe, size = load_recipe(recipe_name, {"embedding": {"cutoffs": [1000, 2000, 4000]}}), 8000
        ids = text.ids((8, 32), device, size).flatten()
    else:
        recipe, size = load_recipe(recipe_name), WIKIPEDIA_SIZE
        ids = text.wide_ids(SHAPE, device, size).flatten()
    with device:
        embedding = build_embedding(recipe.embedding, recipe.unit, VocabularyFacts(size))
    assert isinstance(embedding.unit, DefineUnit)
    return embedding.unit, ids, embedding.map(ids).detach()


def best_of_ours(at_least: float) -> Goal:
    def value(rows: Rows) -> float:
        return rows[TWIN].ms / min(row.ms for name, row in rows.items() if name.startswith("ours,"))

    return Goal(f"the fastest of ours: times faster than {TWIN}", value, at_least)


def groups(setting: Setting) -> Iterator[Group]:
    for short, recipe_name in RECIPES.items():
        unit, ids, x = unit_and_ids(recipe_name, setting)
        with setting.device:
            every = ways(unit, ids)
        note = f"{len(ids):,} tokens, {len(ids.unique()):,} distinct"
        for call in CALLS:
            contestants = [
                Contestant(name, partial(prepared, way, x, call, setting), why_not(way, call, setting))
                for name, way in every.items()
            ]
            goals = []
            if call == "both" and short in GOALS:
                goals = [times_faster("ours, recorded", TWIN, GOALS[short]), best_of_ours(GOALS[short])]
            yield Group(f"{short}, {call}", contestants, goals, note)
    yield few_tokens(setting)


def few_tokens(setting: Setting) -> Group:
    """Forward in inference and in float32, as a server runs it."""
    unit, _, x = unit_and_ids(RECIPES["R3"], setting)
    with setting.device:
        every = ways(unit.eval(), torch.arange(FEW, device=setting.device))
    chosen = (TWIN, "eager twin, compiled", "ours, kernel by kernel", "a loop over groups", MLP, "one dense projection")
    contestants = [
        Contestant(name, partial(inferring, every[name], x[:FEW]), why_not(every[name], "forward", setting))
        for name in chosen
    ]
    goals = [] if setting.on_gpu or setting.small else [milliseconds("ours, kernel by kernel", 0.45, gpu_only=False)]
    return Group(f"R3, {FEW} tokens in inference", contestants, goals, "float32", taking_turns=True)


def inferring(way: Way, x: Tensor) -> Prepared:
    def work() -> Tensor:
        found: Tensor = way.module(x)
        return found

    return Prepared(in_plain_torch(work) if way.plain else work, around=torch.inference_mode)


BENCHMARK = Benchmark("unit", "the DeFINE unit alone beside a projection, an MLP and a loop over groups", groups)
