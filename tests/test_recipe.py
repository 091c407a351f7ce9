from pathlib import Path

import pytest
import torch

from torchdefine.analysis.parameters import parameter_report
from torchdefine.build import VocabularyFacts, build_language_model
from torchdefine.build_translation import build_translator
from torchdefine.errors import UserError
from torchdefine.recipe import Recipe, load_recipe, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_builds(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.description
    size = VocabularyFacts(recipe.data.vocabulary_size or 33_278)
    with torch.device("meta"):
        if recipe.task == "translation":
            model = build_translator(recipe, size, size, pad_id=0)
        else:
            model = build_language_model(recipe, size)
    assert model.parameters_by_part()["total"] > 0


LANGUAGE_MODELS = [n for n in recipe_names() if load_recipe(n).published and load_recipe(n).task == "language"]


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_published_parameters(name: str) -> None:
    report = parameter_report(load_recipe(name)).to_dict()
    for part in ("define", "context", "input_output", "total"):
        published = report[f"published_{part}"]
        if published is not None:
            assert report[part] == pytest.approx(published, abs=0.008), part


def test_every_row_of_the_lstm_tables_is_there() -> None:
    names = recipe_names()
    assert [n for n in names if n.startswith("table1a/")] == [f"table1a/r{i}" for i in range(1, 6)]
    assert len([n for n in names if n.startswith("depth-width/")]) == 9
    assert len([n for n in names if n.startswith("ablation/")]) == 8
    assert {load_recipe(n).published["total"] for n in names if n.startswith("table1a/")} == {
        92.17,
        32.61,
        33.02,
        40.46,
        48.69,
    }


def test_a_recipe_survives_its_yaml(tmp_path: Path) -> None:
    for name in ("table1a/r4", "ablation/glt-shuffle", "demo/standard"):
        recipe = load_recipe(name)
        path = tmp_path / "recipe.yaml"
        path.write_text(recipe.to_yaml())
        assert load_recipe(str(path)) == recipe


def test_overrides_and_text_numbers() -> None:
    recipe = load_recipe("table1a/r3", {"optim": {"lr": "3e-4"}, "embedding": {"cutoffs": "10, 20"}})
    assert recipe.optim.lr == 3e-4
    assert recipe.embedding.cutoffs == (10, 20)
    assert recipe.embedding.depth == 3
    assert load_recipe("table1a/r3", {"train": {"steps": 7}}).train.epochs is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optim": {"learning_rate": 1}}, r"The setting 'optim\.learning_rate' is unknown"),
        ({"optm": {"lr": 1}}, "did you mean 'optim'"),
        ({"optim": {"lr": -1}}, r"optim\.lr is -1\.0, but must be above 0"),
        ({"optim": {"lr": "fast"}}, r"optim\.lr is 'fast', but must be a finite number"),
        ({"train": {"batch_size": 2.5}}, r"train\.batch_size is 2\.5, but must be a whole number"),
        ({"optim": {"optimizer": "lion"}}, "must be one of sgd, adam, adamw"),
        ({"optim": 3}, "holds several settings"),
        ({"embedding": {"unit": "hgtt"}}, "did you mean 'hgt'"),
        ({"output": {"kind": "full"}}, "A tied full output does not fit the adaptive map"),
        ({"train": {"steps": 5, "epochs": 2}}, "one of them and not both"),
        ({"train": {"accumulate": 7}}, "cannot be cut into 7 equal parts"),
        ({"bitext": {"max_ratio": 0.5}}, r"bitext\.max_ratio is 0\.5, but must be at least 1"),
        ({"bitext": {"source": "de"}}, "are both 'de': name two languages"),
        ({"transformer": {"share": "everything"}}, "must be one of nothing, unit, embedding"),
        ({"schedule": {"kind": "noam"}}, r"noam needs a schedule\.warmup"),
        ({"train": {"keep": -1}}, r"train\.keep is -1"),
        ({"embedding": {"scaled": "perhaps"}}, "must be true or false"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(overrides: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_recipe("table1a/r3", overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("table1a/r3", {"beam": {"size": 3}}, "The section beam is not for the task language"),
        ("tatoeba/laptop", {"context": {"layers": 3}}, "set layers and widths in the section transformer"),
        ("tatoeba/laptop", {"eval": {"length": 3}}, "The section eval is not for the task translation"),
        ("tatoeba/laptop", {"train": {"batch_size": 64}}, r"use bitext\.batch_tokens"),
    ],
)
def test_settings_without_an_effect_are_refused(name: str, overrides: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(name, overrides)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text, message in {
        "base: nowhere/at-all\n": "The recipe 'nowhere/at-all' is unknown",
        "a: [1\n": "not valid YAML",
        "- 1\n": "holds no settings",
        f"base: {path}\n": "is its own base",
        "format_version: 99\n": "format version 99",
    }.items():
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            load_recipe(str(path))
    with pytest.raises(UserError, match="does not exist"):
        load_recipe(str(tmp_path / "none.yaml"))
    with pytest.raises(UserError, match="did you mean 'table1a/r3'"):
        load_recipe("table1a/r33")


def test_cutoffs_shrink_with_the_vocabulary() -> None:
    recipe = load_recipe("table1a/r3")
    model = build_language_model(recipe, VocabularyFacts(33_278))
    assert model.embedding.map.cutoffs == (20_000,)
    with pytest.raises(UserError, match=r"or --embedding\.cutoffs 62,250, say"):
        build_language_model(recipe, VocabularyFacts(500))


def test_own_parts_are_registered_by_name() -> None:
    from torchdefine import register_context, register_embedding, register_output
    from torchdefine.context import LSTM
    from torchdefine.embedding import StandardMap, TokenEmbedding
    from torchdefine.output import FullSoftmax

    def embedding(settings, vocabulary):
        return TokenEmbedding(StandardMap(vocabulary.size, settings.options["width"]))

    register_embedding("mine", embedding)
    register_context("mine", lambda settings, input_dim, wished: LSTM(input_dim, wished))
    register_output("mine", lambda settings, hidden_dim, emb: FullSoftmax(hidden_dim, emb.map))
    recipe = load_recipe(
        "demo/standard",
        {
            "embedding": {"kind": "mine", "options": {"width": 12}},
            "context": {"kind": "mine"},
            "output": {"kind": "mine"},
        },
    )
    model = build_language_model(recipe, VocabularyFacts(40))
    assert model.embedding.map.map_dim == 12
    with pytest.raises(UserError, match="registered already"):
        register_embedding("mine", embedding)
    with pytest.raises(UserError, match="context model 'lstmm' is unknown: did you mean 'lstm'"):
        build_language_model(load_recipe("demo/standard", {"context": {"kind": "lstmm"}}), VocabularyFacts(40))


def test_default_recipe_is_complete() -> None:
    assert Recipe().data.corpus == "wikitext-2-shuffled"
