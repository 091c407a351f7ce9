"""The plain loops compute what ours do: same weights, no dropout, the same losses step after step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.attention import ways
from benchmarks.measuring import Setting
from benchmarks.plain_lstm import PlainLSTM
from benchmarks.plain_step import PlainStep, TorchAdaptiveLoss
from benchmarks.plain_transformer_xl import PlainTransformerXL
from benchmarks.steps import FAMILIES, Family, OurLoss, Place, build_model, group_of, our_step, plain_step
from torch import nn

from torchdefine.context import LSTM
from torchdefine.output import AdaptiveSoftmax
from torchdefine.recipe import merged
from torchdefine.training.precision import Precision

SETTING = Setting(torch.device("cpu"), small=True, repeats=2)
NO_DROPOUT = {"context": {"input_dropout": 0.0, "hidden_dropout": 0.0}}
TINY = {
    "Transformer-XL": {"context": {"layers": 2, "memory": 6, "inner_dim": 32}, "train": {"batch_size": 3, "length": 5}},
    "LSTM": {"context": {"hidden_dim": 24}, "train": {"batch_size": 3, "length": 5}},
    "AWD-LSTM": {"context": {"hidden_dim": 24}, "train": {"batch_size": 3, "length": 5}},
    "translation": {"train": {"batch_tokens": 64}},
}


def tiny(name: str, changes: dict[str, Any] | None = None) -> Family:
    family = next(family for family in FAMILIES if family.name == name)
    return replace(family, small=merged(merged(family.small, TINY[name]), changes or {}))


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_every_contestant_of_a_family_takes_a_step(family: str) -> None:
    group = group_of(tiny(family), SETTING)
    parameters = {}
    for contestant in group.contestants:
        if contestant.lacks:
            continue
        prepared = contestant.prepare()
        prepared.work()
        parameters[contestant.name] = prepared.facts()["parameters"]
    (reference, plain), *ours = parameters.items()
    of = reference.removeprefix("plain loop, ")
    assert len(ours) == 2
    if family != "LSTM":  # torch's adaptive softmax has tables of its own
        assert plain == parameters[f"{of}, kernel by kernel"]


def losses(model: nn.Module, place: Place, steps: int = 4) -> list[float]:
    """Of a plain loop: SGD over the place's batch with a carried state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = PlainStep(model, place.inputs, optimizer, Precision("fp32", place.device), clip=0.25)
    return [float(step()) for _ in range(steps)]


class Ours(nn.Module):
    """A language model in the shape of a plain one, with the state that it begins with."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        super().__init__()
        self.model, self.rows = model, rows

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, state: Any) -> Any:
        begun = self.model.initial_state(self.rows) if state is None else state
        found, after = self.model(ids, targets, begun)
        return found.cross_entropy, after


def test_the_plain_transformer_xl_has_our_losses() -> None:
    family = tiny("Transformer-XL", merged(NO_DROPOUT, {"context": {"output_dropout": 0.0}}))
    place, recipe = family.place(SETTING), family.recipe(family.with_define, small=True)
    ours, other = build_model(recipe, place), build_model(recipe, place)
    plain = family.plain(recipe, place)
    plain.embedding, plain.context, plain.loss = (
        other.embedding,
        PlainTransformerXL(other.context),
        OurLoss(other.output),
    )
    assert losses(plain, place) == pytest.approx(losses(Ours(ours, 3), place), rel=2e-5)


def test_the_plain_lstm_has_our_losses() -> None:
    family = tiny("LSTM", {**NO_DROPOUT, "loss": {"output_dropout": 0.0}})
    place, recipe = family.place(SETTING), family.recipe(family.with_define, small=True)
    ours = build_model(recipe, place)
    torch.manual_seed(1)
    plain = family.plain(recipe, place)
    plain.embedding.load_state_dict(ours.embedding.state_dict())
    _copy_lstm(ours.context, plain.context)
    _copy_softmax(ours.output, plain.loss)
    assert losses(plain, place, steps=1) == pytest.approx(losses(Ours(ours, 3), place, steps=1), rel=2e-5)


@torch.no_grad()
def _copy_lstm(ours: LSTM, plain: PlainLSTM) -> None:
    for index, layer in enumerate(ours.layers):
        target, at = (plain.last, 0) if index == len(ours.layers) - 1 else (plain.wide, index)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(target, f"{name}_l{at}").copy_(getattr(layer, f"{name}_l0"))


@torch.no_grad()
def _copy_softmax(ours: AdaptiveSoftmax, plain: TorchAdaptiveLoss) -> None:
    softmax, (head, *tails) = plain.softmax, ours._bands()
    softmax.head.weight.copy_(head.weight)
    for index, band in enumerate(tails):
        softmax.tail[index][0].weight.copy_(ours.map.projections[index])
        softmax.tail[index][1].weight.copy_(band.weight)


def test_both_ways_to_attend_agree_with_gradients() -> None:
    torch.manual_seed(0)
    own, _, both = ways(SETTING)
    found = {}
    for name, way in both.items():
        own.grad = None
        vectors = way()
        (vectors * torch.linspace(-1, 1, vectors.numel()).view_as(vectors)).sum().backward()
        found[name] = (vectors.detach(), own.grad.clone())
    for one, other in zip(found["textbook"], found["ours"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_steps_are_recorded_on_a_gpu(family: str) -> None:
    setting = Setting(torch.device("cuda"), small=True, repeats=2)
    made = tiny(family)
    place = made.place(setting)
    recorded = our_step(made.recipe(made.with_define, small=True), place, recorded=True)
    for _ in range(3):
        recorded.work()
    assert recorded.facts()["kinds of steps recorded"] == 1
    plain_step(made, made.recipe(made.plain_of, small=True), place).work()
