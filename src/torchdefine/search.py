"""Search for tables, units and features that do best at equal parameters, or at equal step time: short runs by optuna.

The recipe is the reference. A candidate changes its unit, its features, its ties and its learning rate; then its table
is made as wide as the budget allows. Of the runs that are alike at a validation only the better third goes on.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torchdefine.analysis.pictures import COLOURS, drawing, save_figure
from torchdefine.errors import UserError
from torchdefine.files import check_writable, write_json, write_text
from torchdefine.modes import prepare
from torchdefine.recipe import load_recipe, merged
from torchdefine.run import train
from torchdefine.run.environment import describe_environment
from torchdefine.run.starting import wanted_recipe
from torchdefine.task import find_task
from torchdefine.training import Diverged, Trainer
from torchdefine.training.distributed import Processes
from torchdefine.training.progress import Reporter

Equal = Literal["parameters", "time"]
JOURNAL, TABLE, REPORT, PICTURE = "journal.log", "search.json", "search.md", "front.svg"
REDUCTION = 3
"""One of so many runs goes on at each validation that decides: after a ninth and a third of the steps."""
OVER = {"parameters": 1.005, "time": 1.05}
"""How far a candidate may go beyond the budget; the same work takes other times when it is timed again."""
NARROWEST, GRAIN = 8, 8
"""Of tables, whose widths are multiples that groups of layers divide."""
WARM_UP, TIMED = 3, 15
RATES = (0.7, 1.0, 1.4)
"""Of the learning rate: the projection alone is tried at all of them first, so that it is tuned like the others."""


@dataclass(frozen=True)
class Search:
    """What all candidates have in common."""

    recipe: str
    changes: dict[str, Any]
    """Of the recipe, for all candidates: the text, the steps."""
    reference: Any
    """The recipe with them."""
    data: Any
    folder: Path
    equal: Equal
    device: torch.device

    @property
    def width(self) -> int:
        """Of what the model reads."""
        model: Any = find_task(self.reference.task).count(self.reference, self.data.tokenization)[0]
        (embedding,) = model.embeddings().values()
        return int(embedding.read_dim)

    def made(self, candidate: Mapping[str, Any]) -> Any:
        """The recipe of a candidate; settings that do not go together are refused."""
        return load_recipe(self.recipe, merged(self.changes, candidate))

    def parameters(self, recipe: Any) -> int:
        model: Any = find_task(recipe.task).count(recipe, self.data.tokenization)[0]
        total: int = model.parameters_by_part()["total"]
        return total


def search(
    recipe: str,
    out: str | Path,
    *,
    data: str | Path | Mapping[str, Any] | None = None,
    trials: int = 24,
    equal: Equal = "parameters",
    device: str | None = None,
    tell: Callable[[str], None] = print,
    **overrides: Any,
) -> dict[str, Any]:
    """Try candidates until there are ``trials`` in the folder ``out``, and write its report; returns what it says.

    A search that was stopped goes on where it was: the run that was cut off is done again.
    """
    optuna = _optuna()
    common = opened(recipe, Path(out), data, equal, device, overrides)
    study = _study(optuna, common)
    while (number := _ended(study)) < trials:
        tell(f"{number + 1}/{trials}: {_try(optuna, study, study.ask(), common)}")
    return write_report(study, common)


def opened(
    recipe: str, folder: Path, data: Any, equal: Equal, device: str | None, overrides: Mapping[str, Any]
) -> Search:
    """What all candidates have in common, checked; the text is encoded."""
    check_writable(folder / TABLE)
    known, changes = wanted_recipe(recipe, data, overrides)
    if known.train.steps is None or hasattr(known, "source"):
        raise UserError(
            "A search needs a recipe with one embedding and with train.steps: set them, or take another recipe."
        )
    changes = merged(changes, {"train": {"eval_every": max(known.train.steps // REDUCTION**2, 1)}})
    reference = load_recipe(recipe, changes)
    texts, place = find_task(reference.task).open_data(reference, None), Processes().device(device)
    return Search(recipe, changes, reference, texts, folder, equal, place)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError("A search needs the package optuna: pip install 'torchdefine[search]'.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _study(optuna: Any, common: Search) -> Any:
    """The study in the folder's journal, or a new one that begins with the projection alone at three rates."""
    common.folder.mkdir(parents=True, exist_ok=True)
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    path = str(common.folder / JOURNAL)
    storage = optuna.storages.JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path)))
    study = optuna.create_study(
        storage=storage,
        study_name="search",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=common.reference.train.seed),
        pruner=optuna.pruners.SuccessiveHalvingPruner(reduction_factor=REDUCTION),
    )
    settings = {"recipe": common.recipe, "settings": common.reference.bound_settings(), "equal": common.equal}
    if study.user_attrs.get("of", settings) != settings:
        raise UserError(f"{common.folder} is a search with another recipe or budget: choose another --out.")
    if not study.trials:
        study.set_user_attr("of", settings)
        study.set_user_attr("budget", common.parameters(common.reference))
        for rate in RATES:
            study.enqueue_trial({"unit": "projection", "feature": "none", "rate": rate, "tied": "table", "rank": 0})
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):  # of a search that was cut off
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(trial.params)
    return study


