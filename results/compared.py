"""What the paper compares with, small: trains every model of a table, packs some, and keeps a JSON of each.

    python results/compared.py [--out results/compared] [--only NAME]

A run that has its JSON is not done again. `make results` turns the files into tables.
"""

from __future__ import annotations

import argparse
import json
import runpy
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import short_commit

from torchdefine import train
from torchdefine.files import write_json
from torchdefine.tables import quantised_table, svd_table, transform_table

HERE = Path(__file__).parent
UNTIED = {"output": {"kind": "full", "tied": "none"}}
RANK = 16
TABLES = {
    "context models": ["lstm", "gated-convolution", "tcn"],
    "embeddings": ["lstm", "slim", "projective"],
    "words from characters": ["lstm-untied-narrow", "character-cnn"],
    "output layers": ["lstm-untied", "hierarchical-softmax"],
    "tables in few bits": ["lstm", "bits-4", "bits-2", "bits-1"],
    "online compression": ["lstm", "projective-twice", "low-rank", "low-rank-linear"],
}
"""The runs of each table; the first is what the others are compared with."""


def example(name: str, out: Path) -> Any:
    return runpy.run_path(str(HERE.parent / "examples" / f"{name}.py"))["main"](["--out", str(out)])["run"]


def recipe(name: str, changes: dict[str, Any], out: Path) -> Any:
    return train(f"compared/{name}", out=out, verbose=False, **changes)


def small_runs(folder: Path) -> dict[str, Any]:
    """How each run is made, given its folder. Those that start from `lstm` find it in ``folder``."""
    start = {"train": {"start_from": str(folder / "lstm")}}
    narrow = {"embedding": {"kind": "projective", "map_dim": 22, "output_dim": 128}, **UNTIED}
    examples = ("gated_convolution", "tcn", "character_cnn", "hierarchical_softmax")
    return {
        "lstm": partial(recipe, "lstm", {}),
        **{name.replace("_", "-"): partial(example, name) for name in examples},
        "slim": partial(recipe, "slim", {}),
        "projective": partial(recipe, "projective", {}),
        **{f"bits-{bits}": partial(recipe, "lstm", {"embedding": {"bits": bits}}) for bits in (2, 1, 4)},
        "low-rank": partial(recipe, "low-rank", start),
        "low-rank-linear": partial(recipe, "projective", start),
        "projective-twice": partial(recipe, "projective", {"train": {"steps": 800, "eval_every": 800}}),
        "lstm-untied": partial(recipe, "lstm", UNTIED),
        "lstm-untied-narrow": partial(recipe, "lstm", narrow),
    }


def packed(run: Any) -> Iterator[dict[str, Any]]:
    """The trained table with fewer bits and at low rank, without any further training: bytes and test perplexity."""
    counts, rows = run.token_counts(), run.embedding.table()
    tables = {}
    for bits in (4, 3, 2, 1):
        tables[f"int{bits}"] = quantised_table(rows, bits, rows.shape[1])
        tables[f"bits, as int{bits}"] = transform_table(rows, tables[f"int{bits}"].stored_bytes, counts=counts)
    tables[f"SVD {RANK}"] = svd_table(rows, RANK)
    for name, table in tables.items():
        run.embedding.look_up(table)
        yield {"name": name, "bytes": table.stored_bytes, "test_perplexity": run.evaluate("test").perplexity}
    run.embedding.look_up(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "compared")
    parser.add_argument("--runs", type=Path, default=Path(tempfile.gettempdir()) / "torchdefine-compared")
    parser.add_argument("--only", default="", help="the run of this name")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, make in small_runs(options.runs).items():
        path = options.out / f"{name}.json"
        if path.exists() or options.only not in ("", name):
            continue
        run = make(options.runs / name)
        after = {"packed": list(packed(run))} if name == "lstm" else {}
        plain = json.dumps({**run.result, "shared_device": True, **after}).replace(str(options.runs), "runs")
        write_json(path, json.loads(plain))
        print(name, f"{run.result['test_perplexity']:.2f}", flush=True)


def compared_section(folder: Path) -> str:
    """The tables of all groups, and where the runs come from."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    if not found:
        return ""
    lines = [
        "## compared",
        "",
        "What the paper compares with. [Other methods](../docs/other-methods.md) tells how to use each.",
        "",
    ]
    for title, names in TABLES.items():
        lines += [f"### {title.capitalize()}", "", "| run | recipe | parameters | in tables | steps | valid | test |"]
        lines += ["|---|---|---:|---:|---:|---:|---:|"]
        lines += [row(name, found[name]) for name in names if name in found]
        if title in ("tables in few bits", "online compression"):
            wanted = "SVD" if title == "online compression" else "int"
            lines += [packed_row(one) for one in found["lstm"]["packed"] if wanted in one["name"]]
        lines.append("")
    any_run = found["lstm"]
    facts = (
        f"text {any_run['data']['corpus']}, the 3,000 most frequent words; seed {any_run['seed']}; a model that only "
        f"counts words has a test perplexity of {any_run['test_unigram_perplexity']:.1f}",
        f"{any_run['precision']} on {any_run['hardware']['cpu']}, torch {any_run['versions']['torch']}",
        "commits " + ", ".join(sorted({short_commit(one["commit"]) for one in found.values()})),
        "one seed, not tuned: differences of a few percent mean nothing",
    )
    return "\n".join([*lines, "All rows: " + "; ".join(facts) + ".", ""])


def row(name: str, result: dict[str, Any]) -> str:
    sizes = result["parameters"]
    unigram = result["test_unigram_perplexity"]
    assert result["test_perplexity"] < unigram, f"{name} is above the unigram model"
    cells = [f"`{result['recipe']}`", f"{sizes['total']:,}", f"{sizes['input_output']:,}", f"{result['steps']:,}"]
    return "| " + " | ".join([name, *cells, *(f"{result[f'{s}_perplexity']:.2f}" for s in ("valid", "test"))]) + " |"


def packed_row(one: dict[str, Any]) -> str:
    made = one["name"].replace("bits, as ", "bits at the size of ")
    cells = (f"lstm, packed after training: {made}, {one['bytes']:,} bytes", *[""] * 5)
    return "| " + " | ".join([*cells, f"{one['test_perplexity']:.2f}"]) + " |"


if __name__ == "__main__":
    main()
