"""Time a training step of every row of stages, alone on the device, for rows that trained beside others.

    PYTHONPATH=. python results/time_rows.py decisive depth [--data wikitext-2] [--out results/wiki78m]

A step is forward, backward, clipping and optimiser on one batch again and again, as in `python -m benchmarks steps`.
Writes speeds.json into the folder of the rows' results; `make results` takes numbers from there where a row has none.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.measuring import Contestant, Setting, measure
from benchmarks.steps import Place, our_step, text_batch
from benchmarks.texts import WIKIPEDIA_SIZE
from refusing import run_or_refuse
from run_stage import HERE, Row, rows_of

from torchdefine.errors import UserError
from torchdefine.files import read_json, write_json
from torchdefine.recipe import load_recipe
from torchdefine.run.environment import describe_environment

SPEEDS = "speeds.json"


def time_stage(stage: str, out: Path, setting: Setting) -> None:
    """Time the rows of a stage, each into the file as soon as it is known; other stages stay there as they were."""
    path = out / SPEEDS
    facts = {"vocabulary": WIKIPEDIA_SIZE, "text": Path(setting.data).name, **describe_environment(setting.device)}
    rows: dict[str, Any] = {}
    for row in rows_of(stage, out):
        if row.name not in rows:  # all seeds are equally fast
            rows[row.name] = time_row(row, setting)
            print(f"{stage}, {row.name}: {rows[row.name]['ms']:.2f} ms", flush=True)
            others = read_json(path)["stages"] if path.exists() else {}
            write_json(path, {"stages": {**others, stage: {**facts, "rows": rows}}})


def time_row(row: Row, setting: Setting) -> dict[str, Any]:
    recipe = load_recipe(row.recipe, row.changes)
    place = Place(WIKIPEDIA_SIZE, text_batch(recipe, WIKIPEDIA_SIZE, setting), setting.device)
    (found,) = measure([Contestant(row.name, partial(our_step, recipe, place, recorded=True))], setting)
    return {"ms": found.ms, "q1_ms": found.q1_ms, "q3_ms": found.q3_ms, "tokens": place.batch.tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", metavar="STAGE")
    parser.add_argument("--data", default=Setting.data, help="the text that batches are taken from")
    parser.add_argument("--out", type=Path, default=HERE / "wiki78m", help="the folder of the rows' results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("Speeds are told of a GPU, and there is none here.")
    setting = Setting(torch.device("cuda"), repeats=10, data=options.data)
    for stage in options.stages:
        time_stage(stage, options.out, setting)


if __name__ == "__main__":
    run_or_refuse(main)
