"""What the look-up of input vectors costs, for several ways to keep them: writes results/inference/*.json.

    python results/inference_table.py CORPUS [--steps 3500] [--runs runs/inference] [--out results/inference]

For a standard, a projective and a DeFINE Transformer-XL: trains it on CORPUS (a folder; at equal steps and data), then
evaluates it with its vectors computed, cached, and compressed in every way, and times both the whole model and the
look-up alone. One command, on a GPU a quarter of an hour; a run that exists in --runs is taken as it is.
`make results` turns the files into a table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine import Run, load_run, train
from torchdefine.data import encode_corpus, resolve_corpus
from torchdefine.errors import UserError
from torchdefine.files import write_json
from torchdefine.run.environment import describe_environment
from torchdefine.tables import METHODS, compress_embedding
from torchdefine.tables.codes import Codes
from torchdefine.tables.source import as_weights, lost_variance
from torchdefine.training.progress import LineReporter

RECIPES = ("txl/standard-384", "txl/projective-128", "txl/define-128")
STREAMS, LENGTH = 60, 64
"""Of the evaluation: short, and the same for every row."""
TIMED_STREAMS, TIMED_LENGTH, REPEATS = 10, 150, 30
NAMES = {"codes": "codes 32 × 16"}
OF_OWN_SIZE = ("int8", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--runs", type=Path, default=Path("runs/inference"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "inference")
    options = parser.parse_args()
    for recipe in options.recipes:
        folder = options.runs / recipe.split("/")[-1]
        run = trained(recipe, options, folder)
        record: dict[str, Any] = {
            "format_version": 1,
            "recipe": recipe,
            "seed": run.recipe.train.seed,
            "map_dim": run.embedding.map_dim,
            "training": {
                name: value for name, value in run.result.items() if name not in ("train_curve", "evaluation")
            },
            "protocol": f"test text in {STREAMS} streams, {LENGTH} tokens a step",
            "timed": f"{TIMED_STREAMS} streams of {TIMED_LENGTH} tokens, median of {REPEATS}, kernel by kernel",
            **describe_environment(next(run.model.parameters()).device),
            "rows": [],
        }
        for row in measured_rows(run):
            record["rows"].append(row)
            write_json(options.out / f"{folder.name}.json", record)  # what was measured stays, whatever happens


def trained(recipe: str, options: argparse.Namespace, folder: Path) -> Run:
    """The finished run of a recipe, at a schedule that all recipes share."""
    changes: dict[str, dict[str, Any]] = {
        "context": {"layers": options.layers, "input_dropout": 0.0, "hidden_dropout": 0.0, "output_dropout": 0.0},
        "schedule": {"warmup": options.steps // 10},
        "train": {
            "precision": "bf16",
            "steps": options.steps,
            "seed": 1,
            "eval_every": options.steps,
            "checkpoint_every": options.steps,
        },
        "eval": {"batch_size": STREAMS, "length": LENGTH, "public": False},
    }
    if not (folder / "result.json").exists():
        reporter = LineReporter(seconds_between=15)
        train(recipe, data=options.corpus, out=folder, reporter=reporter, **changes)
    return load_run(folder)


def measured_rows(run: Run, only: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Every way to keep the vectors, or those alone that are named: bytes, what is lost, perplexity, milliseconds."""
    embedding, counts = run.embedding, run.token_counts()
    matrix = embedding.table(dtype=torch.float32)
    weights = None if counts is None else as_weights(counts, matrix)
    for name, make in ways(run, matrix, counts):
        if only and name not in only:
            continue
        began = time.monotonic()
        try:
            table, stored = make()
        except (UserError, ImportError, AttributeError, TypeError, RuntimeError) as error:  # other people's versions
            print(f"{run.recipe.name}, {name}: not run: {error}", flush=True)
            yield {"name": name, "not_run": str(error)}
            continue
        made_in = time.monotonic() - began
        embedding.look_up(table)
        lost = [0.0 if table is None else lost_variance(embedding, matrix, mass) for mass in (None, weights)]
        evaluation = run.evaluate("test", batch_size=STREAMS, length=LENGTH)
        row = {
            "name": name,
            "bytes": stored,
            "lost": lost[0],
            "lost_by_frequency": lost[1],
            "perplexity": evaluation.perplexity,
            "loss": evaluation.loss,
            "ms_per_batch": timed(whole_model(run)),
            "look_up_ms": timed(look_up_alone(run)),
            "seconds_to_make": round(made_in, 1),
        }
        embedding.look_up(None)
        print(f"{run.recipe.name}, {name}: {row}", flush=True)
        yield row


