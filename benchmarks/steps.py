"""Whole training steps of every family of recipes, with and without DeFINE, beside a plain loop over stock modules.

A step is forward, backward, clipping and optimiser, on one batch again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measuring import (
    Contestant,
    Goal,
    Group,
    Prepared,
    Setting,
    milliseconds,
    share_of_time,
    times_faster,
)
from benchmarks.plain_lstm import PlainAWDLSTM, PlainLSTM
from benchmarks.plain_step import PlainModel, PlainStep, TorchAdaptiveLoss
from benchmarks.plain_transformer_xl import PlainTransformerXL
from benchmarks.plain_translator import PlainTranslator
from benchmarks.records import Benchmark
from benchmarks.texts import WIKIPEDIA_SIZE, real_text
from torchdefine.context import TransformerXL
from torchdefine.data import IGNORE
from torchdefine.embedding import VocabularyFacts, build_embedding
from torchdefine.modes import prepare
from torchdefine.recipe import load_recipe, merged
from torchdefine.tasks.language import build_language_model
from torchdefine.tasks.masked import MaskedRecipe, build_masked_model
from torchdefine.tasks.translation import TranslationRecipe, build_translator
from torchdefine.training.precision import Precision
from torchdefine.training.step import Batch, Part, TrainingStep

RATE = 1e-5  # so small that the same batch over and over leads nowhere
NO_GPU = "it needs a CUDA device"
COMPILED = "plain loop, its model compiled"
SENTENCE_LENGTH = 32


class Place(NamedTuple):
    """Where a family's steps run: its vocabulary, its batch and the device."""

    vocabulary: int
    batch: Batch
    device: torch.device

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.batch.parts[0].inputs


@dataclass(frozen=True)
class Family:
    """Two recipes that differ by DeFINE alone, and the plain loop that one of them is compared with."""

    name: str
    without: str
    with_define: str
    plain_of: str
    """Which of the two the plain loop computes."""
    plain: Callable[[Any, Place], nn.Module]
    vocabulary: int
    changes: dict[str, Any] = field(default_factory=dict)
    small_vocabulary: int = 8000
    small: dict[str, Any] = field(default_factory=dict)
    small_unit: dict[str, Any] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()

    def recipe(self, name: str, small: bool) -> Any:
        if not small:
            return load_recipe(name, self.changes)
        changes = merged(self.changes, self.small)
        return load_recipe(name, {**changes, "unit": self.small_unit} if name == self.with_define else changes)

    def place(self, setting: Setting) -> Place:
        recipe = self.recipe(self.without, setting.small)
        size = self.small_vocabulary if setting.small else self.vocabulary
        batch = (
            sentence_batch(recipe, size, setting)
            if isinstance(recipe, TranslationRecipe)
            else text_batch(recipe, size, setting)
        )
        return Place(size, batch, setting.device)


def text_batch(recipe: Any, size: int, setting: Setting) -> Batch:
    """Real text, its rare words spread over the vocabulary where that is larger than the text's own."""
    text, shape = real_text(setting.data), (recipe.train.batch_size, recipe.train.length + 1)
    ids = (
        text.wide_ids(shape, setting.device, size) if size == WIKIPEDIA_SIZE else text.ids(shape, setting.device, size)
    )
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()  # (B, T) each
    return Batch([Part((inputs, targets), targets.cpu().numpy())], targets.numel())


