"""The fast path (fused optimiser, chunked loss, hints, recorded steps) and a plain loop learn the same, step by step.

The plain path is written here: all logits, torch's unfused optimiser, no hint, no recording, one kernel after another.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.embedding import VocabularyFacts
from torchdefine.ops import plain_torch
from torchdefine.recipe import Recipe, load_recipe
from torchdefine.tasks.language import build_language_model
from torchdefine.training.precision import Precision
from torchdefine.training.step import Batch, Part, TrainingStep

STEPS, BATCHES, VOCABULARY = 200, 10, 120
NO_DROPOUT = {"input_dropout": 0.0, "hidden_dropout": 0.0}
SIZES: dict[str, dict[str, Any]] = {
    "table1a/r3": {
        "embedding": {"map_dim": 32, "cutoffs": [30, 60], "division": 2},
        "unit": {"expand_dim": 64, "max_groups": 4},
        "context": {"layers": 2, "hidden_dim": 24, "recurrent_dropout": 0.0, **NO_DROPOUT},
        "loss": {"output_dropout": 0.0},
        "optim": {"lr": 1.0},
        "train": {"batch_size": 4, "length": 12},
    },
    "txl/define-128": {
        "embedding": {"map_dim": 16, "output_dim": 32, "scale": 5.0},
        "unit": {"embedding_dim": 32, "expand_dim": 64, "max_groups": 4},
        "context": {
            "layers": 2,
            "heads": 2,
            "head_dim": 9,
            "inner_dim": 48,
            "memory": 8,
            "output_dropout": 0.0,
            **NO_DROPOUT,
        },
        "output": {"cutoffs": [30, 60, 90]},
        "optim": {"lr": 1e-3},
        "train": {"batch_size": 4, "length": 12, "precision": "fp32"},
    },
    "ptb/awd-lstm-define-adjusted": {
        "embedding": {"map_dim": 32, "row_dropout": 0.0},
        "unit": {"embedding_dim": 32, "expand_dim": 64, "max_groups": 4},
        "context": {"hidden_dim": 24, "recurrent_dropout": 0.0, **NO_DROPOUT},
        "loss": {"output_dropout": 0.0, "activation_penalty": 0.0, "temporal_penalty": 0.0},
        "optim": {"lr": 1.0},
        "train": {"batch_size": 4, "length": 12, "precision": "fp32"},
    },
}


@pytest.fixture(params=SIZES)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return load_recipe(request.param, SIZES[request.param])


def test_fast_and_plain_steps_have_the_same_losses_on_a_cpu(recipe: Recipe) -> None:
    torch.set_num_threads(1)
    assert_same_losses(recipe, torch.device("cpu"), 1e-4)


@pytest.mark.gpu
def test_fast_and_plain_steps_have_the_same_losses_on_a_gpu(recipe: Recipe) -> None:
    assert_same_losses(recipe, torch.device("cuda"), 2e-3)


@pytest.mark.gpu
def test_kernels_and_plain_torch_have_the_same_losses_in_half_precision(recipe: Recipe) -> None:
    """Both round to bfloat16, in different places: single losses differ, and what is learnt does not."""
    device = torch.device("cuda")
    fast = fast_losses(recipe, device, "bf16")
    with plain_torch():
        plain = fast_losses(recipe, device, "bf16")
    assert plain[-BATCHES:].mean() < 0.98 * plain[:BATCHES].mean()
    np.testing.assert_allclose(fast[:20], plain[:20], rtol=1e-2)
    blocks = [losses.reshape(-1, BATCHES).mean(1) for losses in (fast, plain)]
    np.testing.assert_allclose(*blocks, rtol=2e-2)
    assert not np.array_equal(fast, plain)  # else one of the two was not taken


def assert_same_losses(recipe: Recipe, device: torch.device, rtol: float) -> None:
    fast, plain = fast_losses(recipe, device), plain_losses(recipe, device)
    assert plain[-BATCHES:].mean() < 0.98 * plain[:BATCHES].mean()  # else nothing was learnt that could differ
    np.testing.assert_allclose(fast, plain, rtol=rtol)
    np.testing.assert_allclose(fast[:20], plain[:20], rtol=2e-5)


def batches(recipe: Recipe, device: torch.device) -> list[Batch]:
    """Text in which each token decides the next to nine tenths, so that there is something to learn."""
    random = np.random.default_rng(0)
    rows, length = recipe.train.batch_size, recipe.train.length
    ids = np.zeros((rows, BATCHES * length + 1), np.int64)
    for place in range(1, ids.shape[1]):
        drawn = random.integers(0, VOCABULARY, rows)
        ids[:, place] = np.where(random.random(rows) < 0.9, (7 * ids[:, place - 1] + 3) % VOCABULARY, drawn)
    found = []
    for start in range(0, BATCHES * length, length):
        inputs, targets = ids[:, start : start + length], ids[:, start + 1 : start + length + 1]
        moved = tuple(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in (inputs, targets))
        found.append(Batch([Part(moved, targets)], targets.size))
    return found


def fresh_model(recipe: Recipe, device: torch.device) -> Any:
    torch.manual_seed(3)
    return build_language_model(recipe, VocabularyFacts(VOCABULARY)).to(device)


def fast_losses(recipe: Recipe, device: torch.device, precision: str = "fp32") -> np.ndarray:
    model, data = fresh_model(recipe, device), batches(recipe, device)
    optimizer = recipe.optim.build(model.parameters(), device)
    parts = (model, model, optimizer, Precision(precision, device))
    step = TrainingStep(*parts, [recipe.train.batch_size], recipe.optim.clip, recorded=True)
    losses = []
    with parts[-1].matmul_mode():
        for index in range(STEPS):
            step.summed_loss.zero_()
            step(data[index % BATCHES], recipe.optim.lr)
            losses.append(float(step.summed_loss))
    assert (step.recorded_kinds > 0) == (device.type == "cuda")
    return np.array(losses)


def plain_losses(recipe: Recipe, device: torch.device) -> np.ndarray:
    model, data = fresh_model(recipe, device), batches(recipe, device)
    adam = recipe.optim.kind == "adam"
    decay = recipe.optim.weight_decay
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(model.parameters(), recipe.optim.lr, foreach=False, weight_decay=decay)
        if adam
        else torch.optim.SGD(model.parameters(), recipe.optim.lr, foreach=False, weight_decay=decay)
    )
    state, losses = model.initial_state(recipe.train.batch_size), []
    with Precision("fp32", device).matmul_mode():
        for index in range(STEPS):
            ids, targets = data[index % BATCHES].parts[0].inputs
            optimizer.zero_grad()
            loss, state = plain_loss(model, ids, targets, state)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip or float("inf"))
            optimizer.step()
            losses.append(loss.item())
    return np.array(losses)


def plain_loss(model: Any, ids: Tensor, targets: Tensor, state: Any) -> tuple[Tensor, Any]:
    """The definition: minus the mean log-probability of the targets, from the log-probabilities of all tokens."""
    log_probs, state = model.log_prob(ids, state)  # (B, T, V)
    return F.nll_loss(log_probs.flatten(0, 1), targets.flatten()), state
