"""The table of equalised units: seeds are put together, and what may not be compared is not."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from torchdefine.recipe import load_recipe

tables = import_module("equalised_tables")


def test_rows_are_of_one_kind_and_the_best_comes_first(tmp_path: Path) -> None:
    def keep(name: str, valid: float, recipe: str, **changes: Any) -> None:
        if recipe == "demo/adaptive-define":
            changes["embedding"] = {"map_dim": 128}  # as wide as what the unit gives
        settings = load_recipe(recipe, changes).to_plain()
        steps = settings["train"]["steps"]
        run = {"settings": settings, "steps": steps, "valid_perplexity": valid, "test_perplexity": 2 * valid}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))

    keep("a", 100.0, "demo/adaptive-scaled")
    keep("b", 90.0, "demo/adaptive-define", train={"seed": 2})
    keep("c", 94.0, "demo/adaptive-define", train={"seed": 3})
    keep("d", 120.0, "demo/adaptive-define", unit={"weight_scaling": False})
    keep("e", 50.0, "txl/small")
    keep("f", 10.0, "demo/adaptive-define", train={"steps": 900})  # longer, so it is not compared
    lines = tables.equalised_table(tmp_path).splitlines()
    assert len(lines[1].split("|")) - 2 == len(tables.HEADER)
    of_demo = "| LSTM of 1 layer, n = 128, m = 128 | adam, 0.006, 750 |"
    of_txl = "| Transformer-XL of 2 layers, n = 32, m = 64 | adam, 0.002, 1,000 |"
    assert lines[2:] == [
        f"{of_demo} define | times 11.3 | weight-scaled | 2 | 92.0 | 90.0 – 94.0 | 184.0 |",
        f"{of_demo} none | times 11.3 | – | 1 | 100.0 | – | 200.0 |",
        f"{of_demo} define | times 11.3 | plain | 1 | 120.0 | – | 240.0 |",
        f"{of_demo.replace('750', '900')} define | times 11.3 | weight-scaled | 1 | 10.0 | – | 20.0 |",
        f"{of_txl} define | times 1 | plain | 1 | 50.0 | – | 100.0 |",
    ]