def sentence_batch(recipe: Any, size: int, setting: Setting) -> Batch:
    """As many pairs as the recipe's tokens allow, a quarter of a sentence shorter at most; the last id is padding."""
    pairs = recipe.train.batch_tokens // SENTENCE_LENGTH
    text = real_text(setting.data).ids((3, pairs, SENTENCE_LENGTH), torch.device("cpu"), size - 1).numpy()
    random = np.random.default_rng(0)
    lengths = random.integers(3 * SENTENCE_LENGTH // 4, SENTENCE_LENGTH + 1, (2, pairs, 1))
    beyond = np.arange(SENTENCE_LENGTH) >= lengths  # (2, B, T)
    source = np.where(beyond[0], size - 1, text[0])
    inputs = np.where(beyond[1], size - 1, text[1])
    targets = np.where(beyond[1], IGNORE, text[2])
    moved = tuple(torch.from_numpy(part).to(setting.device) for part in (source, inputs, targets))
    return Batch([Part(moved, targets)], int((targets != IGNORE).sum()))


def build_model(recipe: Any, place: Place) -> Any:
    torch.manual_seed(1)
    facts = VocabularyFacts(place.vocabulary)
    with place.device:
        if isinstance(recipe, TranslationRecipe):
            return build_translator(recipe, facts, facts, pad_id=place.vocabulary - 1)
        if isinstance(recipe, MaskedRecipe):
            return build_masked_model(recipe, facts)
        return build_language_model(recipe, facts)


def our_step(recipe: Any, place: Place, recorded: bool) -> Prepared:
    model = build_model(recipe, place)
    prepare(model)  # as the training loop does
    precision = Precision(recipe.train.precision, place.device)
    optimizer = recipe.optim.build(model.parameters(), place.device)
    rows = len(place.inputs[0])
    step = TrainingStep(model, model, optimizer, precision, [rows], recipe.optim.clip, recorded)

    def facts() -> dict[str, Any]:
        counted = {"parameters": sum(p.numel() for p in model.parameters()), "precision": precision.name}
        return {**counted, "kinds of steps recorded": step.recorded_kinds} if recorded else counted

    return Prepared(lambda: step(place.batch, RATE), facts, precision.matmul_mode)


def plain_step(family: Family, recipe: Any, place: Place, compiled: bool = False) -> Prepared:
    torch.manual_seed(1)
    with place.device:
        model = family.plain(recipe, place)
    if compiled:
        model.compile()
    precision = Precision(recipe.train.precision, place.device)
    kind: Any = torch.optim.SGD if recipe.optim.kind == "sgd" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=RATE, weight_decay=recipe.optim.weight_decay)
    step = PlainStep(model, place.inputs, optimizer, precision, recipe.optim.clip)
    facts = {"parameters": sum(p.numel() for p in model.parameters()), "precision": precision.name}
    return Prepared(step, lambda: facts, precision.matmul_mode)


def plain_lstm(recipe: Any, place: Place) -> nn.Module:
    """torch has no adaptive input, so that and the unit are ours, kernel by kernel; LSTM and softmax are torch's."""
    embedding = build_embedding(recipe.embedding, recipe.unit, VocabularyFacts(place.vocabulary))
    context, width = recipe.context, recipe.embedding.map_dim
    lstm = PlainLSTM(embedding.embedding_dim, context.hidden_dim, width, context.layers, context.hidden_dropout)
    loss = TorchAdaptiveLoss(width, place.vocabulary, recipe.embedding.cutoffs, recipe.embedding.division)
    return PlainModel(embedding, lstm, loss)


def plain_transformer_xl(recipe: Any, place: Place) -> nn.Module:
    """The textbook's layers between our embedding and our output layer, which has to ask the device for its bands."""
    ours = build_language_model(recipe, VocabularyFacts(place.vocabulary))
    assert isinstance(ours.context, TransformerXL)
    return PlainModel(ours.embedding, PlainTransformerXL(ours.context), OurLoss(ours.output))


