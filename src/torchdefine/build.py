"""From a recipe to its text and its modules, and the names under which others may add their own modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from torchdefine.context import LSTM, LayerSizes, LSTMDropout, Reach, TransformerDropout, TransformerXL
from torchdefine.data import Corpus, encode_corpus, resolve_corpus
from torchdefine.embedding import (
    AdaptiveMap,
    DeFINE,
    DenseMLP,
    DenseProjection,
    MapLayer,
    ProjectiveMap,
    StandardMap,
    TokenEmbedding,
    UnitOptions,
    shrink_cutoffs,
)
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.models import LanguageModel, LossOptions
from torchdefine.output import (
    AdaptiveSoftmax,
    AdaptiveTableSoftmax,
    BandedSoftmax,
    FullSoftmax,
    MixtureSoftmax,
    OutputLayer,
)
from torchdefine.recipe import ContextSettings, DataSettings, EmbeddingSettings, OutputSettings, Recipe
from torchdefine.spelling import did_you_mean


@dataclass(frozen=True)
class VocabularyFacts:
    """What modules need to know of the vocabulary."""

    size: int
    counts: Sequence[int] | np.ndarray | None = None
    """One for each id where ids are not in frequency order, so that bands can go by frequency."""

    def counts_tensor(self) -> torch.Tensor | None:
        return None if self.counts is None else torch.as_tensor(self.counts, device="cpu")


EmbeddingBuilder = Callable[[EmbeddingSettings, VocabularyFacts], TokenEmbedding]
ContextBuilder = Callable[[ContextSettings, int, int], Any]
"""Settings, the input width and the output width that a tied output layer prefers (0: none)."""
OutputBuilder = Callable[[OutputSettings, int, TokenEmbedding, VocabularyFacts], OutputLayer]
"""Settings, the context model's width, the embedding to tie to and its vocabulary."""

_EMBEDDINGS: dict[str, EmbeddingBuilder] = {}
_CONTEXTS: dict[str, ContextBuilder] = {}
_OUTPUTS: dict[str, OutputBuilder] = {}

B = TypeVar("B")


def register_embedding(name: str, builder: EmbeddingBuilder) -> None:
    """Make ``embedding.kind: name`` build what ``builder(settings, vocabulary)`` returns."""
    _register(_EMBEDDINGS, name, builder, "embedding")


def register_context(name: str, builder: ContextBuilder) -> None:
    """Make ``context.kind: name`` build what ``builder(settings, input_dim, wished_output_dim)`` returns."""
    _register(_CONTEXTS, name, builder, "context model")


def register_output(name: str, builder: OutputBuilder) -> None:
    """Make ``output.kind: name`` build what ``builder(settings, hidden_dim, embedding, vocabulary)`` returns."""
    _register(_OUTPUTS, name, builder, "output layer")


def open_corpus(settings: DataSettings, progress: Progress | None = None, *, out: str | Path | None = None) -> Corpus:
    """The recipe's text, encoded, in the cache or in a new folder; the rules for words do not apply to a tokenizer."""
    words = settings.tokenizer is None
    return encode_corpus(
        resolve_corpus(settings.corpus, progress=progress),
        min_count=settings.min_count if words else 1,
        max_size=settings.max_size if words else None,
        tokenizer=settings.tokenizer,
        out=out,
        progress=progress,
    )


def build_language_model(recipe: Recipe, vocabulary: VocabularyFacts) -> LanguageModel:
    """The model of a recipe with fresh weights from torch's current random state."""
    embedding = build_embedding(recipe.embedding, vocabulary)
    wished = embedding.map_dim if recipe.output.tied else 0
    context = _find(_CONTEXTS, recipe.context.kind, "context model")(recipe.context, embedding.embedding_dim, wished)
    output = build_output(recipe.output, context.output_dim, embedding, vocabulary)
    options = LossOptions(
        recipe.output.label_smoothing,
        0.0 if isinstance(context, TransformerXL) else recipe.context.output_dropout,  # it has its own, by position
        recipe.context.activation_penalty,
        recipe.context.temporal_penalty,
    )
    return LanguageModel(embedding, context, output, options)