def _ended(study: Any) -> int:
    return sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in study.trials)


def candidate(trial: Any, reference: Any, width: int) -> dict[str, Any]:
    """The settings that a trial changes, but for the width of the table."""
    projected = reference.embedding.kind == "projective"
    kind = trial.suggest_categorical("unit", ["projection", "mlp", "define"])
    unit: dict[str, Any] = {"kind": "none"} if projected and kind == "projection" else _unit(trial, kind, width)
    if unit["kind"] != "none":
        unit["weight_scaling"] = getattr(reference.unit, "weight_scaling", False)
    feature, features = trial.suggest_categorical("feature", ["none", "bigrams", "characters"]), []
    if feature != "none":
        rows, wide = trial.suggest_categorical("rows", [12, 14, 16]), trial.suggest_categorical("wide", [8, 16, 32])
        place = trial.suggest_categorical("place", ["concat", "after"])
        features = [f"{feature}:{1 << rows}x{wide}:{place}"]
    found: dict[str, Any] = {"unit": unit, "embedding": {"features": features}}
    found["optim"] = {"lr": reference.optim.lr * trial.suggest_float("rate", 0.5, 2.0, log=True)}
    if reference.output.kind == "full" and reference.output.tied != "none":
        found["output"] = {"tied": trial.suggest_categorical("tied", ["table", "finished"])}
    if hasattr(reference.context, "layer_rank"):
        found["context"] = {"layer_rank": trial.suggest_categorical("rank", [0, 8, 16, 32]) or None}
    return found


def _unit(trial: Any, kind: str, width: int) -> dict[str, Any]:
    unit: dict[str, Any] = {"kind": kind, "embedding_dim": width}
    if kind != "projection":
        unit["expand_dim"] = width * trial.suggest_categorical("expand", [2, 4, 8])
    if kind == "define":
        unit["depth"] = trial.suggest_int("depth", 2, 5)
        unit["max_groups"] = trial.suggest_categorical("groups", [1, 2, 4, 8])
        unit["skip"] = trial.suggest_categorical("skip", ["mix", "residual", "none"])
    return unit


