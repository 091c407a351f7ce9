import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchdefine.embedding import GroupLinear
from torchdefine.errors import UserError


def loop_of_linears(layer: GroupLinear, x: torch.Tensor) -> torch.Tensor:
    """The definition: one nn.Linear for each group, on its own chunk."""
    outputs = []
    biases = layer.bias.chunk(layer.groups) if layer.bias is not None else [None] * layer.groups
    for chunk, weight, bias in zip(x.chunk(layer.groups, -1), layer.weight, biases, strict=True):
        outputs.append(nn.functional.linear(chunk, weight.T, bias))
    return torch.cat(outputs, -1)


def block_diagonal(layer: GroupLinear, x: torch.Tensor) -> torch.Tensor:
    y = x @ torch.block_diag(*layer.weight)
    return y if layer.bias is None else y + layer.bias


@pytest.mark.parametrize("reference", [loop_of_linears, block_diagonal])
@given(groups=st.integers(1, 6), a=st.integers(1, 5), b=st.integers(1, 5), bias=st.booleans(), seed=st.integers(0, 99))
def test_equals_its_definition_with_gradients(reference, groups, a, b, bias, seed) -> None:
    torch.manual_seed(seed)
    layer = GroupLinear(groups * a, groups * b, groups, bias=bias).double()
    if bias:
        nn.init.normal_(layer.bias)
    x = torch.randn(3, 2, groups * a, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(3, 2, groups * b, dtype=torch.float64)
    wanted = [x, *layer.parameters()]
    ours = layer(x)
    theirs = reference(layer, x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(ours, wanted, cotangent), torch.autograd.grad(theirs, wanted, cotangent), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_one_group_is_nn_linear() -> None:
    layer = GroupLinear(6, 4)
    linear = nn.Linear(6, 4)
    with torch.no_grad():
        linear.weight.copy_(layer.weight[0].T)
        linear.bias.copy_(layer.bias)
    x = torch.randn(5, 6)
    torch.testing.assert_close(layer(x), linear(x))


def test_shuffle_deals_outputs_over_groups() -> None:
    plain, shuffled = GroupLinear(6, 6, 2), GroupLinear(6, 6, 2, shuffle=True)
    shuffled.load_state_dict(plain.state_dict())
    x = torch.randn(1, 6)
    assert torch.equal(shuffled(x), plain(x)[:, [0, 3, 1, 4, 2, 5]])


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_starts_at_unit_variance_whatever_the_groups(groups: int) -> None:
    layer = GroupLinear(512, 1024, groups)
    assert 0.9 < layer(torch.randn(4096, 512)).std() < 1.1
    layer.reset_parameters(input_second_moment=4.0)
    assert 0.9 < layer(2 * torch.randn(4096, 512)).std() < 1.1


def test_bad_sizes_name_a_size_that_works() -> None:
    with pytest.raises(UserError, match=r"in_features 100 is not divisible by 16 groups: use 96 or 112"):
        GroupLinear(100, 32, 16)
    with pytest.raises(UserError, match=r"out_features 3 is not divisible by 4 groups: use 4\."):
        GroupLinear(8, 3, 4)
    with pytest.raises(UserError, match="groups is 0"):
        GroupLinear(8, 8, 0)
    with pytest.raises(UserError, match="7 wide, but this layer takes 8"):
        GroupLinear(8, 8, 2)(torch.randn(1, 7))
