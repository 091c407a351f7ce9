"""Means over seeds: which runs belong together, and what is said of them."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest

from torchdefine import train
from torchdefine.analysis.comparison import Comparison, compare_runs, over_seeds, print_comparison
from torchdefine.analysis.run_summary import RunSummary


@pytest.fixture(scope="module")
def runs(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[RunSummary]:
    folder = tmp_path_factory.mktemp("seeds")
    for seed, depth in ((1, 2), (2, 2), (1, 3)):
        settings = {"seed": seed, "steps": 4}
        train(recipe_file, out=folder / f"depth-{depth}-seed-{seed}", train=settings, unit={"depth": depth})
    return compare_runs(sorted(folder.iterdir())).runs


def with_test(run: RunSummary, perplexity: float) -> RunSummary:
    changed = copy.deepcopy(run)
    assert changed.result is not None
    changed.result["test_perplexity"] = perplexity
    return changed


def test_runs_that_differ_in_their_seed_alone_stand_together(
    runs: list[RunSummary], capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, other = runs
    one, two = with_test(one, 40.0), with_test(two, 44.0)
    (group,) = over_seeds([one, two, other])
    assert group["runs"] == ["depth-2-seed-1", "depth-2-seed-2"]
    assert group["test_perplexity"] == {"mean": 42.0, "range": 4.0}
    print_comparison(Comparison([one, two, other]))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "depth-2-seed-1, depth-2-seed-2" in line]
    assert row.split()[-2:] == ["42.00", "4.00"]


def test_one_seed_has_no_range(runs: list[RunSummary], capsys: pytest.CaptureFixture[str]) -> None:
    one, two, other = runs
    assert over_seeds([one, other]) == over_seeds([one, one]) == []
    assert over_seeds([one, dataclasses.replace(two, result=None)]) == []
    print_comparison(Comparison([one, other]))
    assert "over seeds" not in capsys.readouterr().out


def test_a_seed_without_a_number_leaves_no_mean(runs: list[RunSummary], capsys: pytest.CaptureFixture[str]) -> None:
    one, two = runs[0], with_test(runs[1], math.inf)
    (group,) = over_seeds([one, two])
    assert json.loads(json.dumps(group))["test_perplexity"] is None
    print_comparison(Comparison([one, two]))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if f"{one.name}, {two.name}" in line]
    assert row.split()[-2:] == ["–", "–"]


def test_runs_on_other_texts_are_not_averaged(runs: list[RunSummary]) -> None:
    """One folder, whose text was changed between the runs."""
    one, two = runs[0], copy.deepcopy(runs[1])
    assert two.result is not None
    two.result["data"]["splits"]["train"]["text_sha256"] = "x"
    assert over_seeds([one, two]) == []
    two = copy.deepcopy(runs[1])
    assert two.result is not None
    two.result["data"]["vocabulary_sha256"] = "x"
    assert over_seeds([one, two]) == []
