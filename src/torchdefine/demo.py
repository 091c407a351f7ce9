"""The demo: five small language models on the shipped text, trained alike, and compared."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    _check_place(out)
    print(
        "Five language models, the same text, order, steps and seed; they differ in how they embed words, and in the "
        "softmax that is tied to that.\n"
    )
    if busy := others_at_work():
        cure = "perhaps less so with OMP_NUM_THREADS=1"
        print(f"{busy}: the demo takes longer then, {cure}, and its speeds say little.\n", file=sys.stderr)
    folders = [out / name for name in MODELS]
    with _each_sentence_once():
        for number, (name, folder) in enumerate(zip(MODELS, folders, strict=True), start=1):
            print(f"{number}/{len(MODELS)}  {name}: {load_recipe(f'demo/{name}').description}", file=sys.stderr)
            _train_or_finish(f"demo/{name}", RunFolder(folder))
    print()
    print_comparison(compare_runs(folders))
    report = out / REPORT
    with work_bar("looking at the runs") as progress:
        write_report(folders, report, progress=progress)
    print(f"\nThe report, with curves, correlation maps and samples, is in {os.path.relpath(report)}.")
    print("The same models on a text of your own: torchdefine train demo/adaptive-define --data FOLDER --out runs/mine")


def _check_place(out: Path) -> None:
    """Refuse a folder that has anything but an earlier demo in it."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file, but the demo needs a folder: choose another --out.")
    others = sorted({path.name for path in out.glob("[!.]*")} - {*MODELS, REPORT})
    if others:
        raise UserError(f"{out} has {others[0]} in it, which is not the demo's: choose another --out.")
    check_writable(out / REPORT)


def _train_or_finish(recipe: str, folder: RunFolder) -> None:
    with work_bar("reading the text") as progress:
        train(
            recipe,
            out=folder.path,
            resume=folder.exists(),
            device="cpu",
            reporter=default_reporter(),
            progress=progress,
        )


@contextmanager
def _each_sentence_once() -> Iterator[None]:
    """Drop log sentences that an earlier training already said; new ones still appear."""
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        sentence = record.getMessage()
        known = sentence in said
        said.add(sentence)
        return not known

    training_log.addFilter(is_new)
    try:
        yield
    finally:
        training_log.removeFilter(is_new)


def others_at_work() -> str:
    """A warning if other programs use the cores; empty if they are free, or if the load is unknown."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f"Other programs keep this machine busy (a load of {load:.1f} on {cores} cores)" if load > cores / 2 else ""
