"""The matrix of a replaced table: read like any other, and never written."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine import UserError
from torchdefine.adapt.stand_in import StandIn
from torchdefine.tables import dense_table

V, M = 31, 8


@pytest.fixture
def stand_in() -> StandIn:
    table = dense_table(torch.randn(V, M), "float32").requires_grad_(True)
    return StandIn(table, nn.Embedding(V, M), scale=2.0)


def vectors(stand_in: StandIn) -> Tensor:
    return stand_in(torch.arange(V)) / 2


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda weight: weight[[3, 5]],
    "a row": lambda weight: weight[3] * 1,
    "transposed": lambda weight: torch.ones(2, M) @ weight.T,
    "as an output layer": lambda weight: F.linear(torch.ones(2, M), weight),
    "as an embedding": lambda weight: F.embedding(torch.tensor([3, 4]), weight),
    "detached": lambda weight: weight.detach() + 0,
    "its data": lambda weight: weight.data.clone(),
    "mean": lambda weight: weight.mean(0),
    "with rows exchanged": lambda weight: weight.index_copy(0, torch.tensor([2]), torch.ones(1, M)),
    "in another": lambda weight: torch.zeros(V, M).copy_(weight),
    "in a list": lambda weight: torch.cat([weight, weight]),
}
WRITES: dict[str, Callable[[nn.Embedding], object]] = {
    "a row": lambda module: module.weight.__setitem__(3, 0.0),
    "a view": lambda module: module.weight[3:5].zero_(),
    "a view of the data": lambda module: module.weight.data[3].fill_(1.0),
    "a row of the transposed": lambda module: module.weight.T[0].mul_(2),
    "added": lambda module: module.weight.data.add_(1.0),
    "the data": lambda module: setattr(module.weight, "data", torch.zeros(V, M)),
    "drawn": lambda module: nn.init.normal_(module.weight),
    "frozen": lambda module: setattr(module.weight, "requires_grad", False),
    "frozen in place": lambda module: module.weight.requires_grad_(False),
}


@pytest.mark.parametrize("name", READS)
def test_reading(stand_in: StandIn, name: str) -> None:
    torch.testing.assert_close(torch.as_tensor(READS[name](stand_in.weight)), READS[name](vectors(stand_in)))


@pytest.mark.parametrize("name", WRITES)
def test_writing_is_refused(stand_in: StandIn, name: str) -> None:
    before = copy.deepcopy(stand_in.state_dict())
    with pytest.raises(UserError, match="cannot be written, frozen or merged into"), torch.no_grad():
        WRITES[name](stand_in)
    assert all(torch.equal(value, before[key]) for key, value in stand_in.state_dict().items())


def test_it_learns_through_its_matrix(stand_in: StandIn) -> None:
    F.linear(torch.ones(1, M), stand_in.weight)[0, 3].backward()
    gradients = [parameter.grad for parameter in stand_in.parameters() if parameter.grad is not None]
    assert any(gradient.abs().sum() for gradient in gradients)


def test_what_it_is(stand_in: StandIn) -> None:
    weight = stand_in.weight
    assert (tuple(weight.shape), weight.dtype, len(weight), weight.numel()) == ((V, M), torch.float32, V, V * M)
    assert "computed by torchdefine" in repr(weight)
    assert stand_in.half().weight.dtype == torch.float16
    assert tuple(stand_in.state_dict()["weight"].shape) == (1,)
    assert isinstance(stand_in, nn.Embedding)
