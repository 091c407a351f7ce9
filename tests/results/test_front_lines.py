"""The evidence in the README, and the words in which generated parts are written."""

from importlib import import_module
from pathlib import Path

lines, marked = import_module("front_lines"), import_module("marked")
ROOT = Path(__file__).parents[2]


def test_the_readme_has_the_lines_of_the_stored_results() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"{lines.of_translation(ROOT / 'results' / 'europarl')}\n{lines.LAST}\n<!-- /evidence -->" in readme


def test_weight_scaling_has_one_name() -> None:
    said = "R2 and an equalised MLP; R3, not equalised; `ptb/define-equalised`; [why](#equalised-units)"
    assert marked.in_one_word(said) == (
        "R2 scaled, weight-scaled MLP; R3, no weight scaling; `ptb/define-equalised`; [why](#equalised-units)"
    )


def test_a_row_says_that_the_table_below_a_projection_is_scaled() -> None:
    assert marked.in_one_word("| R2 and a projection | R2 |") == "| R2 scaled, projection | R2 |"
