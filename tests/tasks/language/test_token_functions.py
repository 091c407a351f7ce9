"""A language model whose embedding reads the token before: whole texts, segments, steps and generation agree."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchdefine import load_run, train
from torchdefine.analysis.report import write_report
from torchdefine.embedding import VocabularyFacts
from torchdefine.errors import UserError
from torchdefine.export import check_export
from torchdefine.modes import reading
from torchdefine.recipe import load_recipe
from torchdefine.tasks.language.model import LanguageModel
from torchdefine.tasks.language.run import generate
from torchdefine.tasks.language.task import build_language_model
from torchdefine.tasks.sampling import SamplingOptions
from torchdefine.tasks.translation.task import build_translator
from torchdefine.training.progress import Reporter


class Stopper(Reporter):
    """Stops a run after a checkpoint in the middle of the text."""

    def trained(self, record: dict[str, Any]) -> None:
        if record["step"] >= 14:
            raise KeyboardInterrupt


V = 60
CONTEXTS = {"demo/adaptive-define": (16, {"output": {}}), "txl/small": (7, {"output": {"cutoffs": [20, 40]}})}
FEATURES = ["bigrams:64x8:add", "bigrams:64x8:concat", "bigrams:64x8:after"]


def made(recipe: str, *features: str, **changes: Any) -> LanguageModel:
    torch.manual_seed(1)
    parts = {**CONTEXTS[recipe][1], **changes}
    embedding = {"features": features, **({"cutoffs": [20, 40]} if "adaptive" in recipe else {})}
    facts = VocabularyFacts(V, None, "word{}".format)
    model = build_language_model(load_recipe(recipe, {**parts, "embedding": embedding}), facts)
    for part in model.embedding.features.parts:
        if part.lift is not None:
            nn.init.normal_(part.lift.weight)
    return model.double()


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("recipe", CONTEXTS)
def test_segments_and_steps_give_what_the_whole_text_gives(recipe: str, feature: str) -> None:
    model, length = made(recipe, feature, "characters:40x8"), CONTEXTS[recipe][0]
    ids = torch.randint(V, (3, 40))
    with reading(model) as twin, torch.no_grad():
        whole, _ = twin.log_prob(ids, twin.initial_state(3))
        parts, state = [], twin.initial_state(3)
        for start in range(0, 40, length):
            found, state = twin.log_prob(ids[:, start : start + length], state)
            parts.append(found)
        torch.testing.assert_close(torch.cat(parts, 1), whole)
        state = twin.initial_state(3)
        for place in range(12):
            found, state = twin.step(ids[:, place : place + 1], state)
            torch.testing.assert_close(found, whole[:, place])
        forgetful, _ = twin.log_prob(ids[:, length:], twin.initial_state(3)._replace(context=state.context))
        told, _ = twin.log_prob(ids[:, length:], state._replace(last=ids[:, length - 1 : length] + 1))
        assert not torch.allclose(forgetful[:, 0], told[:, 0])


@pytest.mark.parametrize("recipe", CONTEXTS)
def test_training_reads_the_last_token_of_the_segment_before(recipe: str) -> None:
    """The loss of two segments is that of a model whose embedding is given all tokens before, and so are gradients."""
    model = made(recipe, "bigrams:64x8:concat", loss={"output_dropout": 0.0}).eval()
    ids, length = torch.randint(V, (2, 17)), 8
    gradients = []
    for carried in (True, False):
        model.zero_grad()
        state = model.initial_state(2)
        for start in (0, length):
            if not carried:
                before = ids[:, start - 1 : start] if start else torch.full((2, 1), -1)
                state = state._replace(last=before + 1)
            part = slice(start, start + length), slice(start + 1, start + length + 1)
            losses, state = model(ids[:, part[0]], ids[:, part[1]], state)
            losses.cross_entropy.backward()
        gradients.append(model.embedding.features.parts[0].rows.table.weight.grad.clone())
    assert torch.equal(*gradients)
    assert gradients[0].any()


@pytest.mark.parametrize("feature", FEATURES)
def test_generation_takes_the_most_probable_tokens_of_the_whole_text(feature: str) -> None:
    model, prompt = made("demo/adaptive-define", feature), [5, 6, 7]
    if feature.endswith("after"):
        model.eval().embedding.look_up(model.embedding.table())
    continuation = generate(model, prompt, 8, SamplingOptions(temperature=0))
    with reading(model) as twin, torch.no_grad():
        text = torch.tensor([prompt + continuation])
        whole, _ = twin.log_prob(text[:, :-1], twin.initial_state(1))
    assert whole[0, len(prompt) - 1 :].argmax(-1).tolist() == continuation


@pytest.mark.parametrize("feature", ["bigrams:64x8:concat", "bigrams:64x8:after"])
def test_a_run_is_resumed_cached_and_exported(feature: str, recipe_file: Path, tmp_path: Path) -> None:
    settings: Any = {"embedding": {"features": [feature, "characters:40x8"]}, "train": {"steps": 20}}
    whole = train(recipe_file, out=tmp_path / "whole", **settings)
    stopped = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        train(recipe_file, out=stopped, reporter=Stopper(), **settings)
    resumed = train(out=stopped, resume=True)
    assert resumed.result["test_perplexity"] == whole.result["test_perplexity"]
    loaded = load_run(tmp_path / "whole")
    assert loaded.evaluate().loss == whole.evaluate().loss
    if "after" in feature:
        loaded.cache()
        cached = load_run(tmp_path / "whole", cached=True)
        assert cached.evaluate().loss == pytest.approx(whole.evaluate().loss)
    else:
        with pytest.raises(UserError, match="Bigrams go through the unit"):
            loaded.cache()
    report = tmp_path / "report.html"
    write_report([tmp_path / "whole"], report)
    assert ("is left out: bigrams go through its unit" in report.read_text()) is ("concat" in feature)
    out = tmp_path / "exported"
    loaded.export(out, "onnx" if "after" in feature else "torch-export")
    check_export(out)


@pytest.mark.parametrize("recipe", ["tatoeba/laptop-define", "masked/laptop"])
def test_other_tasks_refuse_bigrams_by_name(recipe: str) -> None:
    with pytest.raises(UserError, match=r"bigrams:64x8 needs the token before each, which a .* does not give"):
        load_recipe(recipe, {"embedding": {"features": ["bigrams:64x8"]}})
    assert load_recipe(recipe, {"embedding": {"features": ["characters:64x8"]}}).embedding.features


def test_a_shared_unit_reads_the_features_of_both_sides() -> None:
    changes = {"embedding": {"features": ["frequency:8x16:concat"]}, "source": {"share": "unit"}}
    model = build_translator(load_recipe("tatoeba/laptop-define", changes), VocabularyFacts(50), VocabularyFacts(V), 0)
    source, target = model.embeddings().values()
    assert source.unit is target.unit
    assert source(torch.arange(50)).shape[-1] == target(torch.arange(V)).shape[-1]
    assert source.features is not target.features


def test_an_output_tied_to_finished_vectors_refuses_bigrams_through_the_unit() -> None:
    changes: dict[str, Any] = {"output": {"kind": "full", "tied": "finished"}}
    with pytest.raises(UserError, match="but bigrams:64x8 goes through the unit"):
        load_recipe("txl/small", {**changes, "embedding": {"features": ["bigrams:64x8"]}})
    load_recipe("txl/small", {**changes, "unit": "none", "embedding": {"features": ["bigrams:64x8"]}})
    load_recipe("txl/small", {**changes, "embedding": {"features": ["bigrams:64x8:after"]}})


def test_words_without_a_row_need_an_output_of_its_own() -> None:
    with pytest.raises(UserError, match="not every word has a row"):
        load_recipe("demo/adaptive-define", {"embedding": {"rows": 20_000}})
    model = made("demo/adaptive-define", "characters:64x8", output={"tied": "finished"})
    with torch.no_grad():
        probabilities, _ = model.log_prob(torch.tensor([[59]]), model.initial_state(1))
    assert probabilities.exp().sum().item() == pytest.approx(1)


UNITS: dict[str, Any] = {
    "unit": {},
    "projection": {"unit": {"kind": "projection", "embedding_dim": 64}},
    "map's projection": {"unit": {"kind": "none"}, "output": {"cutoffs": [20, 40], "tied_projections": []}},
    "finished": {"output": {"kind": "full", "tied": "finished"}},
}


@pytest.mark.parametrize("changes", UNITS.values(), ids=UNITS)
def test_one_unit_gives_the_input_the_output_matrix_and_a_vector_for_every_layer(changes: dict[str, Any]) -> None:
    parts = {"output": {"cutoffs": [20, 40]}, **changes}
    recipe = load_recipe("txl/small", {**parts, "context": {"layer_rank": 5}})
    model = build_language_model(recipe, VocabularyFacts(V)).double()
    assert (model.embedding.embedding_dim, model.embedding.read_dim) == (64 + 2 * 5, 64)
    for layer in model.context.layers:
        nn.init.normal_(layer.widen.weight)
    ids = torch.randint(V, (2, 9))
    model(ids[:, :-1], ids[:, 1:], model.initial_state(2))[0].objective.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with reading(model) as twin, torch.no_grad():
        computed, _ = twin.log_prob(ids, twin.initial_state(2))
        model.eval().embedding.look_up(model.embedding.table())
    with reading(model) as twin, torch.no_grad():
        cached, _ = twin.log_prob(ids, twin.initial_state(2))
    torch.testing.assert_close(cached, computed)


def test_vectors_for_layers_need_a_unit_or_a_projection() -> None:
    recipe = load_recipe("txl/small", {"embedding": "standard", "unit": "none", "context": {"layer_rank": 5}})
    with pytest.raises(UserError, match=r"set unit\.embedding_dim, or embedding\.output_dim"):
        build_language_model(recipe, VocabularyFacts(V))
