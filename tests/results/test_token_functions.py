"""The planned runs of token functions build, and rows that are compared have about equal parameters."""

import pytest
import torch
from run_token_functions import runs_of
from token_function_tables import _cells

from torchdefine.embedding import VocabularyFacts
from torchdefine.recipe import load_recipe
from torchdefine.tasks.language.task import build_language_model

EQUAL = {
    "demo": [
        *("projection, widened", "projection and bigrams", "projection and characters", "DeFINE, widened"),
        *("DeFINE and bigrams through the unit", "DeFINE and bigrams behind the unit"),
    ],
    "demo-untied": ["a row for every word", "characters in place of the rarest rows"],
    "txl-small": ["DeFINE and a vector for every layer", "DeFINE, wider inside the layers"],
    "h200-lstm": [
        *("projection, widened", "projection and bigrams"),
        *("DeFINE and bigrams through the unit", "DeFINE and bigrams behind the unit"),
    ],
    "h200-txl": ["projection, widened", "projection and bigrams", "DeFINE and bigrams through the unit"],
}


@pytest.mark.parametrize("family", EQUAL)
def test_rows_that_are_compared_have_equal_parameters(family: str) -> None:
    size, found = 253_443 if family.startswith("h200") else 33_278, {}
    for planned in runs_of(family):
        name = planned.row.split(", rate")[0]
        if name not in found:
            recipe = load_recipe(planned.recipe, planned.changes)
            with torch.device("meta"):
                found[name] = build_language_model(recipe, VocabularyFacts(size)).parameters_by_part()["total"]
    compared = [found[name] for name in EQUAL[family]]
    assert max(compared) < 1.025 * min(compared)


def test_a_cell_shows_the_mean_and_each_seed() -> None:
    run = {"parameters": {"total": 1_234_567}, "seed": 1, "valid_perplexity": 10.0, "test_perplexity": 20.0}
    runs = [{**run, "after_rare_words": {"perplexity": 30.0}}, {**run, "seed": 2, "valid_perplexity": 12.0}]
    runs[1]["after_rare_words"] = None
    assert _cells(runs) == "1.235 | 1, 2 | 11.0 (10.0, 12.0) | 20.0 (20.0, 20.0) | 30.0"
