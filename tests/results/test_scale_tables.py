"""The small runs of scales: every row builds, differs in what it says, and its seeds are put together."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from torchdefine.recipe import load_recipe

tables, run_scales = import_module("scale_tables"), import_module("run_scales")
RUNS = list(run_scales.small_runs())


def test_every_run_has_a_file_and_settings_of_its_own() -> None:
    assert len({run.file for run in RUNS}) == len(RUNS)
    assert {run.family for run in RUNS} == {"translation", "Transformer-XL", "LSTM"}
    for family in {run.family for run in RUNS}:
        recipes = [load_recipe(run.recipe, run.changes).to_plain() for run in RUNS if run.family == family]
        seeds = {recipe["train"].pop("seed") for recipe in recipes}
        changed = ("embedding", "unit", "optim", "output")
        models = {json.dumps({name: recipe.pop(name) for name in changed}) for recipe in recipes}
        assert len(seeds) == 2
        assert len(models) == len(recipes) / 2
        assert len({json.dumps({**recipe, "description": ""}) for recipe in recipes}) == 1


def keep(folder: Path, run: Any, valid: float) -> None:
    rms = {"": {"unit": None if "plan" not in run.row else 1.0, "model": 0.5}}
    facts = {"data": {"corpus": "a text"}, "hardware": {"cpu": "a processor"}, "versions": {"torch": "2.13.0"}}
    sizes = {"parameters": {"total": 1_500_000}, "initial_rms": rms, "commit": "0123456789abcdef"}
    (folder / run.file).write_text(json.dumps({"valid_perplexity": valid, **sizes, **facts}))


def test_a_table_for_each_family_with_means_over_seeds(tmp_path: Path) -> None:
    assert tables.scales_section(tmp_path) == ""
    of_lstm = [run for run in RUNS if run.family == "LSTM"]
    rows = {name: [run for run in of_lstm if tables.described(run) == name] for name in map(tables.described, of_lstm)}
    projection, define = (
        ("one projection", "–", "–", "table", "none", "0.006"),
        ("DeFINE", "published", "layer", "table", "unit-rms", "0.006"),
    )
    for run, valid in zip([*rows[projection], *rows[define]], (100.0, 110.0, 84.0, 84.0), strict=True):
        keep(tmp_path, run, valid)
    keep(tmp_path, rows["DeFINE", "wide", "none", "table", "none", "0.006"][0], 126.0)
    lines = tables.scales_section(tmp_path).splitlines()
    of_family = lines[lines.index("### LSTM") :]
    assert "| one projection | – | – | table | none | 0.006 | – | 0.50 | 1.50 | 2 | 105.0 | 10.0 | +0.0% |" in of_family
    published = "| DeFINE | published | layer | table | unit-rms | 0.006"
    assert f"{published} | 1.00 | 0.50 | 1.50 | 2 | 84.0 | 0.0 | -20.0% |" in of_family
    assert "| DeFINE | wide | none | table | none | 0.006 | 1.00 | 0.50 | 1.50 | 1 | 126.0 | – | +20.0% |" in of_family
    assert f"| DeFINE | wide | none | table | unit-rms | 0.006 |{' not run |' * 7}" in of_family
    assert of_family[-1] == "texts a text; hardware a processor; torch 2.13.0; commit 0123456789ab."
    assert all(line.endswith(" not run |" * 7) for line in lines[lines.index("### Translation") :][4:9])


def test_the_demo_s_recipes_are_compared_with_themselves_without_scale() -> None:
    lines = tables.demo_section(Path(tables.__file__).parent / "demo-scales").splitlines()
    without, scaled = (line for line in lines if line.startswith("| `demo/adaptive-projection` |"))
    assert without.startswith("| `demo/adaptive-projection` | none | 2 | ")
    assert without.endswith(" | +0.0% |")
    valid, base = (float(line.split(" | ")[3]) for line in (scaled, without))
    assert scaled.endswith(f" | {valid / base - 1:+.1%} |")
    assert lines[-1].startswith("texts wikitext-2-shuffled; ")
    assert tables.demo_section(Path("nowhere")) == ""


def test_a_row_without_its_family_s_first_row_is_not_compared(tmp_path: Path) -> None:
    last = RUNS[-1]
    keep(tmp_path, last, 90.0)
    assert "| 90.0 | – | – |" in tables.scales_section(tmp_path)


@pytest.mark.parametrize("what", ["unit", "model"])
def test_both_sides_of_a_translator_are_shown(what: str) -> None:
    run = {"initial_rms": {"source": {what: 1.0}, "target": {what: 0.25}}}
    assert tables.reads([run], what) == "1.00 / 0.25"