Made = tuple[Tensor | nn.Module | None, int]
"""What the embedding looks its vectors up in (None: it computes them), and the bytes to keep."""


def ways(run: Run, matrix: Tensor, counts: list[int] | None) -> Iterator[tuple[str, Callable[[], Made]]]:
    embedding = run.embedding
    owned = [*embedding.map.parameters(), *(embedding.unit.parameters() if embedding.unit is not None else ())]  # type: ignore[attr-defined]
    yield "computed", lambda: (None, sum(p.numel() * 4 for p in owned))
    for dtype in (torch.float32, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield f"cached, {name}", lambda dtype=dtype: (matrix.to(dtype), matrix.numel() * dtype.itemsize)
    for method in METHODS:
        yield NAMES.get(method, method), lambda method=method: _packed(run, method, counts)
    yield "int8, torchao", lambda: torchao_table(matrix, 8)
    yield "int4, torchao", lambda: torchao_table(matrix, 4)


def _packed(run: Run, method: str, counts: list[int] | None) -> Made:
    """In the bytes of the codes, unless the method has a size of its own."""
    codes = Codes().usual_bytes(run.embedding.num_embeddings, run.embedding.embedding_dim)
    budget = None if method in OF_OWN_SIZE else codes
    made = compress_embedding(run.embedding, method, budget, counts=counts)
    return made.table, made.bytes


def torchao_table(matrix: Tensor, bits: int) -> Made:
    """The library's own weight-only quantisation of an ``nn.Embedding``; bytes as if its 4-bit numbers were packed."""
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_

    kinds = {8: (torch.int8, PerAxis(0)), 4: (torch.int4, PerGroup(32))}
    config = IntxWeightOnlyConfig(*kinds[bits])
    holder = nn.Sequential(nn.Embedding.from_pretrained(matrix.clone()))
    quantize_(holder, config, filter_fn=lambda module, _: isinstance(module, nn.Embedding))
    weight: Any = holder[0].weight
    stored = weight.qdata.numel() * bits // 8 + weight.scale.numel() * weight.scale.element_size()
    return holder[0], stored


def whole_model(run: Run) -> Callable[[], object]:
    """A batch of text through the model, to its loss."""
    device = next(run.model.parameters()).device
    ids = some_tokens(run, TIMED_STREAMS * (TIMED_LENGTH + 1)).view(TIMED_STREAMS, -1).to(device)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    state, hint = run.model.initial_state(TIMED_STREAMS), run.model.host_hint(targets.cpu().numpy())

    @torch.no_grad()
    def forward() -> object:
        return run.model(inputs, targets, state, hint=hint)

    return forward


def look_up_alone(run: Run) -> Callable[[], object]:
    device = next(run.model.parameters()).device
    ids = some_tokens(run, 9000).to(device)

    @torch.no_grad()
    def look_up() -> object:
        return run.embedding(ids)

    return look_up


def some_tokens(run: Run, count: int) -> Tensor:
    corpus = encode_corpus(resolve_corpus(run.recipe.data.corpus), vocabulary=run.tokenization)
    return torch.from_numpy(corpus.splits["test"].tokens[:count].astype("int64"))


def timed(work: Callable[[], object]) -> float:
    """Milliseconds, the median of many."""
    on_gpu = torch.cuda.is_available()
    found = []
    for repeat in range(REPEATS + 5):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        if repeat >= 5:
            found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


if __name__ == "__main__":
    main()
