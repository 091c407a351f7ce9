"""The demo: five small language models on the shipped text, trained alike; then the best one's table in few bytes."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from torchdefine.analysis.comparison import Comparison, compare_runs
from torchdefine.analysis.report import write_report
from torchdefine.analysis.tables import print_table
from torchdefine.errors import UserError
from torchdefine.files import check_writable, write_json
from torchdefine.recipe import load_recipe
from torchdefine.run import Run, RunFolder, load_run, train
from torchdefine.run.environment import describe_environment
from torchdefine.run.train import log as training_log
from torchdefine.training.progress import default_reporter, work_bar

REPORT, TABLE = "report.html", "demo.json"
MODELS = ("standard", "standard-scaled", "adaptive-scaled", "adaptive-projection", "adaptive-define")
HEADER = ("model", "parameters, M", "table, MB", "valid", "test", "ms/step", "ms/look-up")
TOKENS, LOOK_UPS = 512, 30
"""Tokens that a look-up is timed with, as many as a step of training has, and how often."""
NOTE = (
    "Perplexities: lower is better. Table: all that a look-up needs, with the unit. The model with the best validation "
    f"perplexity is packed. A look-up is of {TOKENS} words, drawn by frequency."
)

Row = dict[str, Any]


def run_demo(out: Path) -> None:
    """Train, pack, compare, and say where the report is. Runs that are there already are used, or finished."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file, but the demo needs a folder: choose another --out.")
    if others := sorted({path.name for path in out.glob("[!.]*")} - {*MODELS, REPORT, TABLE}):
        raise UserError(f"{out} has {others[0]} in it, which is not the demo's: choose another --out.")
    report, folders = out / REPORT, [out / name for name in MODELS]
    check_writable(report)
    print(
        "Five language models with the same text, context model, order, steps and seed. They differ in their token "
        "tables.\n"
    )
    if busy := others_at_work():
        cure = "OMP_NUM_THREADS=1 may help"
        print(f"{busy}: the demo takes longer ({cure}), and its times mean little.\n", file=sys.stderr)
    _train_all(folders)
    comparison = compare_runs(folders)
    rows = _rows(comparison)
    write_json(out / TABLE, {"rows": rows, **describe_environment(torch.device("cpu"))})
    print()
    _print_rows(rows, comparison)
    with work_bar("reading the runs") as progress:
        write_report(folders, report, progress=progress)
    print(f"\nThe report, with curves, correlation maps and samples, is in {os.path.relpath(report)}.")
    print("The same models on a text of your own: torchdefine train demo/adaptive-define --data FOLDER --out runs/mine")


def _train_all(folders: list[Path]) -> None:
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        """Whether no earlier training said the same."""
        known = record.getMessage() in said
        said.add(record.getMessage())
        return not known

    training_log.addFilter(is_new)
    try:
        for number, (name, folder) in enumerate(zip(MODELS, folders, strict=True), start=1):
            recipe, resume = f"demo/{name}", RunFolder(folder).exists()
            print(f"{number}/{len(MODELS)}  {name}: {load_recipe(recipe).description}", file=sys.stderr)
            reporter = default_reporter()
            with work_bar("reading the text") as progress:
                train(recipe, out=folder, resume=resume, device="cpu", reporter=reporter, progress=progress)
    finally:
        training_log.removeFilter(is_new)


def _rows(comparison: Comparison) -> list[Row]:
    """A row for each model, and one for the best of them with its table packed."""
    rows = []
    for summary in comparison.runs:
        result, run = summary.result or {}, load_run(summary.folder.path, device="cpu")
        rows.append(
            {
                "model": summary.name,
                "parameters": result["parameters"]["total"],
                "table_bytes": 4 * sum(part.numel() for part in run.embedding.parameters()),
                "valid_perplexity": result["valid_perplexity"],
                "test_perplexity": result["test_perplexity"],
                "ms_per_step": 1e3 * result["tokens"] / result["steps"] / result["tokens_per_second"],
                "ms_per_look_up": _look_up_time(run),
            }
        )
    best = min(rows, key=lambda row: row["valid_perplexity"])
    folder = next(summary.folder.path for summary in comparison.runs if summary.name == best["model"])
    with work_bar("packing the best model's table") as progress:
        (packed,) = load_run(folder, device="cpu").compress("bits", progress=progress).values()
    run, row = load_run(folder, device="cpu", compressed=True), {"model": f"{best['model']}, packed"}
    row |= {"packed_from": best["model"], "packed_as": packed.label, "table_bytes": packed.bytes}
    for split in ("valid", "test"):
        with work_bar(f"measuring it on the {split} text") as progress:
            row[f"{split}_perplexity"] = run.measure(split, progress=progress).facts["perplexity"]
    return [*rows, {**row, "ms_per_look_up": _look_up_time(run)}]


@torch.no_grad()
def _look_up_time(run: Run) -> float:
    """Milliseconds, the least of several: what else the machine does only adds to it."""
    counts = torch.tensor(run.tokenization.counts, dtype=torch.float64)
    generator, seconds = torch.Generator().manual_seed(1), []
    for _ in range(LOOK_UPS):
        ids = torch.multinomial(counts, TOKENS, replacement=True, generator=generator)
        began = time.perf_counter()
        run.embedding(ids)
        seconds.append(time.perf_counter() - began)
    return 1e3 * min(seconds)


def cells(rows: list[Row]) -> list[list[str]]:
    """The rows as text, under ``HEADER``."""
    return [
        [
            row["model"],
            f"{row['parameters'] / 1e6:.2f}" if "parameters" in row else "–",
            f"{row['table_bytes'] / 1e6:.2f}",
            f"{row['valid_perplexity']:,.1f}",
            f"{row['test_perplexity']:,.1f}",
            f"{row['ms_per_step']:.0f}" if "ms_per_step" in row else "–",
            f"{row['ms_per_look_up']:.2f}",
        ]
        for row in rows
    ]


def _print_rows(rows: list[Row], comparison: Comparison) -> None:
    print_table(HEADER, cells(rows), NOTE)
    print()
    print("\n".join(sentences(rows)))
    unigram = (comparison.runs[0].result or {}).get("test_unigram_perplexity")
    print(f"A model that only counts words has a test perplexity of {unigram:,.1f}.")
    for warning in comparison.warnings:
        print(f"Warning: {warning}")


def sentences(rows: list[Row]) -> list[str]:
    """What each line of the table says beside the line that it is compared with."""
    first, *others = rows
    said = [f"{first['model']}: a full table. The other models are compared with it."]
    for row in others:
        beside = next((one for one in rows if one["model"] == row.get("packed_from")), first)
        times = beside["table_bytes"] / row["table_bytes"]
        size = f"{times:.1f} times smaller" if times > 1 else f"{1 / times:.1f} times larger"
        size = "of equal size" if times == 1 else size
        change = row["test_perplexity"] / beside["test_perplexity"] - 1
        than = "" if beside is first else f" than that of {beside['model']}"
        said.append(
            f"{row['model']}: a table {size}{than}, test perplexity {abs(change):.1%} "
            f"{'lower' if change < 0 else 'higher'}."
        )
    said.append("The packed table is for the input. The output layer of these models still needs the unpacked table.")
    return said


def others_at_work() -> str:
    """A warning if other programs use the cores; empty if they are free, or if the load is unknown."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f"Other programs use this machine (a load of {load:.1f} on {cores} cores)" if load > cores / 2 else ""