def build_embedding(settings: EmbeddingSettings, vocabulary: VocabularyFacts) -> TokenEmbedding:
    """The embedding that a recipe's section asks for, by its kind."""
    return _find(_EMBEDDINGS, settings.kind, "embedding")(settings, vocabulary)


def build_output(
    settings: OutputSettings, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts
) -> OutputLayer:
    """The output layer that a recipe's section asks for, by its kind; ``embedding`` is what it ties to."""
    return _find(_OUTPUTS, settings.kind, "output layer")(settings, hidden_dim, embedding, vocabulary)


def _build_embedding(settings: EmbeddingSettings, vocabulary: VocabularyFacts) -> TokenEmbedding:
    embedding = _with_unit(_build_map(settings, vocabulary), settings)
    if isinstance(embedding.map, ProjectiveMap) and settings.projection_std is not None:
        embedding.map.projection_std = settings.projection_std
    std = settings.map_dim**-0.5 if settings.init_std is None else settings.init_std
    embedding.map.reset_parameters(std)
    embedding.row_dropout = settings.row_dropout
    return embedding


def _build_map(settings: EmbeddingSettings, vocabulary: VocabularyFacts) -> MapLayer:
    scale = settings.scale or (settings.map_dim**0.5 if settings.scaled else 1.0)
    if settings.map == "standard":
        return StandardMap(vocabulary.size, settings.map_dim, scale=scale)
    if settings.map == "projective":
        width = settings.projected_dim or settings.embedding_dim or settings.map_dim
        return ProjectiveMap(vocabulary.size, settings.map_dim, width, scale=scale)
    return AdaptiveMap(
        vocabulary.size,
        settings.map_dim,
        _fitting_cutoffs("embedding", settings.cutoffs, vocabulary.size, divisors=(8, 2)),
        settings.division,
        scale=scale,
        counts=vocabulary.counts_tensor(),
    )


def _with_unit(map_layer: MapLayer, settings: EmbeddingSettings) -> TokenEmbedding:
    width = settings.embedding_dim or map_layer.output_dim
    if settings.unit == "none":
        if width != map_layer.output_dim:
            raise UserError(
                f"embedding_dim {width} differs from the {map_layer.output_dim} of the map: "
                "use embedding.unit projection, mlp or define, or a projective map."
            )
        return TokenEmbedding(map_layer)
    if settings.unit == "projection":
        return TokenEmbedding(map_layer, DenseProjection(map_layer.output_dim, width, settings.equalised), width)
    if settings.unit == "mlp":
        mlp = DenseMLP(map_layer.output_dim, settings.expand_dim, width, settings.equalised)
        return TokenEmbedding(map_layer, mlp, width)
    changes = {
        name: getattr(settings, name)
        for name in ("groups", "skip", "reach_expand_dim", "rounding", "multiple_of", "fixed_width")
        if getattr(settings, name) is not None
    }
    layers = {name: getattr(settings, name) for name in ("norm", "activation", "dropout", "equalised")}
    options = UnitOptions.of(settings.unit, **changes, **layers)
    return DeFINE.over(map_layer, width, settings.expand_dim, settings.depth, settings.max_groups, options)


def _build_lstm(settings: ContextSettings, input_dim: int, wished_output_dim: int) -> LSTM:
    dropout = LSTMDropout(
        settings.input_dropout, settings.hidden_dropout, settings.recurrent_dropout, settings.state_dropout
    )
    output_dim = settings.output_dim or wished_output_dim or settings.hidden_dim
    return LSTM(input_dim, settings.hidden_dim, output_dim, settings.layers, dropout)


