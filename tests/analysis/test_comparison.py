import copy
import json
from pathlib import Path

import pytest

from torchdefine import train
from torchdefine.analysis.comparison import BASIC_COLUMNS, Comparison, compare_runs
from torchdefine.analysis.plan_picture import draw_plan
from torchdefine.embedding import PlanRules, make_plan


@pytest.fixture(scope="module")
def runs(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("compared")
    for seed in (1, 2):
        train(recipe_file, out=folder / f"seed-{seed}", train={"seed": seed, "steps": 20})
    return [folder / "seed-1", folder / "seed-2"]


def test_equal_runs_compare_without_warnings_and_the_best_is_marked(runs: list[Path]) -> None:
    comparison = compare_runs(runs)
    assert comparison.warnings == []
    test = BASIC_COLUMNS.index("test")
    marked = [row for row in comparison.rows() if row[test].endswith("*")]
    best = min(run.result["test_perplexity"] for run in comparison.runs)
    assert [float(row[test].rstrip("*")) for row in marked] == [round(best, 2)]
    json.dumps(comparison.to_dict())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(tokens=1), "different numbers of tokens"),
        (lambda r: r["data"].update(vocabulary_sha256="x"), "different vocabularies"),
        (lambda r: r["data"]["splits"]["train"].update(text_sha256="x"), "different texts"),
        (lambda r: r["data"]["splits"]["test"].update(text_sha256="x"), "evaluated on different texts"),
        (lambda r: r["data"]["splits"].pop("valid"), "evaluated on different texts"),
        (lambda r: r["evaluation"]["test"].update(protocol="x"), "different protocols"),
    ],
)
def test_unequal_runs_are_called_so(runs: list[Path], change, words: str) -> None:
    comparison = compare_runs(runs)
    other = copy.deepcopy(comparison.runs[1])
    change(other.result)
    warnings = Comparison([comparison.runs[0], other]).warnings
    assert len(warnings) == 1
    assert words in warnings[0]


@pytest.mark.parametrize("skip", ["mix", "concat", "none"])
def test_a_plan_can_be_drawn(skip: str) -> None:
    plan = make_plan(32, 128, 64, 4, rules=PlanRules(skip=skip))  # type: ignore[arg-type]
    figure = draw_plan(plan)
    boxes = figure.axes[0].patches
    groups = sum(layer.groups for layer in plan)
    assert len(boxes) > groups
    labels = {text.get_text().split("\n")[0] for text in figure.axes[0].texts}
    assert {"map", "expand 1", "reduce 4"} <= labels
