"""The scaled table, R3 and one projection at every rate that they ran at, in docs/evidence.md: `make results`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from curves import empty_picture, save_picture
from stage_tables import diverged, read_rows

MODELS = {"R2 scaled": "long-rates", "R3": "unit-rates", "R2 and an equalised projection": "projection-rates"}
"""By the name of their row where models stand side by side: the stage in which each row is a rate."""
SIDE_BY_SIDE = ("decisive-rate-10", "decisive", "depth", "higher-rates", "still-higher-rates")
BASELINE, *UNITS = MODELS


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


Tests = dict[str, float | None]
"""Test perplexities by model, means over seeds; None where one diverged."""


def rates_section(folder: Path) -> str:
    """A table of all schedules, the longest first, and a picture of it."""
    tried = tests_by_schedule(folder)
    header = ("M tokens", "warm-up, steps", "rate", *MODELS, *(f"{unit}, against {BASELINE}" for unit in UNITS))
    lines = ["| " + " | ".join(header) + " |", "|---:" * len(header) + "|"]
    for schedule in sorted(tried, key=lambda each: (-each.tokens, each.warmup, each.rate)):
        tests = tried[schedule]
        cells = [f"{schedule.tokens / 1e6:.0f}", f"{schedule.warmup:,}", f"{schedule.rate:g}"]
        cells += [written(tests, model) for model in MODELS] + [against(tests, unit) for unit in UNITS]
        lines.append("| " + " | ".join(cells) + " |")
    if any(tried.values()):
        lines += ["", f"![Test perplexity by rate](../results/{draw(tried)})"]
    return "\n".join(lines)


def tests_by_schedule(folder: Path) -> dict[Schedule, Tests]:
    """What every model ended with under every schedule; a run that counts for two stages counts once."""
    by_seed: dict[Schedule, dict[str, dict[int, dict[str, Any]]]] = {}
    for model, run in runs_of_models(folder):
        seeds = by_seed.setdefault(Schedule.of(run["settings"]), {}).setdefault(model, {})
        seeds[run["settings"]["train"]["seed"]] = run
    return {
        schedule: {model: mean_test(list(seeds.values())) for model, seeds in models.items()}
        for schedule, models in by_seed.items()
    }


def runs_of_models(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for model, stage in MODELS.items():
        for runs in read_rows(folder / stage).values():
            yield from ((model, run) for run in runs)
    for stage in SIDE_BY_SIDE:
        rows = read_rows(folder / stage)
        for model in MODELS:
            yield from ((model, run) for run in rows.get(model, ()))


def mean_test(runs: list[dict[str, Any]]) -> float | None:
    return None if diverged(runs) else mean(run["test_perplexity"] for run in runs)


def written(tests: Tests, model: str) -> str:
    if model not in tests:
        return "not run"
    test = tests[model]
    return "diverged" if test is None else f"{test:.2f}"


def against(tests: Tests, unit: str) -> str:
    """How much lower or higher a unit ended than the table without one."""
    one, other = tests.get(unit), tests.get(BASELINE)
    return "–" if one is None or other is None else f"{one / other - 1:+.1%}"


def draw(tried: Mapping[Schedule, Tests]) -> str:
    """One panel for each length of training and warm-up that has more than one rate; the picture's path from here."""
    from matplotlib import ticker

    panels: dict[tuple[int, int], list[Schedule]] = {}
    for schedule in sorted(tried):
        panels.setdefault((schedule.tokens, schedule.warmup), []).append(schedule)
    panels = {key: schedules for key, schedules in panels.items() if len(schedules) > 1}
    figure, all_axes = empty_picture(len(panels))
    for axes, ((tokens, warmup), schedules) in zip(all_axes, panels.items(), strict=True):
        for model in MODELS:
            points = [(each.rate, test) for each in schedules if (test := tried[each].get(model)) is not None]
            axes.plot([rate for rate, _ in points], [test for _, test in points], marker="o", markersize=4, label=model)
        axes.set_title(f"{tokens / 1e6:.0f} M tokens, warm-up of {warmup:,} steps", fontsize=8)
        axes.set(xscale="log", xlabel="rate")
        axes.set_xticks([each.rate for each in schedules])
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("test perplexity")
    all_axes[0].legend(fontsize=7)
    return save_picture(figure, "rates")
