"""The small runs of what the paper compares with: each table has its runs, of equal size, below the unigram model."""

import json
from importlib import import_module
from pathlib import Path

import pytest

compared, equal_bytes = import_module("compared"), import_module("equal_bytes")
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


def test_at_equal_bytes_every_method_has_a_row_within_them() -> None:
    for path in (RESULTS / "equal-bytes").glob("*.json"):
        result = json.loads(path.read_text())
        count, width = result["shape"]
        assert [(row["part"], row["method"]) for row in result["rows"]] == [
            (part, method) for part in equal_bytes.PARTS for method in equal_bytes.METHODS
        ]
        assert all(row["bytes"] <= 4 * count * width / row["part"] for row in result["rows"])
    assert equal_bytes.equal_bytes_section(RESULTS / "equal-bytes").count("| `group-reduce` |") == 4