class OurLoss(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.output.loss(hidden, targets)
        return loss


class TimeFirst(nn.Module):
    """For a model that takes (T, B)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor, state: Any) -> Any:
        return self.model(ids.T, targets.T, state)


def plain_awd_lstm(recipe: Any, place: Place) -> nn.Module:
    return TimeFirst(PlainAWDLSTM(place.vocabulary, recipe.embedding.map_dim, recipe.context.hidden_dim))


def plain_translator(recipe: Any, place: Place) -> nn.Module:
    width = getattr(recipe.unit, "embedding_dim", None) or recipe.embedding.map_dim
    return PlainTranslator(place.vocabulary, width, recipe.context, place.vocabulary - 1, recipe.loss.label_smoothing)


FAMILIES = (
    Family(
        "Transformer-XL",
        "txl/projective-128",
        "txl/define-128",
        "txl/define-128",
        plain_transformer_xl,
        WIKIPEDIA_SIZE,
        changes={"train": {"precision": "bf16"}},
        small={
            "context": {"layers": 2, "memory": 32, "inner_dim": 512},
            "output": {"cutoffs": [1000, 2000, 4000]},
            "train": {"batch_size": 4, "length": 32},
        },
        small_unit={"expand_dim": 768},
        goals=(
            times_faster("txl/define-128, recorded", "plain loop, txl/define-128", 5),
            milliseconds("txl/define-128, recorded", 19),
            share_of_time("txl/define-128, recorded", "txl/projective-128, recorded", 0.02),
        ),
    ),
    Family(
        "LSTM",
        "table1a/r2",
        "table1a/r3",
        "table1a/r3",
        plain_lstm,
        WIKIPEDIA_SIZE,
        changes={"train": {"batch_size": 64, "length": 140, "precision": "bf16"}},
        small={
            "embedding": {"cutoffs": [1000, 2000, 4000]},
            "context": {"hidden_dim": 256},
            "train": {"batch_size": 8, "length": 35},
        },
        goals=(
            times_faster("table1a/r3, recorded", "plain loop, table1a/r3", 2),
            share_of_time("table1a/r3, recorded", "table1a/r2, recorded", 0.02),
        ),
    ),
    Family(
        "AWD-LSTM",
        "ptb/awd-lstm",
        "ptb/awd-lstm-define",
        "ptb/awd-lstm",
        plain_awd_lstm,
        10_000,
        changes={"train": {"precision": "bf16"}},
        small={"context": {"hidden_dim": 256}, "train": {"batch_size": 8, "length": 35}},
        goals=(
            times_faster("ptb/awd-lstm, recorded", "plain loop, ptb/awd-lstm", 2),
            share_of_time("ptb/awd-lstm-define, recorded", "ptb/awd-lstm, recorded", 0.02),
        ),
    ),
    Family(
        "translation",
        "europarl/transformer",
        "europarl/transformer-define",
        "europarl/transformer",
        plain_translator,
        32_000,
        small={
            "train": {"batch_tokens": 512},
            "context": {"encoder_layers": 1, "decoder_layers": 1, "hidden_dim": 512},
        },
        goals=(
            times_faster("europarl/transformer, recorded", "plain loop, europarl/transformer", 1),
            share_of_time("europarl/transformer-define, recorded", "europarl/transformer, recorded", 0.02),
        ),
    ),
)


def group_of(family: Family, setting: Setting) -> Group:
    place = family.place(setting)
    recipes = {name: family.recipe(name, setting.small) for name in (family.without, family.with_define)}
    plain = recipes[family.plain_of]
    compiles = setting.compile or (setting.on_gpu and not setting.small)
    compiling = "" if compiles else "compiling takes minutes: --compile asks for it"
    contestants = [
        Contestant(f"plain loop, {family.plain_of}", lambda: plain_step(family, plain, place)),
        Contestant(COMPILED, lambda: plain_step(family, plain, place, compiled=True), compiling),
    ]
    for name, recipe in recipes.items():
        for recorded in (False, True):
            contestants.append(
                Contestant(
                    f"{name}, {'recorded' if recorded else 'kernel by kernel'}",
                    lambda recipe=recipe, recorded=recorded: our_step(recipe, place, recorded),  # type: ignore[misc]
                    NO_GPU if recorded and not setting.on_gpu else "",
                )
            )
    shapes = " and ".join("×".join(map(str, part.shape)) for part in place.inputs[:2])
    return Group(family.name, contestants, list(family.goals), f"ids {shapes}, {place.vocabulary:,} types")


def groups(setting: Setting) -> Iterator[Group]:
    for family in FAMILIES:
        yield group_of(family, setting)


BENCHMARK = Benchmark("steps", "whole training steps of every family of recipes, with and without DeFINE", groups)
