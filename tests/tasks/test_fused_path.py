"""Whole models with the operations of the GPU's path and without them: the same losses and gradients.

On a CPU the operations run in plain torch, in float64; on a GPU as kernels, in half precision and in recorded steps.
"""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchdefine.context import residual
from torchdefine.embedding import VocabularyFacts
from torchdefine.output import linear_cross_entropy
from torchdefine.recipe import Recipe, load_recipe
from torchdefine.tasks.language import build_language_model
from torchdefine.tasks.translation import build_translator
from torchdefine.training.precision import Precision
from torchdefine.training.step import Batch, Part, TrainingStep

VOCABULARY = 123  # of which no band has a round number
RECIPES: dict[str, dict[str, Any]] = {
    "txl/define-128": {
        "embedding": {"map_dim": 18, "scale": 5.0, "output_dim": 32},
        "unit": {"embedding_dim": 32, "expand_dim": 64, "max_groups": 4},
        "context": {"layers": 2, "heads": 2, "head_dim": 9, "inner_dim": 50, "memory": 8},
        "output": {"cutoffs": [30, 60, 90]},
    },
    "wmt14/transformer-define": {
        "embedding": {"map_dim": 16},
        "unit": {"embedding_dim": 32, "expand_dim": 64, "max_groups": 4},
        "context": {"encoder_layers": 2, "decoder_layers": 2, "heads": 2, "hidden_dim": 50},
    },
}


NO_DROPOUT: dict[str, dict[str, Any]] = {
    "txl/define-128": {"context": dict.fromkeys(("input_dropout", "hidden_dropout", "output_dropout"), 0.0)},
    "wmt14/transformer-define": {"context": {"dropout": 0.0}},
}


def made_small(name: str, dropout: bool) -> Recipe:
    more = {} if dropout else NO_DROPOUT[name]
    changes = {section: values | more.get(section, {}) for section, values in RECIPES[name].items()}
    return load_recipe(name, changes)


def build(recipe: Recipe) -> Any:
    torch.manual_seed(3)
    facts = VocabularyFacts(VOCABULARY)
    if recipe.task == "translation":
        return build_translator(recipe, facts, facts, pad_id=0)
    return build_language_model(recipe, facts)


def batch(recipe: Recipe) -> tuple[Tensor, ...]:
    """Ids in and ids out, behind a source with padding where a translator wants one."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, VOCABULARY, (4, 11)))
    if recipe.task != "translation":
        return ids[:, :-1], ids[:, 1:]
    source = ids.flip(1).clone()
    source[1, 6:] = 0
    targets = ids[:, 1:].clone()
    targets[2, 5:] = -100
    return source, ids[:, :-1], targets


@pytest.mark.parametrize("name", RECIPES)
def test_losses_and_gradients_are_the_same_in_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = made_small(name, dropout=True)
    model, inputs = build(recipe).double(), batch(recipe)
    hint = model.host_hint(inputs[-1].numpy())
    filled_up = sys.modules[linear_cross_entropy.__module__]
    results = []
    for fused in (False, True):
        if fused:
            monkeypatch.setattr(residual, "has_fused_kernels", lambda x: True)
            monkeypatch.setattr(filled_up, "_aligned_shape", lambda weight: filled_up.aligned_shape(*weight.shape))
        torch.manual_seed(5)  # the same masks
        losses, _ = model(*inputs, model.initial_state(4), hint=hint)
        gradients = torch.autograd.grad(losses.objective, list(model.parameters()))
        results.append((losses.objective.detach(), *gradients))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", RECIPES)
def test_recorded_steps_with_kernels_learn_as_plain_ones(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would draw other masks on a GPU, so there is no dropout here."""
    recipe, device = made_small(name, dropout=False), torch.device("cuda")
    inputs = batch(recipe)
    part = Part(tuple(tensor.to(device) for tensor in inputs), inputs[-1].numpy())
    curves = []
    for fused in (False, True):
        monkeypatch.undo()
        if not fused:
            monkeypatch.setattr(residual, "has_fused_kernels", lambda x: False)
        model = build(recipe).to(device)
        optimizer = recipe.optim.build(model.parameters(), device)
        step = TrainingStep(model, model, optimizer, Precision(precision, device), [4], 1.0, recorded=True)
        curve = []
        for _ in range(30):
            step.summed_loss.zero_()
            step(Batch([part], 40), 1e-3)
            curve.append(float(step.summed_loss))
        assert step.recorded_kinds == 1
        curves.append(curve)
    assert curves[0][-1] < 0.9 * curves[0][0]
    np.testing.assert_allclose(curves[1], curves[0], rtol=0.03)