def _build_transformer_xl(settings: ContextSettings, input_dim: int, wished_output_dim: int) -> TransformerXL:
    """As wide as its inputs; an output layer of another width has projections."""
    if settings.head_dim is None and input_dim % settings.heads:
        raise UserError(
            f"{settings.heads} heads do not divide vectors {input_dim} wide: set context.head_dim, or other heads."
        )
    sizes = LayerSizes(
        settings.heads, settings.head_dim or input_dim // settings.heads, settings.inner_dim or 4 * input_dim
    )
    dropout = TransformerDropout(
        settings.input_dropout, settings.hidden_dropout, settings.output_dropout, settings.attention_dropout
    )
    evaluation = Reach(settings.eval_memory or settings.memory, settings.eval_same_length, settings.eval_clamp)
    reach = Reach(settings.memory, settings.same_length, settings.clamp)
    return TransformerXL(input_dim, settings.layers, sizes, reach, evaluation, dropout, settings.pre_norm)


def _build_full_softmax(
    settings: OutputSettings, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts
) -> FullSoftmax:
    if not settings.tied:
        return FullSoftmax(hidden_dim, num_embeddings=embedding.num_embeddings, bias=settings.bias)
    if not isinstance(embedding.map, StandardMap | ProjectiveMap):
        raise UserError("A tied full softmax needs a standard or projective map: use output.kind adaptive.")
    return FullSoftmax(hidden_dim, embedding.map, bias=settings.bias)


def _build_adaptive_softmax(
    settings: OutputSettings, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts
) -> BandedSoftmax:
    if settings.tied and isinstance(embedding.map, StandardMap | ProjectiveMap):
        halves = tuple(2**band for band in range(len(settings.cutoffs), 0, -1))  # as many, for tied_projections to fit
        cutoffs = _fitting_cutoffs("output", settings.cutoffs, embedding.num_embeddings, halves)
        tied_projections = settings.tied_projections[: len(cutoffs) + 1]
        return AdaptiveTableSoftmax(hidden_dim, embedding.map, cutoffs, tied_projections, vocabulary.counts_tensor())
    if not isinstance(embedding.map, AdaptiveMap):
        raise UserError(
            "An untied adaptive softmax takes its bands from an adaptive map: use embedding.map adaptive, or "
            "output.tied true."
        )
    if not settings.tied:
        return AdaptiveSoftmax.untied(
            hidden_dim, embedding.num_embeddings, embedding.map.cutoffs, embedding.map.division, embedding.map.ranks
        )
    return AdaptiveSoftmax(hidden_dim, embedding.map)


def _build_mixture(
    settings: OutputSettings, hidden_dim: int, embedding: TokenEmbedding, vocabulary: VocabularyFacts
) -> MixtureSoftmax:
    """Its components are of the kind that the map allows, as wide as the table."""
    build = _build_adaptive_softmax if isinstance(embedding.map, AdaptiveMap) else _build_full_softmax
    component = build(settings, embedding.map_dim, embedding, vocabulary)
    return MixtureSoftmax(hidden_dim, component, settings.components, settings.latent_dropout)


def _fitting_cutoffs(section: str, cutoffs: tuple[int, ...], size: int, divisors: tuple[int, ...]) -> tuple[int, ...]:
    """Those inside the vocabulary; if there are none, shares of it are suggested."""
    fitting = shrink_cutoffs(cutoffs, size)
    if not fitting:
        shares = sorted({size // divisor for divisor in divisors} - {0})
        with_bands = f"use --{section}.cutoffs {','.join(map(str, shares))}, say, or " if shares else ""
        without_bands = {
            "embedding": "do without bands by --embedding.map standard and --output.kind full",
            "output": "do without bands by --output.kind full",
        }[section]
        raise UserError(
            f"All of {section}.cutoffs {cutoffs} lie outside the vocabulary of {size}: {with_bands}{without_bands}."
        )
    return fitting


def _register(registry: dict[str, B], name: str, builder: B, what: str) -> None:
    if name in registry:
        raise UserError(f"The {what} {name!r} is registered already: use another name.")
    registry[name] = builder


def _find(registry: dict[str, B], name: str, what: str) -> B:
    if name not in registry:
        raise UserError(f"The {what} {name!r} is unknown{did_you_mean(name, registry)}")
    return registry[name]


register_embedding("tokens", _build_embedding)
register_context("lstm", _build_lstm)
register_context("transformer-xl", _build_transformer_xl)
register_output("full", _build_full_softmax)
register_output("adaptive", _build_adaptive_softmax)
register_output("mixture", _build_mixture)
