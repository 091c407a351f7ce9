"""Which settings of recipes are said to differ."""

from torchdefine.analysis.fairness import differing_settings
from torchdefine.recipe import load_recipe


def differing(*overrides: dict, recipe: str = "demo/standard") -> dict[str, list[str]]:
    return {name: values for name, *values in differing_settings([load_recipe(recipe, one) for one in overrides])}


def test_a_default_that_is_written_out_is_no_difference() -> None:
    assert differing({}, {"embedding": {"map_dim": 128}}) == {}
    written = {"unit": {"skip": "mix", "groups": "halving"}}
    assert differing({}, written, recipe="demo/adaptive-define") == {}


def test_settings_that_only_one_kind_has_are_shown_where_they_are_no_default() -> None:
    narrow = {"embedding": {"map_dim": 32}, "unit": {"kind": "projection", "embedding_dim": 128}}
    assert differing({}, narrow) == {
        "embedding.map_dim": ["128", "32"],
        "unit.kind": ["none", "projection"],
        "unit.embedding_dim": ["–", "128"],
    }


def test_a_value_that_is_left_open_is_a_dash() -> None:
    assert differing({}, {"embedding": {"init_std": 0.1}}) == {"embedding.init_std": ["–", "0.1"]}
