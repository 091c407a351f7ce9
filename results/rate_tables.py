"""The scaled table, R3 and one projection at every learning rate that was tried: `make results`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from curves import empty_picture, save_picture
from marked import in_one_word
from stage_tables import diverged, read_rows

MODELS = {"R2 scaled": "long-rates", "R3": "unit-rates", "R2 and an equalised projection": "projection-rates"}
"""By the name of their row where models stand side by side: the stage in which each row is a rate."""
SIDE_BY_SIDE = ("decisive-rate-10", "decisive", "depth", "higher-rates", "still-higher-rates")
BASELINE, *UNITS = MODELS
UNSCALED = "R2"


class Schedule(NamedTuple):
    """What differs between the lines of the table."""

    tokens: int
    warmup: int
    rate: float

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Schedule:
        train = settings["train"]
        tokens = train["steps"] * train["batch_size"] * train["length"]
        return cls(tokens, settings["schedule"]["warmup"], settings["optim"]["lr"])


@dataclass(frozen=True)
class Ended:
    """What a model ended with, means over seeds."""

    valid: float
    test: float
    seeds: int
    unit_parameters: int


Models = dict[str, Ended | None]
"""By the name of the model; None where a seed diverged."""


def best_rates_table(folder: Path) -> str:
    """Each model at the best of its rates on the validation text, where the highest rates were tried."""
    tried = by_schedule(folder)
    highest = max(tried, key=lambda schedule: schedule.rate, default=None)
    header = ("row", "unit M", "seeds", "rates tried", "best rate", "valid", "test", f"against {BASELINE}")
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    beside = {} if highest is None else {each: tried[each] for each in sorted(tried) if is_beside(each, highest)}
    reference = best_of(beside, BASELINE)
    for model in (UNSCALED, *MODELS):
        lines.append("| " + " | ".join([model, *best_cells(beside, model, reference)]) + " |")
    return "\n".join(lines)


def is_beside(schedule: Schedule, other: Schedule) -> bool:
    """Whether two schedules differ in their rate alone."""
    return schedule._replace(rate=other.rate) == other


def best_of(tried: Mapping[Schedule, Models], model: str) -> tuple[Schedule, Ended] | None:
    return min(finished(tried, model), key=lambda each: each[1].valid, default=None)


def best_cells(tried: Mapping[Schedule, Models], model: str, reference: tuple[Schedule, Ended] | None) -> list[str]:
    """Everything behind a model's name; rates at which it diverged were tried, too."""
    rates = [schedule.rate for schedule, models in tried.items() if model in models]
    found = best_of(tried, model)
    if found is None:
        return ["diverged" if rates else "not run"] * 7
    (*_, best), ended = found
    place = "the only one" if len(rates) == 1 else {rates[0]: "the lowest", rates[-1]: "the highest"}.get(best)
    return [
        f"{ended.unit_parameters / 1e6:.2f}",
        str(ended.seeds),
        ", ".join(f"{rate:g}" for rate in rates),
        f"{best:g}" + (f", {place}" if place else ""),
        f"{ended.valid:.2f}",
        f"{ended.test:.2f}",
        "–" if reference is None else f"{ended.test / reference[1].test - 1:+.1%}",
    ]


def finished(tried: Mapping[Schedule, Models], model: str) -> list[tuple[Schedule, Ended]]:
    """The schedules that a model came to the end of, lower rates first."""
    return [(schedule, ended) for schedule in sorted(tried) if (ended := tried[schedule].get(model)) is not None]


def rates_section(folder: Path) -> str:
    """A table of all schedules, the longest first, and a picture of it."""
    tried = by_schedule(folder)
    header = (
        "M tokens",
        "warm-up, steps",
        "rate",
        UNSCALED,
        *MODELS,
        *(f"{unit}, against {BASELINE}" for unit in UNITS),
    )
    lines = ["| " + " | ".join(header) + " |", "|---:" * len(header) + "|"]
    for schedule in sorted(tried, key=lambda each: (-each.tokens, each.warmup, each.rate)):
        models = tried[schedule]
        cells = [f"{schedule.tokens / 1e6:.0f}", f"{schedule.warmup:,}", f"{schedule.rate:g}"]
        cells += [written(models, model) for model in (UNSCALED, *MODELS)] + [against(models, unit) for unit in UNITS]
        lines.append("| " + " | ".join(cells) + " |")
    if any(tried.values()):
        lines += ["", f"![Test perplexity by rate](../results/{draw(tried)})"]
    return "\n".join(lines)


def by_schedule(folder: Path) -> dict[Schedule, Models]:
    """What every model ended with under every schedule; a run that counts for two stages counts once."""
    by_seed: dict[Schedule, dict[str, dict[int, dict[str, Any]]]] = {}
    for model, run in runs_of_models(folder):
        seeds = by_seed.setdefault(Schedule.of(run["settings"]), {}).setdefault(model, {})
        seeds[run["settings"]["train"]["seed"]] = run
    return {
        schedule: {model: ended_with(list(seeds.values())) for model, seeds in models.items()}
        for schedule, models in by_seed.items()
    }


def runs_of_models(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for model, stage in MODELS.items():
        for runs in read_rows(folder / stage).values():
            yield from ((model, run) for run in runs)
    for stage in SIDE_BY_SIDE:
        rows = read_rows(folder / stage)
        for model in (*MODELS, UNSCALED):
            yield from ((model, run) for run in rows.get(model, ()))


def ended_with(runs: list[dict[str, Any]]) -> Ended | None:
    if diverged(runs):
        return None
    valid, test = (mean(run[f"{split}_perplexity"] for run in runs) for split in ("valid", "test"))
    return Ended(valid, test, len(runs), runs[0]["parameters"]["define"])


def written(models: Models, model: str) -> str:
    if model not in models:
        return "not run"
    ended = models[model]
    return "diverged" if ended is None else f"{ended.test:.2f}"


def against(models: Models, unit: str) -> str:
    """How much lower or higher a unit ended than the table without one."""
    one, other = models.get(unit), models.get(BASELINE)
    return "–" if one is None or other is None else f"{one.test / other.test - 1:+.1%}"


def draw(tried: Mapping[Schedule, Models]) -> str:
    """One panel for each length of training and warm-up that has more than one rate; the picture's path from here."""
    from matplotlib import ticker

    panels: dict[tuple[int, int], list[Schedule]] = {}
    for schedule in sorted(tried):
        panels.setdefault((schedule.tokens, schedule.warmup), []).append(schedule)
    panels = {key: schedules for key, schedules in panels.items() if len(schedules) > 1}
    figure, all_axes = empty_picture(len(panels))
    for axes, ((tokens, warmup), schedules) in zip(all_axes, panels.items(), strict=True):
        for model in MODELS:
            points = [(each.rate, ended.test) for each, ended in finished(tried, model) if each in schedules]
            axes.plot(
                [rate for rate, _ in points],
                [test for _, test in points],
                marker="o",
                markersize=4,
                label=in_one_word(model),
            )
        axes.set_title(f"{tokens / 1e6:.0f} M tokens, warm-up of {warmup:,} steps", fontsize=8)
        axes.set(xscale="log", xlabel="rate")
        axes.set_xticks([each.rate for each in schedules])
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("test perplexity")
    all_axes[0].legend(fontsize=7)
    return save_picture(figure, "rates")
