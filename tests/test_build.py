"""Every setting of a recipe reaches its part. All values here differ, so that none passes for another."""

import pytest

from torchdefine import ProjectiveMap
from torchdefine.context import LSTM, LSTMConfig, Transformer, TransformerConfig, TransformerXL
from torchdefine.context.transformer_xl import Reach
from torchdefine.embedding import VocabularyFacts
from torchdefine.recipe import load_recipe
from torchdefine.tasks.language import LanguageLossConfig, build_language_model
from torchdefine.tasks.translation import BeamConfig, build_translator

VOCABULARY = VocabularyFacts(50)


def test_an_lstm_gets_its_settings() -> None:
    context = {
        "output_dim": None,
        **{"kind": "lstm", "layers": 3, "hidden_dim": 24, "input_dropout": 0.1, "hidden_dropout": 0.2},
        **{"recurrent_dropout": 0.4, "state_dropout": 0.5},
    }
    changes = {
        "context": context,
        "embedding": {
            "kind": "projective",
            "map_dim": 12,
            "output_dim": 16,
            "projection_std": 0.07,
            "row_dropout": 0.6,
            "map_dropout": 0.15,
        },
        "output": {"kind": "full", "tied": "table"},
        "loss": {"label_smoothing": 0.7, "output_dropout": 0.3, "activation_penalty": 2, "temporal_penalty": 1},
    }
    model = build_language_model(load_recipe("demo/standard", changes), VOCABULARY)
    assert isinstance(model.context, LSTM)
    assert model.context.config == LSTMConfig("lstm", 3, 24, None, 0.1, 0.2, 0.5, 0.4)
    assert [layer.recurrent_dropout for layer in model.context.layers] == [0.4] * 3
    assert model.loss == LanguageLossConfig(0.7, 0.3, 2.0, 1.0)
    assert [layer.weight_hh_l0.shape[1] for layer in model.context.layers] == [24, 24, 12]
    assert (model.embedding.row_dropout, model.embedding.map_dropout) == (0.6, 0.15)
    assert isinstance(model.embedding.map, ProjectiveMap)
    assert model.embedding.map.projection_std == 0.07


@pytest.mark.parametrize("kind", ["adaptive", "mixture"])
def test_an_adaptive_embedding_gets_its_width(kind: str) -> None:
    """An LSTM whose width is left open ends as wide as the vectors that tied projections take."""
    changes = {
        "embedding": {"map_dim": 16, "output_dim": 24, "cutoffs": [10, 30]},
        "unit": {"kind": "define", "embedding_dim": 20, "expand_dim": 32},
        "context": {"output_dim": None, "hidden_dim": 28},
        "output": {"kind": kind},
    }
    model = build_language_model(load_recipe("demo/adaptive-define", changes), VOCABULARY)
    assert [tuple(projection.shape) for projection in model.embedding.map.projections] == [(16, 24), (8, 24), (4, 24)]
    assert model.embedding.unit.plan.map_dim == 24
    component = model.output if kind == "adaptive" else model.output.component
    assert (component.hidden_dim, component.projection) == (24, None)
    assert model.context.layers[0].weight_hh_l0.shape[1] == (24 if kind == "adaptive" else 16)
    changes["output"] = {"kind": "adaptive", "tied_projections": [True, True, False]}
    tied = build_language_model(load_recipe("demo/adaptive-define", changes), VOCABULARY).output
    assert set(tied.projections) == {"2"}


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
    config = built.config
    assert (config.input_dropout, config.hidden_dropout, config.output_dropout) == (0.1, 0.2, 0.3)
    assert (built.layers[0].hidden_dropout, built.layers[0].attention.dropout) == (0.2, 0.4)
    assert built.reach == Reach(7, same_length, 9)
    assert built.evaluation == Reach(11, eval_same_length, 13)
    assert built.pre_norm
    assert model.loss.output_dropout == 0  # it has its own, by position


def test_a_translator_gets_its_settings() -> None:
    changes = {
        "source": {"share": "unit"},
        "context": {
            **{"heads": 2, "hidden_dim": 48, "encoder_layers": 1, "decoder_layers": 2, "norm": "post"},
            **{"dropout": 0.1, "attention_dropout": 0.2},
        },
        "embedding": {"map_dim": 8, "row_dropout": 0.3, "map_dropout": 0.2},
        "unit": {"kind": "define", "embedding_dim": 16, "expand_dim": 32},
        "loss": {"label_smoothing": 0.4},
        "beam": {"size": 3, "length_penalty": 0.7, "max_ratio": 1.7, "max_extra": 11},
    }
    recipe = load_recipe("tatoeba/laptop", changes)
    model = build_translator(recipe, VocabularyFacts(40), VocabularyFacts(30), pad_id=0)
    assert isinstance(model.transformer, Transformer)
    assert model.transformer.width == 16
    assert model.transformer.config == TransformerConfig("transformer", 1, 2, 2, 48, "post", 0.1, 0.2)
    assert model.source.row_dropout == model.target.row_dropout == 0.3
    assert model.source.map_dropout == model.target.map_dropout == 0.2
    assert model.label_smoothing == 0.4
    assert recipe.beam == BeamConfig(3, 0.7, 1.7, 11)
