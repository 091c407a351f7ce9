"""Train the small models of scale_runs.yaml and keep a JSON of each.

    python results/run_scales.py [--workers 12] [--device cpu] [--out results/scales]

Every run is a process with one thread. A run that has its JSON is not done again, and one that another process does is
left to it. `make results` turns the files into a table.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import chdir, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from filelock import FileLock, Timeout

HERE = Path(__file__).parent


class SmallRun(NamedTuple):
    """One row of a family with one seed."""

    family: str
    row: dict[str, Any]
    recipe: str
    changes: dict[str, Any]

    @property
    def file(self) -> str:
        settings = {name: self.row[name] for name in ("plan", "norm", "scale", "rate", "tied") if name in self.row}
        told = (f"{name} {value}" for name, value in settings.items())
        parts = (self.family, self.row["name"], *told, f"seed {self.changes['train']['seed']}")
        return "-".join(parts).replace(" ", "-").lower() + ".json"


def small_runs() -> Iterator[SmallRun]:
    """All runs, family by family: the first seed of every row, then the second."""
    described = yaml.safe_load((HERE / "scale_runs.yaml").read_text())
    for family in described["families"]:
        for seed in described["seeds"]:
            for row in described["rows"]:
                if family["name"] in row.get("only", [family["name"]]):
                    own = {name: row[name] for name in ("plan", "norm") if name in row}
                    unit = family["projection"] if row.get("unit") == "projection" else own
                    common, train = family["common"], {**family["common"]["train"], "seed": seed}
                    changes = {**common, "embedding": {"scale": row["scale"]}, "unit": unit, "train": train}
                    if "rate" in row:
                        changes["optim"] = {"lr": row["rate"]}
                    if "tied" in row:
                        changes["output"] = {"tied": row["tied"], **family.get(row["tied"], {})}
                    yield SmallRun(family["name"], row, family["recipe"], changes)


def done(run: SmallRun, out: Path, device: str) -> str:
    """Train a model and write its result; says what there is to say about it."""
    path, began = out.resolve() / run.file, time.monotonic()
    with suppress(Timeout), FileLock(Path(tempfile.gettempdir(), f"torchdefine-{run.file}.lock"), blocking=False):
        if not path.exists():
            write_result(run, path, device)
            return f"{run.file}: {time.monotonic() - began:.0f} s"
    return f"{run.file}: it is there, or somebody else does it"


def write_result(run: SmallRun, path: Path, device: str) -> None:
    import torch  # after its process was told to have one thread

    from torchdefine import train
    from torchdefine.data import resolve_corpus
    from torchdefine.files import write_json

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        if run.family == "translation":  # without its test text: scoring takes longer than training
            shipped = resolve_corpus("tatoeba-en-de", parallel=True)
            Path(shipped.name).mkdir()  # a folder here goes before the shipped text of its name
            for file in [*shipped.glob("train.*"), *shipped.glob("valid.*")]:
                Path(shipped.name, file.name).symlink_to(file)
        trained = train(run.recipe, out="run", device=device, verbose=False, **run.changes)
        (start,) = trained.folder.records("start")
        result = trained.result
    write_json(path, {"family": run.family, "row": run.row, "initial_rms": start["initial_rms"], **result})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "scales")
    parser.add_argument("--workers", type=int, default=1, help="how many runs at a time")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="the same for all runs of a table")
    parser.add_argument("--only", default="", help="runs whose file's name has this in it")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    runs = [run for run in small_runs() if options.only in run.file]
    fresh = get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=fresh, max_tasks_per_child=1) as pool:
        for future in [pool.submit(done, run, options.out, options.device) for run in runs]:
            print(future.result(), flush=True)


if __name__ == "__main__":
    main()
