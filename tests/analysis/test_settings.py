"""Which settings of recipes are said to differ."""

import pytest

from torchdefine.analysis.fairness import differing_settings
from torchdefine.recipe import load_recipe


def differing(*overrides: dict, recipe: str = "demo/standard") -> dict[str, list[str]]:
    return {name: values for name, *values in differing_settings([load_recipe(recipe, one) for one in overrides])}


def test_a_default_that_is_written_out_is_no_difference() -> None:
    assert differing({}, {"embedding": {"map_dim": 128}}) == {}
    written = {"unit": {"skip": "mix", "groups": "halving"}}
    assert differing({}, written, recipe="demo/adaptive-define") == {}


@pytest.mark.parametrize(
    "written",
    [
        {"eval": {"valid_batch_size": 64}, "embedding": {"init_std": 0.088388}},
        {"context": {"kind": "lstm", "output_dim": 128}},
        {"context": {"kind": "transformer-xl", "head_dim": 16, "inner_dim": 512, "eval_memory": 150}},
        {"embedding": {"kind": "projective", "output_dim": 128, "projection_std": 0.088388}},
        {"unit": {"kind": "define", "embedding_dim": 128, "max_groups": 4}},
        {"unit": {"kind": "projection", "embedding_dim": 128}},
    ],
)
def test_an_open_setting_that_is_written_out_is_no_difference(written: dict) -> None:
    open_ = {"context": {"output_dim": None}}
    kinds = {section: {"kind": values["kind"]} for section, values in written.items() if "kind" in values}
    assert differing(open_ | kinds, open_ | written) == {}


def test_validations_are_no_difference_where_they_follow_from_the_steps() -> None:
    assert differing({}, {"train": {"steps": 300}}) == {"train.steps": ["750", "300"]}
    chosen = {"train": {"steps": 300, "eval_every": 30}}
    assert differing({}, chosen) == {"train.steps": ["750", "300"], "train.eval_every": ["250", "30"]}


def test_settings_that_only_one_kind_has_are_shown_where_they_are_no_default() -> None:
    narrow = {"embedding": {"map_dim": 32}, "unit": {"kind": "projection", "embedding_dim": 128}}
    assert differing({}, narrow) == {
        "embedding.map_dim": ["128", "32"],
        "unit.kind": ["none", "projection"],
        "unit.embedding_dim": ["–", "128"],
    }


def test_a_setting_that_is_left_open_is_shown_with_the_value_that_it_takes() -> None:
    assert differing({}, {"embedding": {"init_std": 0.1}}) == {"embedding.init_std": ["0.088388", "0.1"]}
