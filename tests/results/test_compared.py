"""The small runs of what the paper compares with: each table has its runs, of equal size, below the unigram model."""

import json
from importlib import import_module
from pathlib import Path

import pytest

compared = import_module("compared")
RESULTS = Path(compared.HERE)


def total(name: str) -> int:
    return json.loads((RESULTS / "compared" / f"{name}.json").read_text())["parameters"]["total"]


def test_every_run_of_a_table_is_one_that_can_be_made(tmp_path: Path) -> None:
    assert {name for names in compared.TABLES.values() for name in names} == set(compared.small_runs(tmp_path))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("gated-convolution", "lstm"),
        ("tcn", "lstm"),
        ("slim", "projective"),
        ("character-cnn", "lstm-untied-narrow"),
        ("hierarchical-softmax", "lstm-untied"),
        ("low-rank", "projective-twice"),
    ],
)
def test_what_is_compared_has_as_many_parameters(name: str, other: str) -> None:
    assert total(name) == pytest.approx(total(other), rel=0.04)


def test_the_tables_have_all_runs() -> None:
    text = compared.compared_section(RESULTS / "compared")  # refuses a run above the unigram model
    assert all(f"| {name} | `compared/" in text for names in compared.TABLES.values() for name in names)
    assert "packed after training: int1" in text
