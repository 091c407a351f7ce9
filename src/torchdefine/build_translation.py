"""From a recipe for translation to its bitext and its model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from torchdefine.build import VocabularyFacts, build_embedding, build_output
from torchdefine.context import Transformer, TransformerShape
from torchdefine.data import Bitext, BitextRules, TokenizerPair, encode_bitext, resolve_bitext
from torchdefine.decoding import BeamOptions
from torchdefine.embedding import TokenEmbedding
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.models import Translator
from torchdefine.recipe import EmbeddingSettings, Recipe
from torchdefine.recipe.settings import merge, read_settings, to_plain


def open_bitext(
    recipe: Recipe,
    progress: Progress | None = None,
    *,
    data: str | Path | None = None,
    tokenization: TokenizerPair | None = None,
    split: str | None = None,
) -> Bitext:
    """The recipe's bitext, encoded; or another one, with tokenizers that exist already, and maybe one split of it."""
    settings = recipe.bitext
    if tokenization is None and recipe.data.tokenizer is not None:
        tokenization = TokenizerPair.load(recipe.data.tokenizer)
    rules = BitextRules(
        settings.source, settings.target, settings.bpe_size, settings.joint, settings.max_length, settings.max_ratio
    )
    path = resolve_bitext(recipe.data.corpus if data is None else data)
    return encode_bitext(path, rules, tokenization=tokenization, split=split, progress=progress)


def build_translator(recipe: Recipe, source: VocabularyFacts, target: VocabularyFacts, pad_id: int) -> Translator:
    """The model of a recipe with fresh weights from torch's current random state."""
    target_embedding = build_embedding(recipe.embedding, target)
    source_embedding = _source_embedding(recipe, source, target, target_embedding)
    settings = recipe.transformer
    shape = TransformerShape(
        target_embedding.embedding_dim,
        settings.heads,
        settings.hidden_dim,
        settings.encoder_layers,
        settings.decoder_layers,
        settings.norm,
        settings.dropout,
        settings.attention_dropout,
        settings.scaled,
    )
    transformer = Transformer(shape)
    output = build_output(recipe.output, shape.width, target_embedding, target)
    return Translator(source_embedding, target_embedding, transformer, output, pad_id, recipe.output.label_smoothing)


def _source_embedding(
    recipe: Recipe, source: VocabularyFacts, target: VocabularyFacts, target_embedding: TokenEmbedding
) -> TokenEmbedding:
    settings, share = recipe.embedding, recipe.transformer.share
    changes = recipe.transformer.source_embedding
    if share != "nothing" and changes:
        raise UserError(
            f"transformer.share {share} leaves the source side no embedding of its own: use transformer.share nothing, "
            "or leave transformer.source_embedding out."
        )
    if share == "embedding":
        if source.size != target.size:
            raise UserError("A shared embedding needs one BPE for both languages: use bitext.joint true.")
        return target_embedding
    if changes:
        merged = merge(to_plain(settings), changes)
        settings = read_settings(EmbeddingSettings, merged, "transformer.source_embedding")
    if share == "unit":
        if target_embedding.unit is None:
            raise UserError("There is no unit to share: use embedding.unit define, or transformer.share nothing.")
        beside = TokenEmbedding.beside(build_embedding(settings, source).map, target_embedding)
        beside.row_dropout = settings.row_dropout
        return beside
    return build_embedding(settings, source)


def trained_facts(bitext: Bitext) -> tuple[VocabularyFacts, VocabularyFacts]:
    """How many subwords each side has and how often they occur in training: bands go by that."""
    pair, train = bitext.tokenization, bitext.splits["train"]
    sides = ((train.source, len(pair.source)), (train.target, len(pair.target)))
    source, target = (VocabularyFacts(size, file.counts(size)) for file, size in sides)
    return source, target


def loaded_facts(pair: TokenizerPair) -> tuple[VocabularyFacts, VocabularyFacts]:
    """For a model whose weights are about to be loaded: where bands go by rank, the ranks come with the weights."""
    sizes = len(pair.source), len(pair.target)
    source, target = (VocabularyFacts(size, np.zeros(size, np.int64)) for size in sizes)
    return source, target


def beam_options(recipe: Recipe) -> BeamOptions:
    beam = recipe.beam
    return BeamOptions(beam.size, beam.length_penalty, beam.max_ratio, beam.max_extra)
