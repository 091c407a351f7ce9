"""A search, whole but for its size; stopped and gone on with; what it tries fits its budget."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from torchdefine import search as searching
from torchdefine.cli import main
from torchdefine.errors import UserError
from torchdefine.search import OVER, fitted, front, search

STEPS = {"steps": 9, "log_every": 9, "checkpoint_every": 9}


@pytest.fixture(scope="module")
def recipe(recipe_file: Path) -> str:
    return str(recipe_file)


def test_a_search_that_was_stopped_goes_on_and_reports_its_front(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, calls = searching.train, []

    def stops_once(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(*arguments, **options)

    monkeypatch.setattr(searching, "train", stops_once)
    with pytest.raises(KeyboardInterrupt):
        search(recipe, tmp_path, trials=4, device="cpu", train=STEPS, tell=lambda _: None)
    settings = [f"--train.{name}={value}" for name, value in STEPS.items()]
    with pytest.raises(SystemExit):
        main(["search", recipe, "--out", str(tmp_path), "--trials", "4", "--device", "cpu", *settings])
    assert "3/4: {'unit'" in capsys.readouterr().out  # two were there
    assert calls[2]["optim"] == calls[3]["optim"]  # the one that was cut off is done again
    found = json.loads((tmp_path / "search.json").read_text())
    assert all(row["parameters"] <= found["budget"] * OVER["parameters"] for row in found["trials"])
    assert [row["settings"]["unit"]["kind"] for row in found["trials"][:3]] == ["projection"] * 3
    rates = [row["settings"]["optim"]["lr"] for row in found["trials"][:3]]
    assert rates == pytest.approx([5e-3 * rate for rate in searching.RATES])
    best = min((row for row in found["trials"] if row["finished"]), key=lambda row: row["valid_perplexity"])
    assert found["front"][0] == best["trial"]
    assert f"| {best['valid_perplexity']:.2f} |" in (tmp_path / "search.md").read_text()
    assert (tmp_path / "front.svg").exists()
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="is a search with another recipe or budget"):
        search(recipe, tmp_path, trials=4, equal="time", device="cpu", train=STEPS)


def test_the_front_has_what_nothing_beats() -> None:
    rows = [
        {"parameters": p, "ms": ms, "valid_perplexity": v}
        for p, ms, v in ((10, 1.0, 50.0), (10, 1.0, 60.0), (5, 1.0, 55.0), (10, 0.5, 70.0), (12, 1.0, 51.0))
    ]
    assert front(rows) == [rows[0], rows[2], rows[3]]


def test_a_table_is_as_wide_as_the_budget_allows(recipe: str, tmp_path: Path) -> None:
    common = searching.opened(recipe, tmp_path, None, "parameters", "cpu", {"train": STEPS})
    settings = {"unit": {"kind": "projection", "embedding_dim": 16}}
    widths = [fitted(common, settings, budget)["embedding"]["map_dim"] for budget in (15_000, 20_000)]
    assert widths == sorted(widths)
    assert fitted(common, settings, 100) is None
    made = common.made(fitted(common, settings, 20_000))
    assert common.parameters(made) <= 20_000 * OVER["parameters"]


def test_a_recipe_without_steps_is_refused(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one embedding and with train\.steps"):
        search(recipe, tmp_path, train={"epochs": 1}, device="cpu")


def test_at_equal_time_slow_candidates_are_not_trained(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    common = searching.opened(recipe, tmp_path, None, "time", "cpu", {"train": STEPS})
    own = common.reference.embedding.map_dim
    assert all(ms > 0 for ms in searching.step_times([common.reference] * 2, common.data, common.device))
    times = iter([[1.04, 1.0], [1.06, 1.0]])
    monkeypatch.setattr(searching, "step_times", lambda *_: next(times))
    found = search(recipe, tmp_path, trials=2, equal="time", device="cpu", train=STEPS, tell=told.append)
    assert [row["finished"] for row in found["trials"]] == [True, False]
    assert all(row["settings"]["embedding"]["map_dim"] == own for row in found["trials"])
    assert told[1].endswith("takes 1.1 ms per step, the recipe 1.0")