def fitted(common: Search, settings: dict[str, Any], budget: int) -> dict[str, Any] | None:
    """The candidate with the widest table that the budget of parameters allows; None if no width does.

    At equal step time every table is as wide as the recipe's, as its width hardly changes the time.
    """
    own = common.reference.embedding.map_dim
    if common.equal == "time":
        return merged(settings, {"embedding": {"map_dim": own}})
    for width in range(4 * own // GRAIN * GRAIN, NARROWEST - 1, -GRAIN):
        wider = merged(settings, {"embedding": {"map_dim": width}})
        try:
            if common.parameters(common.made(wider)) <= budget * OVER["parameters"]:
                return wider
        except UserError:  # a unit whose groups do not divide this width
            continue
    return None


def _try(optuna: Any, study: Any, trial: Any, common: Search) -> str:
    """Train a candidate as far as it is worth it, and tell the study; what came of it, in words."""
    state = optuna.trial.TrialState
    settings = fitted(common, candidate(trial, common.reference, common.width), study.user_attrs["budget"])
    if settings is None:
        study.tell(trial, state=state.PRUNED)
        return f"{trial.params} does not fit the budget"
    recipe = common.made(settings)
    ours, theirs = step_times([recipe, common.reference], common.data, common.device)
    facts = {"settings": settings, "parameters": common.parameters(recipe), "ms": ours, "reference_ms": theirs}
    for name, value in facts.items():
        trial.set_user_attr(name, value)
    if common.equal == "time" and ours > OVER["time"] * theirs:
        study.tell(trial, state=state.PRUNED)
        return f"{trial.params} takes {ours:.1f} ms per step, the recipe {theirs:.1f}"
    place = common.folder / "run"
    shutil.rmtree(place, ignore_errors=True)
    try:
        changes = merged(common.changes, settings)
        run = train(common.recipe, out=place, device=common.device.type, reporter=Halving(trial, optuna), **changes)
        value = run.result["valid_perplexity"]
        study.tell(trial, value)
    except (optuna.TrialPruned, Diverged) as error:
        study.tell(trial, state=state.PRUNED)
        return f"{trial.params} ended early{'' if isinstance(error, optuna.TrialPruned) else ': it diverged'}"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return f"{trial.params}: valid perplexity {value:.2f}"


class Halving(Reporter):
    """Tells a trial of every validation; ends its run where too many were better at the same one."""

    def __init__(self, trial: Any, optuna: Any) -> None:
        self.trial, self.optuna, self.rung = trial, optuna, 0

    def validated(self, record: dict[str, Any]) -> None:
        self.rung += 1
        self.trial.report(record["perplexity"], self.rung)
        if self.trial.should_prune():
            raise self.optuna.TrialPruned


def step_times(recipes: Sequence[Any], data: Any, device: torch.device) -> list[float]:
    """Milliseconds of a training step of each recipe: steps are taken in turns, so that other work slows all alike."""
    steppers = [_stepper(recipe, data, device) for recipe in recipes]
    seconds: list[list[float]] = [[] for _ in recipes]
    for step in range(WARM_UP + TIMED):
        for stepper, found in zip(steppers, seconds, strict=True):
            began = time.perf_counter()
            stepper(step)
            found.append(time.perf_counter() - began)
    return [1e3 * statistics.median(found[WARM_UP:]) for found in seconds]


def _stepper(recipe: Any, data: Any, device: torch.device) -> Callable[[int], None]:
    task, processes = find_task(recipe.task), Processes()
    with torch.random.fork_rng(devices=[]):
        model: Any = task.build(recipe, data.tokenization, data).to(device)
        batches = task.batches(recipe, data, device, processes)
        trainer = Trainer(model, batches, recipe, None, lambda: None, processes, Reporter())  # type: ignore[arg-type, return-value]
    prepare(model)

    def step(number: int) -> None:
        trainer.step(batches.batch(number % batches.total_steps), recipe.optim.lr)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that no other beats or equals in parameters, milliseconds and perplexity at once; best first."""
    axes = ("parameters", "ms", "valid_perplexity")

    def beaten(row: dict[str, Any]) -> bool:
        return any(other is not row and all(other[axis] <= row[axis] for axis in axes) for other in rows)

    return sorted((row for row in rows if not beaten(row)), key=lambda row: row["valid_perplexity"])


def write_report(study: Any, common: Search) -> dict[str, Any]:
    """All candidates as JSON, and the front as a page with a picture."""
    trials = [t for t in study.trials if t.state.name in ("COMPLETE", "PRUNED") and "settings" in t.user_attrs]
    rows = [
        {
            "trial": trial.number,
            "finished": trial.state.name == "COMPLETE",
            "valid_perplexity": trial.value if trial.state.name == "COMPLETE" else None,
            "validations": [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)],
            "parameters": trial.user_attrs["parameters"],
            "ms": trial.user_attrs["ms"],
            "reference_ms": trial.user_attrs["reference_ms"],
            "settings": trial.user_attrs["settings"],
        }
        for trial in trials
    ]
    finished = [row for row in rows if row["finished"]]
    best = front(finished)
    found = {**study.user_attrs, "trials": rows, "front": [row["trial"] for row in best]}
    write_json(common.folder / TABLE, {**found, **describe_environment(common.device)})
    write_text(common.folder / REPORT, "\n".join(_page(found, best, len(finished))) + "\n")
    save_figure(_figure(finished, best), common.folder / PICTURE)
    return found


def _page(found: Mapping[str, Any], best: list[dict[str, Any]], finished: int) -> Iterator[str]:
    yield f"# Search: {found['of']['recipe']} at equal {found['of']['equal']}\n"
    yield (
        f"{len(found['trials'])} candidates, one seed each. {finished} were trained to the end. The recipe has "
        f"{found['budget']:,} parameters. A row is shown if no other candidate is better in parameters, step time and "
        "validation perplexity at once. Steps of candidate and recipe were timed alternately.\n"
    )
    yield "| trial | parameters, M | ms/step | × recipe | valid | settings |\n|---:|---:|---:|---:|---:|---|"
    for row in best:
        times = f"{row['ms']:.1f} | {row['ms'] / row['reference_ms']:.2f}"
        settings = [f"{part}.{name} {value}" for part, own in row["settings"].items() for name, value in own.items()]
        perplexity = f"{row['valid_perplexity']:.2f}"
        yield f"| {row['trial']} | {row['parameters'] / 1e6:.3f} | {times} | {perplexity} | {', '.join(settings)} |"
    yield f"\n![Parameters, time and perplexity]({PICTURE})"


def _figure(finished: list[dict[str, Any]], best: list[dict[str, Any]]) -> Any:
    """Perplexity over parameters and over time; the front is filled."""
    with drawing() as figure_class:
        figure = figure_class(figsize=(7.2, 3.4), layout="constrained")
        labels = {"parameters": "parameters", "ms": "ms/step"}
        for axes, (name, label) in zip(figure.subplots(1, 2, sharey=True), labels.items(), strict=True):
            for rows, face in ((finished, "none"), (best, COLOURS[0])):
                points = [row[name] for row in rows], [row["valid_perplexity"] for row in rows]
                axes.scatter(*points, facecolors=face, edgecolors=COLOURS[0])
            axes.set_xlabel(label)
            axes.set_ylabel("validation perplexity")
    return figure
