from torchdefine.analysis.settings_table import differing_settings

from torchdefine.recipe import load_recipe


def differing(*overrides: dict, recipe: str = "demo/standard", **options: bool) -> dict[str, list[str]]:
    rows = differing_settings([load_recipe(recipe, one) for one in overrides], **options)
    return {name: values for name, *values in rows}


def test_a_value_that_is_written_out_is_no_other_than_the_same_one_left_open() -> None:
    assert differing({}, {"context": {"output_dim": 128}}) == {}
    assert differing({}, {"embedding": {"embedding_dim": 128}}) == {}
    assert differing({}, {"eval": {"valid_batch_size": 64}}) == {}
    written = {"embedding": {"max_groups": 4, "skip": "mix", "groups": "halving"}}
    assert differing({}, written, recipe="demo/adaptive-define") == {}
    heads = {"context": {"kind": "transformer-xl", "layers": 2}}
    written = {"context": {**heads["context"], "head_dim": 16, "inner_dim": 512, "eval_memory": 150}}
    assert differing(heads, written) == {}


def test_a_width_that_follows_from_another_is_shown() -> None:
    narrow = {"embedding": {"map_dim": 32, "unit": "projection", "embedding_dim": 128}}
    rows = differing({}, narrow)
    assert rows["context.output_dim"] == ["128", "32"]
    assert rows["embedding.map_dim"] == ["128", "32"]
    assert "embedding.embedding_dim" not in rows
    assert "embedding.init_std" not in rows
    assert "context.output_dim" not in differing({}, narrow, only_chosen=True)


def test_a_value_beside_one_left_open_is_that_which_the_model_has() -> None:
    assert differing({}, {"embedding": {"init_std": 0.1}})["embedding.init_std"] == ["0.088388", "0.1"]
    assert differing({}, {"context": {"output_dim": 64}})["context.output_dim"] == ["128", "64"]
