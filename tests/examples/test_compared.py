"""The models that the paper compares with: each example beside a loop of its own, its published size, a short run."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchdefine import train
from torchdefine.config import to_plain
from torchdefine.context import CONTEXTS
from torchdefine.embedding import EMBEDDINGS
from torchdefine.output import OUTPUTS
from torchdefine.output.layer import Targets
from torchdefine.training.progress import Reporter

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _only_for_now() -> Iterator[None]:
    """What an example registers is taken out again."""
    registries = [kinds._kinds for kinds in (CONTEXTS, EMBEDDINGS, OUTPUTS)]
    before = [set(registry.keys()) for registry in registries]
    yield
    for registry, names in zip(registries, before, strict=True):
        for name in registry.keys() - names:
            del registry[name]


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def convolved(x: Tensor, layer: Any, dilation: int = 1) -> Tensor:
    """Position by position, tap by tap, with weights normalised by hand."""
    taps = layer.direction.shape[2]
    weight = torch.stack(
        [size * one / one.norm() for one, size in zip(layer.direction, layer.size.flatten(), strict=True)]
    )
    made = []
    for t in range(x.shape[1]):
        y = layer.bias.expand(len(x), -1)
        for tap in range(taps):
            if (at := t - (taps - 1 - tap) * dilation) >= 0:
                y = y + x[:, at] @ weight[:, :, tap].T
        made.append(y)
    return torch.stack(made, 1)


def naive_gated(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for layer in model.layers:
        value, gate = convolved(x, layer).chunk(2, -1)
        x = (value / (1 + (-gate).exp()) + (x if layer.skip is None else layer.skip(x))) / 2**0.5
    return x


def naive_tcn(model: Any, x: Tensor) -> Tensor:
    for level, block in enumerate(model.blocks):
        hidden = convolved(x, block.first, 2**level).clamp(min=0)
        hidden = convolved(hidden, block.second, 2**level).clamp(min=0)
        x = (hidden + (x if block.skip is None else block.skip(x))).clamp(min=0)
    return x


@pytest.mark.parametrize("name", ["gated_convolution", "tcn"])
def test_a_convolutional_model_is_that_of_a_loop_whole_and_in_segments(name: str) -> None:
    code = example(name)
    if name == "tcn":
        model, naive = code["TCN"](5, [6, 7], kernel=3).double(), naive_tcn
    else:
        model, naive = code["GatedConvolution"](5, [6, 6, 7], [3, 1, 4]).double(), naive_gated
    x = torch.randn(2, 11, 5, dtype=torch.float64)
    whole, _ = model(x, model.initial_state(2))
    reference = naive(model, x)
    torch.testing.assert_close(whole, reference, rtol=1e-10, atol=1e-10)
    parameters, cotangent = list(model.parameters()), torch.randn_like(whole)
    gradients = (torch.autograd.grad(y, parameters, cotangent) for y in (whole, reference))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    state, parts = model.initial_state(2), []
    for part in x.split([4, 1, 1, 5], dim=1):
        y, state = model.step(part, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)
    assert len(model.state_tensors()) == len(state)


def test_word_vectors_from_characters_are_those_of_a_loop() -> None:
    code = example("character_cnn")
    words = ["a", "cat", "catamarans", "€"]
    torch.manual_seed(0)
    layer = code["CharacterMap"](code["spelled"](words, 8), code["SYMBOLS"], 4, (1, 3), (5, 6), 2).double()
    layer.reset_parameters()
    ids = torch.tensor([[2, 0, 3], [1, 1, 2]])
    found = []
    for i in ids.flatten().tolist():
        symbols = layer.symbols(layer.spelling[i].long())
        pieces = []
        for group in layer.groups:
            k = group.weight.shape[2]
            places = range(len(symbols) - k + 1)
            values = [group.bias + sum(group.weight[:, :, j] @ symbols[at + j] for j in range(k)) for at in places]
            pieces.append(torch.stack(values).tanh().max(0).values)
        vector = torch.cat(pieces)
        for highway in layer.highways:
            both = highway.weight @ vector + highway.bias
            gate = 1 / (1 + (-both[:11]).exp())
            vector = gate * both[11:].clamp(min=0) + (1 - gate) * vector
        found.append(vector)
    reference = torch.stack(found).view(2, 3, 11)
    ours = layer(ids)
    torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)
    parameters, cotangent = list(layer.parameters()), torch.randn_like(ours)
    gradients = (torch.autograd.grad(y, parameters, cotangent) for y in (ours, reference))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("words", [2, 3, 8, 13])
def test_the_tree_of_words_is_that_of_a_loop_and_its_probabilities_add_up(words: int) -> None:
    layer = example("hierarchical_softmax")["HierarchicalSoftmax"](6, words).double()
    torch.nn.init.normal_(layer.bias)
    hidden = torch.randn(4, 6, dtype=torch.float64)
    chances = []
    for word in range(words):
        node, chance = words + word, torch.ones(4, dtype=torch.float64)
        while node > 1:
            right = torch.sigmoid(hidden @ layer.weight[node // 2 - 1] + layer.bias[node // 2 - 1])
            chance = chance * (right if node % 2 else 1 - right)
            node //= 2
        chances.append(chance)
    expected = torch.stack(chances, 1)
    found = layer.log_prob(hidden)
    torch.testing.assert_close(expected.sum(1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(found.exp(), expected, rtol=1e-10, atol=1e-10)
    ids = torch.randint(0, words, (4,))
    losses = layer.losses(hidden, Targets(ids, torch.tensor([True, True, True, False]), 0.0, True, None))
    reference = -expected.log()[torch.arange(4), ids] * torch.tensor([1, 1, 1, 0])
    torch.testing.assert_close(losses, reference, rtol=1e-10, atol=1e-10)
    gradients = (torch.autograd.grad(loss.sum(), [layer.weight, layer.bias]) for loss in (losses, reference))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["gated_convolution", "tcn", "character_cnn", "hierarchical_softmax"])
def test_an_example_learns_and_is_as_large_as_published(name: str, corpus: Path, tmp_path: Path) -> None:
    results = example(name)["main"](["--steps", "60", "--data", str(corpus), "--out", str(tmp_path / "run")])
    run = results["run"]
    assert run.result["test_perplexity"] < run.result["test_unigram_perplexity"]
    assert run.generate("w1", 6, seed=1) == run.generate("w1", 6, seed=1)
    published = results.get("published")
    if name == "gated_convolution":
        assert round(published / 1e6) == 229
    elif name == "tcn":
        assert published == 10_000 * 601 + 8 * (600 * 600 * 3 + 2 * 600)
    elif name == "character_cnn":
        assert [round(size / 1e6) for size in published] == [5, 19]
    else:
        assert results["parameters"] == (run.embedding.num_embeddings - 1) * (128 + 1)


class Stops(Reporter):
    def trained(self, record: dict) -> None:
        if record["step"] >= 4:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_convolution", "tcn"])
def test_a_convolutional_model_is_exported_and_resumed(name: str, corpus: Path, tmp_path: Path) -> None:
    code, out = example(name), tmp_path / "run"
    run = code["main"](["--steps", "6", "--data", str(corpus), "--out", str(out)])["run"]
    run.export(tmp_path / "exported")  # refuses a program that gives other numbers than the model
    settings = {"context": to_plain(run.recipe.context), "train": {"steps": 6, "checkpoint_every": 3, "log_every": 1}}
    with pytest.raises(KeyboardInterrupt):
        train("compared/lstm", data=corpus, out=tmp_path / "stopped", reporter=Stops(), **settings)
    resumed = train(out=tmp_path / "stopped", resume=True)
    whole = train("compared/lstm", data=corpus, out=tmp_path / "whole", **settings)
    assert resumed.result["test_perplexity"] == whole.result["test_perplexity"]
