"""Run the rows of stages one after another, on equal data, steps and schedule, and keep a JSON of each.

    python results/run_stage.py tuning unit-choices decisive --data wiki78m/ [--also wikitext-103/] [--seconds 600]

Stages are the files of results/stages. A row that has its JSON already is not run again, unless its settings have
changed since, so a stage runs in parts: with --seconds, no row is started that would not be over in time, by how long
the slowest so far took. What has run for a row of another stage with the same settings is taken from there. Several
processes with the same --out and --runs share the rows out among them; say --shared then. `--also` is a second text
that every model is evaluated on, with its own vocabulary. `make results` turns the files into tables.

A stage, or a row of it, that `takes` other stages gets the settings of their best rows on the validation text, and
cannot run before them.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from old_names import read_run, settings_of
from refusing import run_or_refuse

from torchdefine import Run, train
from torchdefine.data import find_splits, resolve_corpus
from torchdefine.errors import UserError
from torchdefine.files import write_json
from torchdefine.recipe import Recipe, load_recipe, merged, recipe_of
from torchdefine.training import Diverged
from torchdefine.training.progress import LineReporter

HERE = Path(__file__).parent
SECTIONS = (
    *("data", "embedding", "unit", "context", "output", "loss", "optim", "schedule", "averaging", "train", "eval"),
)


@dataclass(frozen=True)
class Row:
    """One run of a stage."""

    stage: str
    name: str
    recipe: str
    seed: int
    changes: dict[str, Any]

    @property
    def steps(self) -> int:
        return int(self.changes["train"]["steps"])

    @property
    def file(self) -> str:
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return f"{plain}-seed-{self.seed}.json"


def rows_of(stage: str, out: Path) -> list[Row]:
    """The runs of a stage, first seeds before second ones; ``out`` has the results of the stages that it takes."""
    described = read_stage(stage)
    shared = merged(yaml.safe_load((HERE / "stages" / "_schedule.yaml").read_text()), described.get("common", {}))
    shared = merged(shared, best_settings(described.get("takes", ()), out))
    steps = described["steps"]
    found = []
    for row in described["rows"]:
        own = merged(merged(shared, best_settings(row.get("takes", ()), out)), own_settings(row))
        for place, seed in enumerate(row.get("seeds", [1])):
            run = {"steps": steps, "epochs": None, "seed": seed, "checkpoint_every": steps}
            run["eval_every"] = max(steps // 10, 1)
            found.append((place, Row(stage, row["name"], row["recipe"], seed, merged(own, {"train": run}))))
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def read_stage(stage: str) -> dict[str, Any]:
    path = HERE / "stages" / f"{stage}.yaml"
    if not path.exists():
        known = sorted(p.stem for p in path.parent.glob("[a-z]*.yaml"))
        raise UserError(f"There is no stage {stage!r}: use one of {', '.join(known)}.")
    described: dict[str, Any] = yaml.safe_load(path.read_text())
    for row in described["rows"]:
        unknown = sorted(row.keys() - {"name", "recipe", "seeds", "takes", *SECTIONS})
        if unknown:
            raise UserError(f"The row {row['name']!r} of {path} has {', '.join(unknown)}, which nothing reads.")
    return described


def taken_by(stage: str) -> set[str]:
    """The stages that have to be over before this one can run."""
    described = read_stage(stage)
    return {taken for part in (described, *described["rows"]) for taken in part.get("takes", ())}


def own_settings(row: dict[str, Any]) -> dict[str, Any]:
    return {section: row[section] for section in SECTIONS if section in row}


def best_settings(stages: Sequence[str], out: Path) -> dict[str, Any]:
    """What the best rows of finished stages say for themselves."""
    found: dict[str, Any] = {}
    for stage in stages:
        rows = {row["name"]: row for row in read_stage(stage)["rows"]}
        found = merged(found, own_settings(rows[best_row(stage, out)]))
    return found


def best_row(stage: str, out: Path) -> str:
    """The name of the row of a finished stage that has the least perplexity on the validation text."""
    rows = {row["name"]: row for row in read_stage(stage)["rows"]}
    runs = [read_run(path) for path in sorted((out / stage).glob("*.json"))]
    runs = [run for run in runs if run["row"] in rows and agrees(rows[run["row"]], run["settings"])]
    missing = rows.keys() - {run["row"] for run in runs}
    if missing:
        raise UserError(
            f"The best row of the stage {stage} is wanted, but {out / stage} has no result of "
            f"{', '.join(sorted(missing))} with the settings that it has now: run that stage first."
        )
    finished = [run for run in runs if "diverged" not in run]
    if not finished:
        raise UserError(f"The best row of the stage {stage} is wanted, but all of its rows diverged.")
    best: str = min(finished, key=lambda run: run["valid_perplexity"])["row"]
    return best


def has_run(row: Row, options: argparse.Namespace) -> bool:
    """Whether there is a JSON of it with the settings that it has now."""
    path = options.out / row.stage / row.file
    return path.exists() and is_run_of(row, read_run(path), options)


def same_run(row: Row, options: argparse.Namespace) -> dict[str, Any] | None:
    """What the run of another row says that had the same recipe, settings and texts, if there is one."""
    for path in sorted(options.out.glob("*/*.json")):
        run = read_run(path)
        if is_run_of(row, run, options):
            return {**run, "stage": row.stage, "row": row.name, "ran_for": f"{run['row']} of {run['stage']}"}
    return None


def is_run_of(row: Row, run: dict[str, Any], options: argparse.Namespace) -> bool:
    """Whether this row would be run so."""
    if run["recipe"] != row.recipe:
        return False
    if what_matters(recipe_of(run["settings"])) != what_matters(wanted_recipe(row, options)):
        return False
    return (
        "diverged" in run or not options.also or run.get("also", {}).get("corpus") == Path(options.also).resolve().name
    )


def wanted_recipe(row: Row, options: argparse.Namespace) -> Recipe:
    return load_recipe(row.recipe, changes_of(row, options))


def changes_of(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    return merged(merged({"data": {"corpus": str(options.data)}}, row.changes), options.changes)


def what_matters(recipe: Recipe) -> dict[str, Any]:
    """The settings without the recipe's own words; of the text's place only its name."""
    plain = {section: value for section, value in settings_of(recipe).items() if section in SECTIONS}
    return {**plain, "data": {**plain["data"], "corpus": Path(plain["data"]["corpus"]).resolve().name}}


def agrees(row: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether all that a row of a stage says for itself is so in the settings of a run, as far as its kinds have it."""
    recipe = recipe_of(settings)
    own = {
        section: {name: value for name, value in given.items() if hasattr(getattr(recipe, section), name)}
        for section, given in own_settings(row).items()
    }
    return bool(recipe_of(merged(settings, own)) == recipe)


