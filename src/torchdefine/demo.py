"""The demo: five small language models on the shipped text, trained alike, and compared."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from torchdefine.analysis.comparison import compare_runs, print_comparison
from torchdefine.analysis.report import write_report
from torchdefine.errors import UserError
from torchdefine.files import check_writable
from torchdefine.recipe import load_recipe
from torchdefine.run import RunFolder, train
from torchdefine.run.train import log as training_log
from torchdefine.training.progress import default_reporter, work_bar

REPORT = "report.html"
MODELS = ("standard", "standard-scaled", "adaptive-scaled", "adaptive-projection", "adaptive-define")


def run_demo(out: Path) -> None:
    """Train, compare, and say where the report is. Runs that are there already are used, or finished."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file, but the demo needs a folder: choose another --out.")
    if others := sorted({path.name for path in out.glob("[!.]*")} - {*MODELS, REPORT}):
        raise UserError(f"{out} has {others[0]} in it, which is not the demo's: choose another --out.")
    report, folders = out / REPORT, [out / name for name in MODELS]
    check_writable(report)
    print(
        "Five language models, the same text, order, steps and seed; they differ in how they embed words, and in the "
        "softmax that is tied to that.\n"
    )
    if busy := others_at_work():
        cure = "perhaps less so with OMP_NUM_THREADS=1"
        print(f"{busy}: the demo takes longer then, {cure}, and its speeds say little.\n", file=sys.stderr)
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
    print()
    print_comparison(compare_runs(folders))
    with work_bar("looking at the runs") as progress:
        write_report(folders, report, progress=progress)
    print(f"\nThe report, with curves, correlation maps and samples, is in {os.path.relpath(report)}.")
    print("The same models on a text of your own: torchdefine train demo/adaptive-define --data FOLDER --out runs/mine")


def others_at_work() -> str:
    """A warning if other programs use the cores; empty if they are free, or if the load is unknown."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f"Other programs keep this machine busy (a load of {load:.1f} on {cores} cores)" if load > cores / 2 else ""
