"""Where results come from is said once for what all runs have in common, and for each what it has of its own."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from old_names import settings_of

from torchdefine.recipe import load_recipe

tables = import_module("recipe_tables")


def run(recipe: str, **changes: Any) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "data": {"corpus": "ptb"},
        "seed": 1,
        "hardware": {"cpu": "a processor"},
        "precision": "fp32",
        "versions": {"torch": "2.13.0"},
        "commit": "0123456789abcdef",
        "evaluation": {"test": {"protocol": "one stream"}},
        "settings": settings_of(load_recipe(recipe)),
        "seconds": 60.0,
        **changes,
    }


def test_equal_runs_share_one_line() -> None:
    common = "text ptb; seed 1; fp32 on a processor, torch 2.13.0; commit 0123456789ab; one stream."
    assert tables.origins([run("demo/standard"), run("table1a/r3")]) == [f"All rows: {common}"]
    assert tables.origins([run("demo/standard")]) == [f"- `demo/standard`: {common}"]


def test_what_differs_stands_behind_its_recipe() -> None:
    settings = settings_of(load_recipe("table1a/r3", {"optim": {"lr": 3}, "data": {"corpus": "/somewhere"}}))
    settings["unit"]["weight_scaling"] = True  # which the recipe has not
    changed = run("table1a/r3", seed=2, settings=settings)
    lines = tables.origins([run("demo/standard"), changed])
    assert lines[0].startswith("All rows: text ptb; fp32")
    assert "seed" not in lines[0]
    assert lines[1:] == [
        "",
        "- `demo/standard`: seed 1.",
        "- `table1a/r3`: with optim.lr 3.0, unit.weight_scaling true; seed 2.",
    ]


def test_a_row_has_the_numbers_of_its_run() -> None:
    measured = {
        "parameters": {"define": 1_500_000, "context": 2_000_000, "input_output": 30_000_000, "total": 33_500_000},
        "steps": 8930,
        "tokens": 78_340_000,
        "seconds": 90.0,
        "valid_perplexity": 50.0,
        "test_perplexity": 60.0,
        "test_unigram_perplexity": 700.0,
    }
    sizes, perplexities = ["1.500", "2.000", "30.000", "33.500"], ["50.00", "60.00"]
    row = tables.row(run("table1a/r3", **measured), "R3")
    assert row == ["R3", *sizes, "8,930", "78.3", "1.5", *perplexities, "700.0", "41.17"]
    del measured["test_unigram_perplexity"]
    row = tables.row(run("table1a/r3-scaled", **measured, shared_device=True), "R3")
    assert row == ["R3", *sizes, "8,930", "78.3", "–", *perplexities, "–", "–"]


def test_the_best_run_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "draw_curves", lambda name, runs: f"{list(runs)}.svg")
    measured = {"parameters": dict.fromkeys(("define", "context", "input_output", "total"), 1), "steps": 1, "tokens": 1}
    for file, recipe, test in (("a", "demo/standard", 70.0), ("b", "table1a/r3", 60.0)):
        finished = run(recipe, **measured, valid_perplexity=1.0, test_perplexity=test)
        (tmp_path / f"{file}.json").write_text(json.dumps(finished))
    lines = tables.recipe_section(tmp_path).splitlines()
    assert [line.split(" | ")[0] for line in lines[4:6]] == ["| `table1a/r3`", "| `demo/standard`"]
    assert "['table1a/r3', 'demo/standard'].svg" in lines[-1]


def test_runs_of_one_recipe_are_told_apart_by_what_differs() -> None:
    same, other = run("table1a/r3"), run("demo/standard")
    assert tables.labels([same, same, other]) == ["`table1a/r3`", "`table1a/r3`", "`demo/standard`"]
    faster = run("table1a/r3", settings=settings_of(load_recipe("table1a/r3", {"optim": {"lr": 30}})))
    assert tables.labels([same, faster]) == ["`table1a/r3`, optim.lr 20.0", "`table1a/r3`, optim.lr 30.0"]


def test_a_run_that_was_cut_short_says_what_its_whole_length_would_take() -> None:
    short, whole = (run("table1a/r3", settings={"train": {"epochs": epochs}}) for epochs in (2.0, 20.0))
    assert tables.full_length(short) == "the recipe's 20 epochs would take 10 minutes at this speed"
    assert tables.full_length(whole) == tables.full_length(run("table1a/r3")) == ""


def test_the_public_protocol_stands_beside_ours() -> None:
    public = {"valid": {"perplexity": 50.0}, "test": {"perplexity": 60.0}}
    said = tables.public_protocol(run("txl/small", public_evaluation=public))
    assert said == "public protocol (10 streams, each from an empty memory) 50.00 / 60.00"
    assert tables.public_protocol(run("txl/small")) == ""


def test_changes_that_were_not_committed_are_not_hidden() -> None:
    provenance = import_module("provenance")
    commits = ("0123456789abcdef", "0123456789abcdef-changed", "152d38b", None)
    assert [*map(provenance.short_commit, commits)] == ["0123456789ab", "0123456789ab-changed", "152d38b", "unknown"]
