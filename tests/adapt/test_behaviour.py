import copy

import pytest
import torch
from torch import nn

from tests.adapt.small_encoder import Encoder, behaviour
from torchdefine.adapt import Behaviour
from torchdefine.errors import UserError
from torchdefine.tables import quantised_table


def test_the_own_table_is_perfect_and_worse_ones_are_worse() -> None:
    model = Encoder()
    look = behaviour(model)
    assert look.similarity(model.tokens) == pytest.approx(1.0, abs=1e-6)
    qualities = [look.similarity(quantised_table(model.tokens, bits)) for bits in (8, 4, 2, 1)]
    assert qualities == sorted(qualities, reverse=True)


def test_the_model_is_left_as_it_was() -> None:
    model = Encoder().train()
    model.head.eval()
    model.mix.bias.requires_grad_(False)
    before, own = copy.deepcopy(model.state_dict()), model.tokens
    look = behaviour(model)
    look.similarity(nn.Embedding(400, 32))
    look.sensitivity()
    assert model.tokens is own
    assert model.training
    assert not model.head.training
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["mix.bias"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not own._forward_hooks
    with pytest.raises(RuntimeError, match="boom"):
        look.similarity(Boom())
    assert model.tokens is own
    assert model.training


class Boom(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")


def test_sensitivity_is_what_finite_differences_say() -> None:
    model = Encoder().double().eval()
    look = behaviour(model, batches=60)
    felt = look.sensitivity().double()
    assert felt.shape == (32, 32)
    torch.testing.assert_close(felt, felt.T, rtol=1e-4, atol=1e-4)
    directions = torch.linalg.eigh(felt).eigenvectors
    table = model.tokens.weight.detach()
    step = 0.1

    def moved(direction: torch.Tensor) -> float:
        other = nn.Embedding.from_pretrained(table + step * direction)
        return 1 - look.similarity(other)

    assert moved(directions[:, -1]) > 20 * moved(directions[:, 0])


def test_sensitivity_does_not_depend_on_the_lengths_of_the_outputs() -> None:
    look = behaviour()
    felt = look.sensitivity()
    lengths = torch.where(torch.arange(16) % 2 == 0, 100.0, 1.0).unsqueeze(1)
    look.encode = lambda model, batch: model(batch) * lengths
    torch.testing.assert_close(look.sensitivity(), felt, rtol=1e-4, atol=1e-4)


def test_names_and_text_are_checked() -> None:
    with pytest.raises(UserError, match="no module 'token'"):
        Behaviour(Encoder(), "token", lambda m, b: m(b), [torch.zeros(1, 1).long()])
    with pytest.raises(UserError, match="no text"):
        Behaviour(Encoder(), "tokens", lambda m, b: m(b), [])


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 4.0


def test_another_table_is_scaled_as_the_models_own() -> None:
    model = Encoder()
    rows = model.tokens.weight.detach().clone()
    model.tokens = Scaled(400, 32)
    model.tokens.weight = nn.Parameter(rows)
    look = behaviour(model)
    assert look.similarity(nn.Embedding.from_pretrained(rows)) == pytest.approx(1.0, abs=1e-6)
    assert type(model.tokens) is Scaled
