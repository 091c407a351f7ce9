"""The table and the picture of rates: what stands in which line, and what a missing run looks like."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from torchdefine.recipe import load_recipe, merged

run_stage, rate_tables = map(import_module, ("run_stage", "rate_tables"))


def keep_run(folder: Path, stage: str, name: str, seed: int = 1, **outcome: object) -> None:
    """A run of a stage, with what it ended with."""
    row = next(row for row in run_stage.rows_of(stage, folder) if row.name == name and row.seed == 1)
    changes = merged(row.changes, {"train": {"seed": seed}})
    run = {"row": name, "settings": load_recipe(row.recipe, changes).to_plain(), **outcome}
    (folder / stage).mkdir(exist_ok=True)
    (folder / stage / f"{len(list((folder / stage).iterdir()))}.json").write_text(json.dumps(run))


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    """A folder with the stage that R3 takes its settings from."""
    for row in run_stage.rows_of("unit-choices", tmp_path):
        keep_run(tmp_path, "unit-choices", row.name, valid_perplexity=1.0 + ("equalised" not in row.name))
    return tmp_path


def keep_ended(folder: Path, stage: str, name: str, test: float, seed: int = 1, valid: float = 1.0) -> None:
    facts = {"valid_perplexity": valid, "test_perplexity": test, "parameters": {"define": 123_000}}
    keep_run(folder, stage, name, seed, **facts)


def test_rates_stand_beside_each_other(rates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[dict[Any, Any]] = []
    monkeypatch.setattr(rate_tables, "draw", lambda tried: drawn.append(tried) or "figures/x.svg")
    keep_ended(rates, "long-rates", "rate 10", 200.0)
    keep_run(rates, "long-rates", "rate 14", diverged="at once")
    keep_ended(rates, "long-rates", "rate 20", 180.0)
    keep_ended(rates, "unit-rates", "rate 20", 135.0)
    keep_ended(rates, "decisive-rate-10", "R2 scaled", 200.0)  # the same run, for another stage
    keep_ended(rates, "decisive-rate-10", "R2 scaled", 204.0, seed=2)
    keep_ended(rates, "decisive-rate-10", "R2 and an equalised projection", 101.0)
    keep_ended(rates, "decisive-rate-10", "R2", 300.0)
    keep_ended(rates, "decisive-rate-10", "R2 and a projection", 1.0)
    keep_ended(rates, "higher-rates", "R2 scaled", 80.0)
    keep_ended(rates, "higher-rates", "R3", 60.0)
    assert rate_tables.rates_section(rates).splitlines()[2:] == [
        "| 80 | 100 | 10 | 300.00 | 202.00 | not run | 101.00 | – | -50.0% |",
        "| 80 | 100 | 14 | not run | diverged | not run | not run | – | – |",
        "| 80 | 100 | 20 | not run | 180.00 | 135.00 | not run | -25.0% | – |",
        "| 50 | 1,000 | 40 | not run | 80.00 | 60.00 | not run | -25.0% | – |",
        "",
        "![Test perplexity by rate](../results/figures/x.svg)",
    ]
    assert drawn == [rate_tables.by_schedule(rates)]


def test_the_best_rate_is_chosen_on_the_validation_text_among_those_of_one_schedule(rates: Path) -> None:
    keep_ended(rates, "decisive-rate-10", "R2 scaled", 1.0, valid=0.5)  # of another schedule
    keep_ended(rates, "higher-rates", "R2 scaled", 80.0, valid=70.0)
    keep_ended(rates, "still-higher-rates", "R2 scaled", 78.0, valid=71.0)
    keep_ended(rates, "higher-rates", "R3", 60.0, valid=50.0)
    keep_ended(rates, "still-higher-rates", "R3", 64.0, valid=49.0)
    keep_ended(rates, "higher-rates", "R2", 160.0)
    keep_run(rates, "still-higher-rates", "R2 and an equalised projection", diverged="at once")
    assert rate_tables.best_rates_table(rates).splitlines()[2:] == [
        "| R2 | 0.12 | 1 | 40 | 40, the only one | 1.00 | 160.00 | +100.0% |",
        "| R2 scaled | 0.12 | 1 | 40, 56 | 40, the lowest | 70.00 | 80.00 | +0.0% |",
        "| R3 | 0.12 | 1 | 40, 56 | 56, the highest | 49.00 | 64.00 | -20.0% |",
        "| R2 and an equalised projection |" + " diverged |" * 7,
    ]


def test_nothing_has_run_yet(tmp_path: Path) -> None:
    assert rate_tables.best_rates_table(tmp_path).splitlines()[2] == "| R2 |" + " not run |" * 7
    assert len(rate_tables.rates_section(tmp_path).splitlines()) == 2


def test_the_picture_of_rates_has_a_panel_for_every_schedule_with_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rate_tables.save_picture.__globals__, "HERE", tmp_path)
    ended = rate_tables.Ended(valid=40.0, test=50.0, seeds=1, unit_parameters=0)
    models: list[dict[str, Any]] = [
        {"R2 scaled": ended},
        {"R2 scaled": None, "R3": ended},
        {"R3": ended},
        {"R3": ended},
    ]
    schedules = [(50_000_000, 100, 5.0), (50_000_000, 100, 10.0), (80_000_000, 100, 5.0), (50_000_000, 700, 5.0)]
    tried = {rate_tables.Schedule(*each): ended for each, ended in zip(schedules, models, strict=True)}
    path = tmp_path / rate_tables.draw(tried)
    assert path == tmp_path / "figures" / "rates.svg"
    titles = re.findall(r"<!-- (\d+ M tokens.*?) -->", path.read_text())
    assert titles == ["50 M tokens, warm-up of 100 steps"]
