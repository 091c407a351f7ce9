"""Whole AWD-LSTM training steps on a GPU: ours, recorded and not, beside a plain loop over stock modules in one run.

    python -m benchmarks.awd_lstm            # appends a dated row to results/benchmarks/awd_lstm.jsonl

The shape is that of the Penn Treebank recipe: three layers of 1150, batch 20, 70 tokens, 10,000 words.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.analysis.tables import print_table
from torchdefine.build import VocabularyFacts, build_language_model
from torchdefine.recipe import load_recipe
from torchdefine.training.batches import Batch, Part
from torchdefine.training.environment import describe_environment
from torchdefine.training.optimizers import make_optimizer
from torchdefine.training.precision import Precision
from torchdefine.training.step import StepParts, TrainingStep

RESULTS = Path(__file__).parent.parent / "results" / "benchmarks" / "awd_lstm.jsonl"
BATCH, LENGTH, VOCABULARY = 20, 70, 10_000


class PlainAWDLSTM(nn.Module):
    """What one writes without further thought: stock layers, masks by hand, all logits at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 400)
        self.layers = nn.ModuleList(nn.LSTM(*widths) for widths in ((400, 1150), (1150, 1150), (1150, 400)))
        self.raw = nn.ParameterList(nn.Parameter(layer.weight_hh_l0.detach().clone()) for layer in self.layers)
        for layer in self.layers:
            del layer._parameters["weight_hh_l0"]
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids: Tensor, targets: Tensor, state: list) -> tuple[Tensor, list]:
        rows = self.embedding.weight.new_empty(VOCABULARY, 1).bernoulli_(0.9) / 0.9
        x = locked(F.embedding(ids, self.embedding.weight * rows), 0.4)  # (T, B, 400)
        after = []
        for index, (layer, raw, before) in enumerate(zip(self.layers, self.raw, state, strict=True)):
            layer.weight_hh_l0 = F.dropout(raw, 0.5)
            x, (h, c) = layer(x, before)
            after.append((h.detach(), c.detach()))
            if index < 2:
                x = locked(x, 0.25)
        dropped = locked(x, 0.4)
        loss = F.cross_entropy(F.linear(dropped, self.embedding.weight, self.bias).flatten(0, 1).float(), targets)
        return loss + 2 * dropped.float().square().mean() + x.float().diff(dim=0).square().mean(), after


def locked(x: Tensor, p: float) -> Tensor:
    return x * (x.new_empty(1, *x.shape[1:]).bernoulli_(1 - p) / (1 - p))


def plain_step(precision: str) -> Callable[[], object]:
    model = PlainAWDLSTM().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1.2e-6)
    mode = Precision(precision, torch.device("cuda"))
    ids, targets = tokens()
    ids, flat = ids.T.contiguous(), targets.T.reshape(-1)
    state = [
        (torch.zeros(1, BATCH, width, device="cuda"), torch.zeros(1, BATCH, width, device="cuda"))
        for width in (1150, 1150, 400)
    ]

    def step() -> None:
        nonlocal state
        optimizer.zero_grad()
        with mode.autocast():
            loss, after = model(ids, flat, state)
        mode.scaler.scale(loss).backward()
        mode.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        mode.scaler.step(optimizer)
        mode.scaler.update()
        state = [(h.to(b.dtype), c.to(b.dtype)) for (h, c), (b, _) in zip(after, state, strict=True)]

    return step


def our_step(recipe_name: str, precision: str, recorded: bool) -> Callable[[], object]:
    recipe = load_recipe(recipe_name)
    device = torch.device("cuda")
    model = build_language_model(recipe, VocabularyFacts(VOCABULARY)).to(device)
    mode = Precision(precision, device)
    optimizer = make_optimizer(model.parameters(), recipe.optim, device)
    step = TrainingStep(StepParts(model, model, optimizer, mode), [BATCH], recipe.optim.clip, recorded)
    ids, targets = tokens()
    batch = Batch([Part((ids, targets), targets.cpu().numpy())], BATCH * LENGTH)
    return lambda: step(batch, 1.0)


def tokens() -> tuple[Tensor, Tensor]:
    drawn = np.random.default_rng(0).zipf(1.2, (BATCH, LENGTH + 1)) % VOCABULARY
    ids = torch.from_numpy(drawn).long().cuda()
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def timed(step: Callable[[], object], repeats: int, at_once: int = 20) -> list[float]:
    """Milliseconds a step, each number the mean of a few that run back to back, as training does."""
    for _ in range(5):
        step()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(at_once):
            step()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start) / at_once)
    return found


def contestants() -> dict[str, Callable[[], Callable[[], object]]]:
    """The first is the measure of the ratios."""
    found: dict[str, Callable[[], Callable[[], object]]] = {}
    for precision in ("tf32", "fp32", "bf16", "fp16"):
        found[f"plain loop, {precision}"] = lambda p=precision: plain_step(p)
    for precision in ("tf32", "bf16", "fp16"):
        for recorded in (False, True):
            name = f"ours, {precision}, {'recorded' if recorded else 'kernel by kernel'}"
            found[name] = lambda p=precision, r=recorded: our_step("ptb/awd-lstm", p, r)
    found["ours with DeFINE, bf16, recorded"] = lambda: our_step("ptb/awd-lstm-define", "bf16", True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file that the row is appended to")
    options = parser.parse_args()
    rows = {}
    for name, make in contestants().items():
        torch.manual_seed(0)
        torch.cuda.reset_peak_memory_stats()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plain loop's weights are not one piece of memory, and cuDNN says so
            precision = name.split(", ")[1]
            with Precision(precision, torch.device("cuda")).matmul_mode():
                found = timed(make(), options.repeats)
        rows[name] = {
            "ms": statistics.median(found),
            "spread_ms": max(found) - min(found),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        print(name, rows[name], flush=True)
    first = next(iter(rows.values()))["ms"]
    print_table(
        ["step", "× faster", "ms", "spread ms", "peak GiB"],
        [
            [name, f"{first / r['ms']:.2f}", f"{r['ms']:.2f}", f"{r['spread_ms']:.2f}", f"{r['peak_gib']:.2f}"]
            for name, r in rows.items()
        ],
        f"Median of {options.repeats} times 20 steps; batch {BATCH}, {LENGTH} tokens, three layers of 1150.",
    )
    record = {
        "date": datetime.date.today().isoformat(),
        "repeats": options.repeats,
        **describe_environment(torch.device("cuda")),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
