"""The demo: four small language models on the shipped text, trained alike, and compared."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torchdefine.analysis.comparison import compare_runs, print_comparison, write_report
from torchdefine.recipe import load_recipe
from torchdefine.run import load_run, train
from torchdefine.training import RunFolder
from torchdefine.training.progress import default_reporter, work_bar

MODELS = ("standard", "adaptive-scaled", "adaptive-projection", "adaptive-define")


def run_demo(out: Path) -> None:
    """Train, compare, and say where the report is. Runs that are there already are used, or finished."""
    print("Four language models, the same text, order, steps and seed; they differ only in how they embed words.\n")
    folders = []
    for number, name in enumerate(MODELS, start=1):
        recipe = f"demo/{name}"
        folder = RunFolder(out / name)
        folders.append(folder.path)
        print(f"{number}/{len(MODELS)}  {name}: {load_recipe(recipe).description}", file=sys.stderr)
        with work_bar("reading the text") as progress:
            train(
                recipe,
                out=folder.path,
                resume=folder.last.exists(),
                device="cpu",
                reporter=default_reporter(),
                progress=progress,
            )
    comparison = compare_runs(folders)
    report = out / "report.html"
    write_report(comparison, report)
    print()
    print_comparison(comparison)
    best = min(zip(folders, comparison.results, strict=True), key=lambda pair: pair[1]["valid_perplexity"])[0]
    sample = load_run(best, device="cpu").generate("The", 25, seed=3)
    print(f"\n{best.name} goes on: The {sample.strip()}…")
    print(f"\nThe report, with the curves, is in {os.path.relpath(report)}; the runs are beside it.")
