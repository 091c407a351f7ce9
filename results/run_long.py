"""Train the long runs of long_runs.yaml, group by group, and keep a JSON of each with what is measured after it.

    python results/run_long.py ptb-standard --data FOLDER [--also FOLDER …] [--out results/long]

FOLDER has the corpora that the groups name. A row that has its JSON is not run again, and one that was broken off goes
on from its last checkpoint. `--also` are further texts or bitexts that every model of the group is evaluated on.
`make results` turns the files into a table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from inference_table import measured_rows
from old_names import read_run
from refusing import run_or_refuse

from torchdefine import Run, load_run, train
from torchdefine.errors import UserError
from torchdefine.files import write_json
from torchdefine.recipe import load_recipe, merged
from torchdefine.run import average_run
from torchdefine.training import Diverged
from torchdefine.training.progress import LineReporter

HERE = Path(__file__).parent
OWN = ("name", "recipe", "takes", "after")
PACKED = ("computed", "cached, float32", "cached, float16", "codes 32 × 16", "bits")


class LongRun(NamedTuple):
    """A row of long_runs.yaml."""

    name: str
    group: str
    corpus: str
    recipe: str
    changes: dict[str, Any]
    takes: list[str]
    after: list[str]

    @property
    def file(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()) + ".json"


def described() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((HERE / "long_runs.yaml").read_text())
    return found


def long_runs() -> Iterator[LongRun]:
    for group, said in described()["groups"].items():
        for row in said["rows"]:
            changes = {name: value for name, value in row.items() if name not in OWN}
            takes, after = row.get("takes", []), row.get("after", [])
            yield LongRun(row["name"], group, said["corpus"], row["recipe"], changes, takes, after)


def settings_of_the_best(run: LongRun, out: Path) -> dict[str, Any]:
    """What the row says, and what the best of the rows says that it takes from."""
    if not run.takes:
        return run.changes
    tried = {row.name: row for row in long_runs() if row.name in run.takes}
    missing = [name for name, row in tried.items() if not (out / row.file).exists()]
    if missing:
        raise UserError(f"{run.name} takes the best of {', '.join(missing)}, which have not run: run them first.")
    results = {name: read_run(out / row.file) for name, row in tried.items()}
    finished = {name: result["valid_perplexity"] for name, result in results.items() if "diverged" not in result}
    if not finished:
        raise UserError(f"{run.name} takes the best of {', '.join(tried)}, but all of them diverged.")
    best = tried[min(finished, key=lambda name: finished[name])]
    return merged(best.changes, run.changes)


def run_one(run: LongRun, options: argparse.Namespace) -> dict[str, Any]:
    """What the JSON of a row says: the run's result, its scores elsewhere, and what was measured after it."""
    place = {"name": run.name, "group": run.group}
    data = {"data": {"corpus": str(options.data / run.corpus)}}
    changes = merged(merged(data, settings_of_the_best(run, options.out)), options.changes)
    folder, reporter = folder_of(run, changes, options.runs), LineReporter(seconds_between=20)
    try:
        trained = train(run.recipe, out=folder, resume=folder.exists(), reporter=reporter, **changes)
    except Diverged as error:  # that is a result too, and the next rows want to run
        settings = load_recipe(run.recipe, changes).to_plain()
        return {**place, "recipe": run.recipe, "settings": settings, "diverged": str(error)}
    record = {**trained.result, **place, "also": scores_elsewhere(trained, options.also)}
    record["after"] = {name: AFTER[name](trained, options.also) for name in run.after}
    if not options.keep:
        shutil.rmtree(folder)
    return record


def folder_of(run: LongRun, changes: dict[str, Any], runs: Path) -> Path:
    """Of its own for all settings: a run that was broken off goes on under the same ones only."""
    settings = hashlib.sha256(json.dumps([run.recipe, changes], sort_keys=True).encode()).hexdigest()
    return runs / f"{Path(run.file).stem}-{settings[:12]}"


def scores_elsewhere(run: Run, texts: list[Path]) -> dict[str, Any]:
    """How a model does on the test texts of other corpora."""
    evaluated: Any = run
    return {text.resolve().name: evaluated.evaluate("test", data=text).to_dict() for text in texts}


def with_neural_cache(run: Any, _: list[Path]) -> dict[str, Any]:
    """Perplexities with the neural cache that is best on the validation text."""
    cache = run.tune_cache()
    found = {split: run.evaluate(split, cache=cache).to_dict() for split in ("valid", "test")}
    return {"neural_cache": asdict(cache), **found}


def packed(run: Run, _: list[Path]) -> list[dict[str, Any]]:
    """Vectors computed, cached and packed: bytes, perplexity and milliseconds of each."""
    return list(measured_rows(run, PACKED))


def averaged(run: Run, texts: list[Path]) -> dict[str, Any]:
    """The scores of the mean of the last checkpoints, here and elsewhere."""
    folder, steps = average_run(run.folder.path)
    mean: Any = load_run(folder.path, checkpoint="average")
    return {"steps": steps, "test": mean.evaluate("test").to_dict(), "also": scores_elsewhere(mean, texts)}


AFTER: dict[str, Callable[[Any, list[Path]], Any]] = {
    "neural-cache": with_neural_cache,
    "packed": packed,
    "averaged": averaged,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="GROUP", help=", ".join(described()["groups"]))
    parser.add_argument("--data", type=Path, required=True, help="the folder that has the corpora")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="folders with further test texts")
    parser.add_argument("--out", type=Path, default=HERE / "long")
    parser.add_argument("--runs", type=Path, default=Path("runs/long"))
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders, not only their JSON")
    parser.add_argument("--changes", type=yaml.safe_load, default={}, help="settings for all, as YAML, for a trial")
    options = parser.parse_args()
    if unknown := set(options.groups) - described()["groups"].keys():
        raise UserError(f"There is no group {', '.join(sorted(unknown))}: use {', '.join(described()['groups'])}.")
    if options.changes and options.out == HERE / "long":
        raise UserError("Rows with --changes are a trial: say with --out where their files go.")
    options.out.mkdir(parents=True, exist_ok=True)
    for run in (run for group in options.groups for run in long_runs() if run.group == group):
        path = options.out / run.file
        if not path.exists():
            print(f"{run.name}:", flush=True)
            write_json(path, run_one(run, options))


if __name__ == "__main__":
    run_or_refuse(main)
