"""Training steps of masked language models, with and without DeFINE, beside BERT of transformers of the same size.

All read the same rows with the same tokens hidden. Transformers' class makes logits at every place, ours at the hidden
ones alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measuring import Contestant, Group, Prepared, Setting, times_faster
from benchmarks.plain_step import PlainStep
from benchmarks.records import Benchmark
from benchmarks.steps import NO_GPU, RATE, Place, our_step
from benchmarks.texts import real_text
from torchdefine.recipe import load_recipe, merged
from torchdefine.tasks.masked import MaskedRecipe
from torchdefine.tasks.masked.batches import Hidden
from torchdefine.training.precision import Precision
from torchdefine.training.step import Batch

AS_BERT: dict[str, Any] = {"context": {"norm": "post", "positions": "learned", "gated": False, "hidden_dim": 2048}}
SMALL: dict[str, Any] = {
    "context": {"layers": 2, "hidden_dim": 512, "heads": 4},
    "train": {"batch_size": 8, "length": 64, "precision": "fp32"},
}
SMALL_TABLES = {"standard": {"embedding": {"map_dim": 128}}, "define": {"unit": {"embedding_dim": 128}}}
VOCABULARY, SMALL_VOCABULARY = 32_000, 8_000
SLOW = "compiling takes minutes, so only a GPU's full shapes have it"
BERT, COMPILED, OURS = "BERT of transformers", "BERT of transformers, compiled", "ours"


def recipe_of(table: str, small: bool) -> MaskedRecipe:
    changes = merged(AS_BERT, merged(SMALL, SMALL_TABLES[table])) if small else AS_BERT
    recipe: MaskedRecipe = load_recipe(f"masked/wiki78m-32k-{table}", changes)
    return recipe


def place_of(recipe: MaskedRecipe, setting: Setting) -> Place:
    """Rows of real text with as many tokens hidden as the recipe has; the last id is the mask token."""
    size, train = SMALL_VOCABULARY if setting.small else VOCABULARY, recipe.train
    ids = real_text(setting.data).ids((train.batch_size, train.length), torch.device("cpu"), size - 1).numpy()
    count = round(recipe.masking.fraction * train.length)  # K
    places = np.random.default_rng(0).random(ids.shape).argsort(axis=1)[:, :count]  # (B, K)
    targets = np.take_along_axis(ids, places, axis=1)
    seen = ids.copy()
    np.put_along_axis(seen, places, size - 1, axis=1)
    part = Hidden(seen, places, targets).part(setting.device)
    return Place(size, Batch([part], targets.size), setting.device)


class Bert(nn.Module):
    """The stock class, as a plain step calls it."""

    def __init__(self, recipe: MaskedRecipe, vocabulary: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        context = recipe.context
        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=recipe.embedding.map_dim,
            num_hidden_layers=context.layers,
            num_attention_heads=context.heads,
            intermediate_size=context.hidden_dim,
            max_position_embeddings=context.most_places,
            type_vocab_size=1,
            hidden_dropout_prob=context.dropout,
            attention_probs_dropout_prob=context.attention_dropout,
        )
        self.model = BertForMaskedLM(config)

    def forward(self, ids: Tensor, labels: Tensor, state: Any) -> tuple[Tensor, None]:
        return self.model(input_ids=ids, labels=labels).loss, None


def bert_step(recipe: MaskedRecipe, place: Place, compiled: bool) -> Prepared:
    torch.manual_seed(1)
    with place.device:
        model = Bert(recipe, place.vocabulary)
    if compiled:
        model.compile()
    ids, places, targets = place.inputs
    labels = torch.full_like(ids, -100).scatter_(1, places, targets)  # (B, T)
    precision = Precision(recipe.train.precision, place.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=place.device.type == "cuda")
    step = PlainStep(model, (ids, labels), optimizer, precision, recipe.optim.clip)
    facts = {"parameters": sum(p.numel() for p in model.parameters()), "precision": precision.name}
    return Prepared(step, lambda: facts, precision.matmul_mode)


def contestants(setting: Setting) -> Iterator[Contestant]:
    standard, define = (recipe_of(table, setting.small) for table in ("standard", "define"))
    place = place_of(standard, setting)
    lacks = "" if importlib.util.find_spec("transformers") else "it needs the package transformers"
    yield Contestant(BERT, partial(bert_step, standard, place, False), lacks)
    lacks = lacks or ("" if setting.on_gpu and not setting.small else SLOW)
    yield Contestant(COMPILED, partial(bert_step, standard, place, True), lacks)
    for name, recipe in ((OURS, standard), (f"{OURS} with DeFINE", define)):
        yield Contestant(f"{name}, kernel by kernel", partial(our_step, recipe, place, False))
        yield Contestant(f"{name}, recorded", partial(our_step, recipe, place, True), "" if setting.on_gpu else NO_GPU)


def groups(setting: Setting) -> Iterator[Group]:
    train = recipe_of("standard", setting.small).train
    size = SMALL_VOCABULARY if setting.small else VOCABULARY
    goal = times_faster(f"{OURS}, recorded", COMPILED, 1.5)
    note = f"{train.batch_size} rows of {train.length} tokens, {size:,} types"
    yield Group("masked language models", list(contestants(setting)), [goal], note)


BENCHMARK = Benchmark("masked", "training steps of masked language models beside BERT of transformers", groups)
