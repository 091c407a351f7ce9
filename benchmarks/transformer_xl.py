"""Transformer-XL in one process: whole training steps of several recipes, and attention beside the textbook's.

On a GPU, `python -m benchmarks.transformer_xl` measures steps of txl/projective-128 and txl/define-128 as they are
trained (60 streams of 150 tokens, memory of 150, bf16; forward, backward, clipping, optimiser) and appends a dated
row to results/benchmarks/transformer_xl.jsonl. On a CPU, `--streams 2 --length 32 --layers 2` is a size to wait for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.embedding import timed
from torchdefine.analysis.tables import print_table
from torchdefine.build import VocabularyFacts, build_language_model
from torchdefine.context import TransformerXL
from torchdefine.context.relative_attention import RelativeAttention, sinusoids
from torchdefine.data import TokenStreams, encode_corpus, resolve_corpus
from torchdefine.models import LanguageModel
from torchdefine.recipe import Recipe, load_recipe
from torchdefine.training.environment import describe_environment
from torchdefine.training.optimizers import make_optimizer
from torchdefine.training.precision import Precision

RESULTS = Path(__file__).parent.parent / "results" / "benchmarks" / "transformer_xl.jsonl"


def textbook_attention(attention: RelativeAttention, model: TransformerXL, seen: Tensor, queries: int) -> Tensor:
    """The same mathematics as it is usually written: scores in full, shifted by a copy, masked by another."""
    heads, width, keys = attention.heads, attention.head_dim, seen.shape[1]
    to_query, to_key, to_value, to_distance = attention.inward.weight.chunk(4)
    vectors = sinusoids(torch.arange(keys - 1, -1, -1, device=seen.device), seen.shape[-1], torch.float32)

    def split(x: Tensor, weight: Tensor) -> Tensor:
        return (x.to(seen.dtype) @ weight.T.to(seen.dtype)).unflatten(-1, (heads, width))

    q, k, v = split(seen[:, -queries:], to_query), split(seen, to_key), split(seen, to_value)
    content = torch.einsum("bihd,bjhd->bhij", q + model.content_bias.to(q.dtype), k)
    place = torch.einsum(
        "bihd,jhd->bhij", q + model.distance_bias.to(q.dtype), split(vectors, to_distance)
    )  # (B, H, T, K)
    padded = torch.cat((place.new_zeros(*place.shape[:3], 1), place), -1)  # (B, H, T, K + 1)
    place = padded.view(*place.shape[:2], keys + 1, queries)[:, :, 1:].reshape(place.shape)
    ahead = torch.ones(queries, keys, dtype=torch.bool, device=seen.device).triu(1 + keys - queries)
    weights = ((content + place) / math.sqrt(width)).masked_fill(ahead, -math.inf).softmax(-1)
    mixed = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
    return mixed @ attention.outward.weight.T.to(seen.dtype)


def measure_attention(recipe: Recipe, device: torch.device, repeats: int) -> dict[str, dict[str, Any]]:
    """One attention layer of a recipe, forward and backward, in both ways; they must agree first."""
    streams, length, memory = recipe.train.batch_size, recipe.train.length, recipe.context.memory
    with torch.device(device):
        model = build_language_model(recipe, VocabularyFacts(1000)).context
    assert isinstance(model, TransformerXL)
    attention = model.layers[0].attention
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    seen = torch.randn(streams, memory + length, model.input_dim, device=device, dtype=dtype, requires_grad=True)
    filled = torch.full((1,), memory, device=device)

    def ours() -> Tensor:
        around = model._surroundings(seen[:, memory:], memory, filled)
        return attention(seen, around)

    ways: dict[str, Callable[[], Tensor]] = {
        "textbook": lambda: textbook_attention(attention, model, seen, length),
        "ours": ours,
    }
    torch.testing.assert_close(ways["ours"](), ways["textbook"](), rtol=0.05, atol=0.05)
    rows = {}
    for name, way in ways.items():
        _reset_peak(device)
        milliseconds = timed(lambda way=way: way().sum().backward(), device, repeats)  # type: ignore[misc]
        rows[name] = {"median_ms": statistics.median(milliseconds), "peak_gib": _peak(device)}
    return rows


class Step:
    """A training step of a recipe on one segment of real text after the other."""

    def __init__(self, recipe: Recipe, tokens: np.ndarray, device: torch.device, compiled: bool) -> None:
        torch.manual_seed(1)
        size = max(recipe.data.vocabulary_size or 0, int(tokens.max()) + 1)
        with torch.device(device):
            self.model: LanguageModel = build_language_model(recipe, VocabularyFacts(size))
        if compiled:
            self.model.compile_parts()
        self.recipe = recipe
        self.precision = Precision(recipe.train.precision, device)
        self.parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(self.parameters, recipe.optim, device)
        self.streams = TokenStreams(tokens, recipe.train.batch_size, device, 0)
        self.state = self.model.initial_state(recipe.train.batch_size)
        self.position = 0

    def __call__(self) -> None:
        length = self.recipe.train.length
        start = self.position % (self.streams.length // length) * length
        self.position += 1
        inputs, targets = self.streams.segment(start, length)
        hint = self.model.host_hint(self.streams.host_targets(start, length))
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision.autocast():
            hidden, self.state = self.model.hidden(inputs, self.state)
            loss = self.model.output.loss(hidden, targets, hint=hint)
        loss.backward()
        clip_grad_norm_(self.parameters, self.recipe.optim.clip or math.inf)
        self.optimizer.step()


def measure_steps(
    recipes: list[Recipe], text: str, device: torch.device, repeats: int, compiled: bool
) -> dict[str, dict[str, Any]]:
    corpus = encode_corpus(resolve_corpus(text))
    tokens = np.asarray(corpus.splits["train"].tokens)
    rows: dict[str, dict[str, Any]] = {}
    for recipe in recipes:
        _reset_peak(device)
        step = Step(recipe, tokens, device, compiled)
        with step.precision.matmul_mode():
            for _ in range(3):
                step()  # the memory fills, kernels are chosen
            milliseconds = timed(step, device, repeats)
        rows[recipe.name] = {
            "parameters": step.model.parameters_by_part()["total"],
            "median_ms": statistics.median(milliseconds),
            "spread_ms": max(milliseconds) - min(milliseconds),
            "peak_gib": _peak(device),
            "precision": step.precision.name,
        }
        del step
    return rows


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def _cells(row: dict[str, Any], *names: str) -> list[str]:
    return ["–" if row[name] is None else f"{row[name]:.2f}" for name in names]


def print_rows(steps: dict[str, dict[str, Any]], attention: dict[str, dict[str, Any]], note: str) -> None:
    print_table(
        ["training step of", "M parameters", "ms", "spread ms", "peak GiB"],
        [
            [name, f"{row['parameters'] / 1e6:.2f}", *_cells(row, "median_ms", "spread_ms", "peak_gib")]
            for name, row in steps.items()
        ],
        note,
    )
    print_table(
        ["attention layer, forward + backward", "ms", "peak GiB"],
        [[name, *_cells(row, "median_ms", "peak_gib")] for name, row in attention.items()],
        "The textbook's way keeps the scores in full, and copies them to shift and to mask them.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["txl/projective-128", "txl/define-128"])
    parser.add_argument("--data", default="wikitext-2-shuffled", help="real text to take the ids from")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--streams", type=int, default=60)
    parser.add_argument("--length", type=int, default=150, help="of the segments and of the memory")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--compile", action="store_true", help="embedding and layers through torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    changes: dict[str, Any] = {
        "train": {"batch_size": options.streams, "length": options.length},
        "context": {"memory": options.length, "layers": options.layers},
    }
    recipes = [load_recipe(name, changes) for name in options.recipes]
    steps = measure_steps(recipes, options.data, device, options.repeats, options.compile)
    one_layer = {**changes, "context": {"memory": options.length, "layers": 1}, "output": {"kind": "full"}}
    attention = measure_attention(load_recipe(options.recipes[-1], one_layer), device, options.repeats)
    shape = {name: getattr(options, name) for name in ("streams", "length", "layers", "repeats")}
    print_rows(steps, attention, f"Medians: {', '.join(f'{name} {value}' for name, value in shape.items())}.")
    record = {
        "date": datetime.date.today().isoformat(),
        **shape,
        "compiled": options.compile,
        "text": Path(options.data).name,
        **describe_environment(device),
        "steps": steps,
        "attention": attention,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(f"Appended to {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}.")


if __name__ == "__main__":
    main()
