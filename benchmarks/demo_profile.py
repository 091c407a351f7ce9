"""Training steps of the demo's models, and which kinds of kernels their time goes to, by torch's profiler."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import Contestant, Goal, Group, Prepared, Rows, Setting, Work
from benchmarks.records import Benchmark
from torchdefine.data import TokenStreams
from torchdefine.embedding import VocabularyFacts
from torchdefine.recipe import load_recipe
from torchdefine.tasks.language import TextBatches, build_language_model, open_corpus
from torchdefine.training.distributed import keep_freed_memory
from torchdefine.training.precision import Precision
from torchdefine.training.step import TrainingStep

RECIPES = ("demo/standard", "demo/adaptive-scaled", "demo/adaptive-projection", "demo/adaptive-define")
ROUNDS, STEPS_A_ROUND = 7, 5
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


def kind_of(event: str) -> str:
    """Only torch's own kernels can be of a wanted kind, not what autograd does around them."""
    name = event.removeprefix("aten::")
    kinds = (kind for kind in KINDS if kind not in WANTED or event.startswith("aten::"))
    return next((kind for kind in kinds if any(part in name for part in KINDS[kind])), "other kernels")


def profiled(work: Work) -> Counter[str]:
    """Microseconds by kind of kernel of a round of calls; what no kernel accounts for is the host's own."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        seconds = seconds_of(work)
    spent: Counter[str] = Counter()
    for event in found.key_averages():
        spent[kind_of(event.key)] += round(event.self_cpu_time_total)
    spent["host"] = max(round(1e6 * seconds) - spent.total(), 0)
    return spent


def seconds_of(work: Work) -> float:
    started = time.perf_counter()
    for _ in range(STEPS_A_ROUND):
        work()
    return time.perf_counter() - started


def shares_of(work: Work) -> dict[str, Any]:
    """How the time divides by kind of kernel, in rounds by turns with the profiler and without.

    The profiler takes its time at every call, so ``shares`` make the many small ones too large. What the wanted kernels
    take of the time without a profiler is ``undisturbed``: the median over the rounds.
    """
    spent: Counter[str] = Counter()
    undisturbed = []
    for _ in range(ROUNDS):
        seconds, part = seconds_of(work), profiled(work)
        spent += part
        undisturbed.append(1e-6 * sum(part[kind] for kind in WANTED) / seconds)
    shares = {kind: round(part / spent.total(), 4) for kind, part in spent.most_common()}
    return {"shares": shares, "undisturbed": round(statistics.median(undisturbed), 4)}


def prepared(name: str, setting: Setting) -> Prepared:
    recipe, device = load_recipe(name), torch.device("cpu")
    corpus = open_corpus(recipe.data)
    torch.manual_seed(recipe.train.seed)
    model = build_language_model(recipe, VocabularyFacts(len(corpus.tokenization)))
    streams = TokenStreams(corpus.splits["train"].tokens, recipe.train.batch_size, device, corpus.tokenization.eos_id)
    data = TextBatches(streams, recipe.train)
    precision = Precision("fp32", device)
    optimizer = recipe.optim.build(model.parameters(), device)
    rows = [data.rows_per_part] * recipe.train.accumulate
    step = TrainingStep(model, model, optimizer, precision, rows, recipe.optim.clip, recorded=False)
    numbers = itertools.count()

    def work() -> None:
        step(data.batch(next(numbers)), 1e-3)

    return Prepared(work, partial(shares_of, work))


def groups(setting: Setting) -> Iterator[Group]:
    keep_freed_memory()  # as `torchdefine train` does
    reason = "the demo is for CPUs: use --device cpu" if setting.on_gpu else ""
    contestants = [Contestant(name, partial(prepared, name, setting), reason) for name in RECIPES]

    train = load_recipe(RECIPES[0]).train
    note = (
        f"{train.batch_size} rows of {train.length} tokens; shares over {ROUNDS * STEPS_A_ROUND} steps, the profiler's "
        "own time among them, and what matrix products and LSTM take of as many steps without it"
    )
    goals = [goal for name in RECIPES for goal in goals_of(name)]
    yield Group("training steps of the demo", contestants, goals, note)


def goals_of(name: str) -> list[Goal]:
    def share(rows: Rows) -> float:
        return sum(rows[name].facts["shares"].get(kind, 0.0) for kind in WANTED)

    def undisturbed(rows: Rows) -> float:
        return float(rows[name].facts["undisturbed"])

    what = f"{name}: share of matrix products and LSTM"
    return [
        Goal(what, share, 0.85, gpu_only=False),
        Goal(f"{what} without the profiler", undisturbed, 0.85, gpu_only=False),
    ]


BENCHMARK = Benchmark("demo-profile", "the demo's training steps on a CPU, by kind of kernel", groups)
