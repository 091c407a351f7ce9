"""Where results come from is said once for what all runs have in common, and for each what it has of its own."""

from importlib import import_module
from typing import Any

from torchdefine.recipe import load_recipe
from torchdefine.recipe.settings import to_plain

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
        "settings": to_plain(load_recipe(recipe)),
        "seconds": 60.0,
        **changes,
    }


def test_equal_runs_share_one_line() -> None:
    common = "text ptb; seed 1; fp32 on a processor, torch 2.13.0; commit 0123456789ab; one stream."
    assert tables.origins([run("demo/standard"), run("table1a/r3")]) == [f"All rows: {common}"]
    assert tables.origins([run("demo/standard")]) == [f"- `demo/standard`: {common}"]


def test_what_differs_stands_behind_its_recipe() -> None:
    settings = to_plain(load_recipe("table1a/r3", {"optim": {"lr": 3}, "data": {"corpus": "/somewhere"}}))
    del settings["embedding"]["equalised"]  # a run from before there was such a setting, as there is in the recipe now
    changed = run("table1a/r3", seed=2, settings=settings)
    lines = tables.origins([run("demo/standard"), changed])
    assert lines[0].startswith("All rows: text ptb; fp32")
    assert "seed" not in lines[0]
    assert lines[1:] == [
        "",
        "- `demo/standard`: seed 1.",
        "- `table1a/r3`: with embedding.equalised false, optim.lr 3.0; seed 2.",
    ]
