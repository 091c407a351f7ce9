"""Train the small models of scale_runs.yaml and keep a JSON of each: python results/run_scales.py [--out results/scales]

A row that has its JSON is not run again, and one that another process runs is left to it. `make results` turns the files
into a table.
"""

from __future__ import annotations

import argparse
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from torchdefine import train
from torchdefine.files import write_json
from torchdefine.recipe import merged
from torchdefine.training.progress import LineReporter

HERE = Path(__file__).parent


class SmallRun(NamedTuple):
    """One row of a family with one seed."""

    family: str
    row: str
    recipe: str
    changes: dict[str, Any]

    @property
    def file(self) -> str:
        parts = (self.family, self.row, f"seed {self.changes['train']['seed']}")
        return "-".join("".join(c if c.isalnum() else "-" for c in part.lower()) for part in parts) + ".json"


def small_runs() -> Iterator[SmallRun]:
    """All runs: the first seed of every row, then the second."""
    described = yaml.safe_load((HERE / "scale_runs.yaml").read_text())
    for seed in described["seeds"]:
        for family in described["families"]:
            for row in described["rows"]:
                if row.get("only", family["name"]) == family["name"]:
                    own = {name: row[name] for name in ("plan", "norm") if name in row}
                    unit = family["projection"] if row.get("unit") == "projection" else own
                    changes = {"embedding": {"scale": row["scale"]}, "unit": unit, "train": {"seed": seed}}
                    name = ", ".join(str(row[key]) for key in ("name", "plan", "scale") if key in row)
                    yield SmallRun(family["name"], name, family["recipe"], merged(family["common"], changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "scales")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for run in small_runs():
        path = options.out / run.file
        with Path(tempfile.gettempdir(), f"torchdefine-{run.file}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if path.exists():
                continue
            print(f"{run.family}: {run.row}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                reporter = LineReporter(seconds_between=30)
                result = train(run.recipe, out=Path(folder) / "run", reporter=reporter, **run.changes).result
            write_json(path, {"family": run.family, "row": run.row, **result})


if __name__ == "__main__":
    main()