def settings_hash(row: Row, options: argparse.Namespace) -> str:
    settings = json.dumps([row.recipe, wanted_recipe(row, options).to_plain()], sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


@contextmanager
def claimed(row: Row, options: argparse.Namespace) -> Iterator[bool]:
    """Whether a run is this process's: False while another has one with the same settings. Claims go with processes."""
    options.runs.mkdir(parents=True, exist_ok=True)
    with (options.runs / f"{settings_hash(row, options)}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = True
        except BlockingIOError:
            ours = False
        yield ours


def run_row(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate one row; what its JSON says."""
    # With other --changes a row is another run, which another process may be training now.
    folder = options.runs / row.stage / f"{Path(row.file).stem}-{settings_hash(row, options)}"
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was broken off
    changes = changes_of(row, options)
    place = {"stage": row.stage, "row": row.name}
    try:
        run = train(row.recipe, out=folder, reporter=LineReporter(seconds_between=15), **changes)
    except Diverged as error:  # that is a result too, and the next rows want to run
        settings = load_recipe(row.recipe, changes).to_plain()
        return {**place, "recipe": row.recipe, "seed": row.seed, "settings": settings, "diverged": str(error)}
    record = {**run.result, **place, "input_rms": input_rms(run), "shared_device": options.shared}
    if options.also:
        record["also"] = other_text(run, options.also)
    if not options.keep:
        shutil.rmtree(folder)
    return record


def input_rms(run: Run) -> float:
    """How large the numbers are that the LSTM reads: their root mean square over the training text."""
    table = run.embedding.table().double()
    counts = torch.as_tensor(run.token_counts(), dtype=torch.double, device=table.device)
    return float((table.square().mean(1) @ counts / counts.sum()).sqrt())


def other_text(run: Run, text: Path) -> dict[str, Any]:
    """How a model does on a text of another corpus, by split."""
    splits = find_splits(text, require_train=False)
    found = {split: run.evaluate(split, data=text).to_dict() for split in ("valid", "test") if split in splits}
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for split in found for path in splits[split]}
    return {"corpus": text.resolve().name, "files_sha256": hashes, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", metavar="STAGE", help="in the order in which they take from each other")
    parser.add_argument("--data", required=True, help="a folder with the text")
    parser.add_argument("--also", help="a second text to evaluate on")
    parser.add_argument("--out", type=Path, help="results/wiki78m by default")
    parser.add_argument("--runs", type=Path, default=Path("runs/stages"))
    parser.add_argument("--seconds", type=float, help="start no row that would not be over by then")
    parser.add_argument(
        "--shared", action="store_true", help="other work runs on the device meanwhile, so speed tells nothing"
    )
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders, not only their JSON")
    parser.add_argument(
        "--changes", type=yaml.safe_load, default={}, help="settings for all rows, as YAML, for a trial"
    )
    options = parser.parse_args()
    if options.changes and not options.out:
        raise UserError("Rows with --changes are a trial: say with --out where their files go.")
    options.out = options.out or HERE / "wiki78m"
    if options.also:  # what is wrong with it must not be found out when a row has been trained
        options.also = resolve_corpus(options.also)
        find_splits(options.also, require_train=False)
    for stage in options.stages:
        read_stage(stage)  # a name that is wrong must not be found out in the end
    clock = Clock(options.seconds)
    unfinished: set[str] = set()
    for place, stage in enumerate(options.stages):
        for taken in taken_by(stage) & set(options.stages[:place]) - unfinished:
            if finish_stage(taken, options, clock):
                unfinished.add(taken)
        if waits_for := unfinished & taken_by(stage):
            unfinished.add(stage)
            print(f"The stage {stage} waits for {', '.join(sorted(waits_for))}.", flush=True)
            continue
        waiting, _ = run_stage(stage, options, clock)
        if waiting:
            unfinished.add(stage)
            print(f"There is not enough time left, so not all has run: {', '.join(waiting)}.", flush=True)


class Clock:
    """Tells whether a row would be over in time: as the slowest of as many steps, or else as the slowest steps."""

    def __init__(self, seconds: float | None) -> None:
        self._ends = math.inf if seconds is None else time.monotonic() + seconds
        self._slowest: dict[int, float] = {}

    def has_time_for(self, steps: int) -> bool:
        by_steps = max((seconds / taken for taken, seconds in self._slowest.items()), default=0.0) * steps
        return time.monotonic() + self._slowest.get(steps, by_steps) < self._ends

    @contextmanager
    def watching(self, steps: int) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._slowest[steps] = max(self._slowest.get(steps, 0.0), time.monotonic() - started)


def run_stage(stage: str, options: argparse.Namespace, clock: Clock) -> tuple[list[str], list[str]]:
    """Run the rows that have no JSON yet; the names of those for which there is no time, and of those others run."""
    waiting, elsewhere = [], []
    for row in rows_of(stage, options.out):
        name = f"{row.name}, seed {row.seed}"
        if has_run(row, options):
            continue
        with claimed(row, options) as ours:
            if not ours:
                elsewhere.append(name)
            elif already := same_run(row, options):  # by another process perhaps, just before the claim
                write_json(options.out / row.stage / row.file, already)
                print(f"{name}, is {already['ran_for']}: {outcome(already)}", flush=True)
            elif not clock.has_time_for(row.steps):
                waiting.append(name)
            else:
                print(f"{name}:", flush=True)
                with clock.watching(row.steps):
                    record = run_row(row, options)
                write_json(options.out / row.stage / row.file, record)
                print(f"{row.name}: {outcome(record)}", flush=True)
    return waiting, elsewhere


def finish_stage(stage: str, options: argparse.Namespace, clock: Clock) -> list[str]:
    """Wait for rows that other processes have, and run what they gave up; the names of those without time."""
    while True:
        waiting, elsewhere = run_stage(stage, options, clock)
        if not elsewhere:
            return waiting
        time.sleep(1)


def outcome(record: dict[str, Any]) -> str:
    if "diverged" in record:
        return str(record["diverged"])
    return f"valid {record['valid_perplexity']:.2f}, test {record['test_perplexity']:.2f}"


if __name__ == "__main__":
    run_or_refuse(main)
