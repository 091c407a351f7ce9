"""Every setting of a recipe reaches its part. All values here differ, so that none passes for another."""

import pytest
from torchdefine.build import VocabularyFacts, build_language_model
from torchdefine.build_translation import beam_options, build_translator
from torchdefine.decoding import BeamOptions
from torchdefine.models.language_model import LossOptions

from torchdefine import ProjectiveMap
from torchdefine.context import (
    LSTM,
    LSTMDropout,
    Reach,
    Transformer,
    TransformerDropout,
    TransformerShape,
    TransformerXL,
)
from torchdefine.recipe import load_recipe

VOCABULARY = VocabularyFacts(50)


def test_an_lstm_gets_its_settings() -> None:
    context = {
        **{"kind": "lstm", "layers": 3, "hidden_dim": 24, "input_dropout": 0.1, "hidden_dropout": 0.2},
        **{"output_dropout": 0.3, "recurrent_dropout": 0.4, "state_dropout": 0.5},
        **{"activation_penalty": 2, "temporal_penalty": 1},
    }
    embedding = {"map": "projective", "map_dim": 12, "embedding_dim": 16, "projection_std": 0.07, "row_dropout": 0.6}
    changes = {"context": context, "embedding": embedding, "output": {"tied": True, "label_smoothing": 0.7}}
    model = build_language_model(load_recipe("demo/standard", changes), VOCABULARY)
    assert isinstance(model.context, LSTM)
    assert model.context.dropout == LSTMDropout(0.1, 0.2, 0.4, 0.5)
    assert model.options == LossOptions(0.7, 0.3, 2.0, 1.0)
    assert [layer.weight_hh_l0.shape[1] for layer in model.context.layers] == [24, 24, 12]
    assert model.embedding.row_dropout == 0.6
    assert isinstance(model.embedding.map, ProjectiveMap)
    assert model.embedding.map.projection_std == 0.07


@pytest.mark.parametrize(("same_length", "eval_same_length"), [(True, False), (False, True)])
def test_a_transformer_xl_gets_its_settings(same_length: bool, eval_same_length: bool) -> None:
    context = {
        **{"kind": "transformer-xl", "layers": 2, "heads": 2, "head_dim": 6, "inner_dim": 20, "pre_norm": True},
        **{"input_dropout": 0.1, "hidden_dropout": 0.2, "output_dropout": 0.3, "attention_dropout": 0.4},
        **{"memory": 7, "same_length": same_length, "clamp": 9, "eval_memory": 11, "eval_clamp": 13},
        **{"eval_same_length": eval_same_length},
    }
    model = build_language_model(load_recipe("txl/small", {"context": context}), VocabularyFacts(20_000))
    built = model.context
    assert isinstance(built, TransformerXL)
    assert len(built.layers) == 2
    assert built.content_bias.shape == (2, 6)
    assert built.layers[0].expand.out_features == 20
    assert built.dropout == TransformerDropout(0.1, 0.2, 0.3, 0.4)
    assert built.reach == Reach(7, same_length, 9)
    assert built.evaluation == Reach(11, eval_same_length, 13)
    assert built.pre_norm
    assert model.options.output_dropout == 0  # it has its own, by position


def test_a_translator_gets_its_settings() -> None:
    transformer = {
        **{"heads": 2, "hidden_dim": 48, "encoder_layers": 1, "decoder_layers": 2, "norm": "post"},
        **{"dropout": 0.1, "attention_dropout": 0.2, "scaled": False, "share": "unit"},
    }
    changes = {
        "transformer": transformer,
        "embedding": {"unit": "define", "map_dim": 8, "embedding_dim": 16, "expand_dim": 32, "row_dropout": 0.3},
        "output": {"label_smoothing": 0.4},
        "beam": {"size": 3, "length_penalty": 0.7, "max_ratio": 1.7, "max_extra": 11},
    }
    recipe = load_recipe("tatoeba/laptop", changes)
    model = build_translator(recipe, VocabularyFacts(40), VocabularyFacts(30), pad_id=0)
    assert isinstance(model.transformer, Transformer)
    assert model.transformer.shape == TransformerShape(16, 2, 48, 1, 2, "post", 0.1, 0.2, False)
    assert model.source.row_dropout == model.target.row_dropout == 0.3
    assert model.label_smoothing == 0.4
    assert beam_options(recipe) == BeamOptions(3, 0.7, 1.7, 11)
