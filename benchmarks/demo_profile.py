"""Training steps of the demo's models, and which kinds of kernels their time goes to, by torch's profiler."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import Contestant, Goal, Group, Prepared, Rows, Setting, Work
from benchmarks.records import Benchmark
from torchdefine.build import VocabularyFacts, build_language_model, open_corpus
from torchdefine.data import TokenStreams
from torchdefine.recipe import load_recipe
from torchdefine.training.batches import TextBatches
from torchdefine.training.memory import keep_freed_memory
from torchdefine.training.optimizers import make_optimizer
from torchdefine.training.precision import Precision
from torchdefine.training.step import StepParts, TrainingStep

RECIPES = ("demo/standard", "demo/adaptive-scaled", "demo/adaptive-projection", "demo/adaptive-define")
PROFILED_STEPS = 20
KINDS = {
    "matrix products": ("mm", "bmm", "addmm", "addmv", "matmul", "gemm"),
    "LSTM": ("rnn", "lstm"),
    "softmax and loss": ("softmax", "amax", "gather", "scatter", "TotalLoss", "logsumexp"),
    "tables": ("embedding", "index_select", "index_add", "argsort", "sort"),
    "optimiser": ("adam", "sgd", "Optimizer", "vector_norm", "foreach", "clip"),
    "dropout": ("bernoulli", "dropout"),
    "activations and norms": ("gelu", "layer_norm", "tanh", "sigmoid"),
}
"""Names of kernels by parts of them; the first kind that fits takes a kernel."""
WANTED = ("matrix products", "LSTM")


def kind_of(kernel: str) -> str:
    name = kernel.removeprefix("aten::")
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other kernels")


def shares_of(work: Work) -> dict[str, float]:
    """How the time of a few calls divides by kind of kernel; what no kernel accounts for is the host's own."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        started = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            work()
        seconds = time.perf_counter() - started
    spent: Counter[str] = Counter()  # microseconds
    for event in found.key_averages():
        spent[kind_of(event.key)] += round(event.self_cpu_time_total)
    spent["host"] = max(round(1e6 * seconds) - spent.total(), 0)
    return {kind: round(part / spent.total(), 4) for kind, part in spent.most_common()}


def prepared(name: str, setting: Setting) -> Prepared:
    recipe, device = load_recipe(name), torch.device("cpu")
    corpus = open_corpus(recipe.data)
    torch.manual_seed(recipe.train.seed)
    model = build_language_model(recipe, VocabularyFacts(len(corpus.tokenization)))
    streams = TokenStreams(corpus.splits["train"].tokens, recipe.train.batch_size, device, corpus.tokenization.eos_id)
    data = TextBatches(streams, recipe.train)
    precision = Precision("fp32", device)
    optimizer = make_optimizer(model.parameters(), recipe.optim, device)
    rows = [data.rows_per_part] * recipe.train.accumulate
    step = TrainingStep(StepParts(model, model, optimizer, precision), rows, recipe.optim.clip, recorded=False)
    numbers = itertools.count()

    def work() -> None:
        step(data.batch(next(numbers)), 1e-3)

    def facts() -> dict[str, Any]:
        return {"shares": shares_of(work)}

    return Prepared(work, facts)


def groups(setting: Setting) -> Iterator[Group]:
    keep_freed_memory()  # as `torchdefine train` does
    reason = "the demo is for CPUs: use --device cpu" if setting.on_gpu else ""
    contestants = [Contestant(name, partial(prepared, name, setting), reason) for name in RECIPES]

    def goal(name: str) -> Goal:
        def value(rows: Rows) -> float:
            return sum(rows[name].facts["shares"].get(kind, 0.0) for kind in WANTED)

        return Goal(f"{name}: share of matrix products and LSTM", value, 0.85, gpu_only=False)

    note = f"16 rows of 32 tokens; shares over {PROFILED_STEPS} steps, the profiler's own time among them"
    yield Group("training steps of the demo", contestants, [goal(name) for name in RECIPES], note)


BENCHMARK = Benchmark("demo-profile", "the demo's training steps on a CPU, by kind of kernel", groups)
