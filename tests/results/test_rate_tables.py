"""The table and the picture of rates: what stands in which line, and what a missing run looks like."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from torchdefine.recipe import load_recipe
from torchdefine.recipe.settings import merge, to_plain

run_stage, rate_tables = map(import_module, ("run_stage", "rate_tables"))


def keep_run(folder: Path, stage: str, name: str, seed: int = 1, **outcome: object) -> None:
    """A run of a stage, with what it ended with."""
    row = next(row for row in run_stage.rows_of(stage, folder) if row.name == name and row.seed == 1)
    changes = merge(row.changes, {"train": {"seed": seed}})
    run = {"row": name, "settings": to_plain(load_recipe(row.recipe, changes)), **outcome}
    (folder / stage).mkdir(exist_ok=True)
    (folder / stage / f"{len(list((folder / stage).iterdir()))}.json").write_text(json.dumps(run))


def test_rates_stand_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for row in run_stage.rows_of("unit-choices", tmp_path):  # which R3 takes its settings from
        keep_run(tmp_path, "unit-choices", row.name, valid_perplexity=1.0 + ("equalised" not in row.name))
    drawn: list[dict[Any, Any]] = []
    monkeypatch.setattr(rate_tables, "draw", lambda tried: drawn.append(tried) or "figures/x.svg")
    keep_run(tmp_path, "long-rates", "rate 10", test_perplexity=200.0)
    keep_run(tmp_path, "long-rates", "rate 14", diverged="at once")
    keep_run(tmp_path, "long-rates", "rate 20", test_perplexity=180.0)
    keep_run(tmp_path, "unit-rates", "rate 20", test_perplexity=135.0)
    keep_run(tmp_path, "decisive-rate-10", "R2 scaled", test_perplexity=200.0)  # the same run, for another stage
    keep_run(tmp_path, "decisive-rate-10", "R2 scaled", seed=2, test_perplexity=204.0)
    keep_run(tmp_path, "decisive-rate-10", "R2 and an equalised projection", test_perplexity=101.0)
    keep_run(tmp_path, "decisive-rate-10", "R2", test_perplexity=1.0)
    keep_run(tmp_path, "higher-rates", "R2 scaled", test_perplexity=80.0)
    keep_run(tmp_path, "higher-rates", "R3", test_perplexity=60.0)
    assert rate_tables.rates_section(tmp_path).splitlines()[2:] == [
        "| 80 | 100 | 10 | 202.00 | not run | 101.00 | – | -50.0% |",
        "| 80 | 100 | 14 | diverged | not run | not run | – | – |",
        "| 80 | 100 | 20 | 180.00 | 135.00 | not run | -25.0% | – |",
        "| 50 | 1,000 | 40 | 80.00 | 60.00 | not run | -25.0% | – |",
        "",
        "![Test perplexity by rate](../results/figures/x.svg)",
    ]
    assert drawn == [rate_tables.tests_by_schedule(tmp_path)]


def test_the_picture_of_rates_has_a_panel_for_every_schedule_with_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rate_tables.save_picture.__globals__, "HERE", tmp_path)
    tests: list[dict[str, Any]] = [{"R2 scaled": 50.0}, {"R2 scaled": None, "R3": 40.0}, {"R3": 9.0}, {"R3": 8.0}]
    schedules = [(50_000_000, 100, 5.0), (50_000_000, 100, 10.0), (80_000_000, 100, 5.0), (50_000_000, 700, 5.0)]
    tried = {rate_tables.Schedule(*each): test for each, test in zip(schedules, tests, strict=True)}
    path = tmp_path / rate_tables.draw(tried)
    assert path == tmp_path / "figures" / "rates.svg"
    titles = re.findall(r"<!-- (\d+ M tokens.*?) -->", path.read_text())
    assert titles == ["50 M tokens, warm-up of 100 steps"]
