"""Ours beside the alternatives in one process: the DeFINE unit, its baselines, and the cached table.

`make bench` runs it on the CPU in about a minute and appends a dated row to results/benchmarks/embedding.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from torchdefine import DeFINE, StandardMap
from torchdefine.analysis.tables import print_table
from torchdefine.data import encode_corpus, resolve_corpus
from torchdefine.embedding import DenseMLP, TokenEmbedding
from torchdefine.training.environment import describe_environment

RESULTS = Path(__file__).parent.parent / "results" / "benchmarks" / "embedding.jsonl"


def contestants(size: int, n: int, k: int, m: int) -> dict[str, nn.Module]:
    """Every way from ids to vectors m wide; the first is the measure of the ratios."""
    define = DeFINE(size, m, map_dim=n, expand_dim=k, depth=3)
    weights = sum(p.numel() for p in define.unit.parameters())  # type: ignore[union-attr]
    return {
        "nn.Embedding": nn.Embedding(size, m),
        "table + projection": TokenEmbedding(StandardMap(size, n), nn.Linear(n, m, bias=False), m),
        "table + MLP of the unit's size": TokenEmbedding(StandardMap(size, n), DenseMLP(n, weights // (n + m), m), m),
        "DeFINE, depth 3": define,
        "DeFINE, depth 7": DeFINE(size, m, map_dim=n, expand_dim=k, depth=7),
        "DeFINE, cached": define.cached(),
    }


def timed(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of each repeat, after two to warm up."""
    seconds = []
    for repeat in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if repeat >= 2:
            seconds.append(time.perf_counter() - start)
    return [1e3 * s for s in seconds]


def measure(device: torch.device, tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    corpus = encode_corpus(resolve_corpus("wikitext-2-shuffled"))
    ids = torch.from_numpy(np.asarray(corpus.splits["train"].tokens[:tokens]).astype(np.int64)).to(device)
    rows = {}
    for name, module in contestants(len(corpus.tokenization), n=128, k=1024, m=384).items():
        module.to(device)

        def forward(module: nn.Module = module) -> None:
            with torch.no_grad():
                module(ids)

        def both(module: nn.Module = module) -> None:
            module.zero_grad(set_to_none=True)
            module(ids).sum().backward()

        learns = any(p.requires_grad for p in module.parameters())
        looked_up = timed(forward, device, repeats)
        trained = timed(both, device, repeats) if learns else None
        rows[name] = {
            "parameters": sum(p.numel() for p in module.parameters()),
            "forward_ms": statistics.median(looked_up),
            "forward_spread_ms": max(looked_up) - min(looked_up),
            "both_ms": statistics.median(trained) if trained else float("nan"),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8960, help="tokens of real text a call (default: 8960)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = measure(device, options.tokens, options.repeats)
    first = next(iter(rows.values()))
    table = [
        [
            name,
            f"{row['parameters'] / 1e6:.2f}",
            f"{row['forward_ms'] / first['forward_ms']:.2f}",
            f"{row['both_ms'] / first['both_ms']:.2f}" if row["both_ms"] == row["both_ms"] else "–",
            f"{row['forward_ms']:.2f}",
            f"{row['forward_spread_ms']:.2f}",
        ]
        for name, row in rows.items()
    ]
    print_table(
        ["embedding", "M parameters", "forward ×", "forward + backward ×", "forward ms", "spread ms"],
        table,
        f"× against nn.Embedding in the same run; median of {options.repeats}, {options.tokens:,} tokens of real text.",
    )
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "date": datetime.date.today().isoformat(),
        "tokens": options.tokens,
        "repeats": options.repeats,
        **describe_environment(device),
        "rows": rows,
    }
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(f"Appended to {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}.")


if __name__ == "__main__":
    main()
