import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from torchdefine.ops import group_linear, plain_torch, product
from torchdefine.ops.kernel_gate import only_gradients, only_values


def layer(tokens: int, groups: int, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(tokens + groups)
    x = torch.randn(tokens, groups * 96, generator=generator)
    weight = torch.randn(groups, 96, 128, generator=generator)
    return x, weight, torch.randn(groups * 128, generator=generator) if bias else None


@pytest.mark.parametrize("gain", [1.0, 0.3])
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 64, 200])
def test_every_way_equals_float64(tokens: int, bias: bool, groups: int, gain: float) -> None:
    x, weight, added = layer(tokens, groups, bias)
    expected = x.double() @ torch.block_diag(*weight).double()
    expected = gain * (expected if added is None else expected + added)
    with torch.no_grad():
        found = group_linear(x, weight, added, gain)
        shaped = group_linear(x.unsqueeze(1), weight, added, gain)
        with plain_torch():
            plain = group_linear(x, weight, added, gain)
    for one in (found, plain, shaped.view(found.shape)):
        torch.testing.assert_close(one.double(), expected, rtol=0, atol=1e-4)


def test_one_dnn_takes_what_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")

    def counted(x: Tensor, *arguments: object) -> Tensor:
        calls.append(len(x))
        return torch.ops.mkldnn._linear_pointwise(x, *arguments)

    monkeypatch.setattr("torchdefine.ops.products._onednn", counted)
    x, weight, bias = layer(200, 2, bias=True)
    with torch.no_grad():
        group_linear(x[:4], weight, bias)
        group_linear(x.double(), weight.double())
        with torch.autocast("cpu"):
            group_linear(x, weight)
        torch.vmap(lambda one: group_linear(one, weight))(x.expand(3, -1, -1))
        assert calls == []
        group_linear(x, weight, bias)
        product(x, torch.randn(192, 128))
    assert calls == [200, 200, 200]
    weight.requires_grad_()
    group_linear(x, weight, bias).sum().backward()
    assert calls[3:] == []  # a small step stays as it was
    monkeypatch.setattr("torchdefine.ops.products.FEWEST_TO_LEARN", 0)
    group_linear(x, weight, bias).sum().backward()  # two products forward, and two for the gradients of the weights
    assert calls[3:] == [200, 200, 96, 96]


@pytest.mark.parametrize(("groups", "entering", "leaving"), [(1, 96, 128), (2, 96, 128), (4, 4, 70), (2, 40, 32)])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_equal_float64(groups: int, entering: int, leaving: int, bias: bool) -> None:
    """Wide groups one by one, narrow ones at once; an upstream gradient with strides of its own."""
    torch.manual_seed(groups)
    x, weight = torch.randn(5, 300, groups * entering), torch.randn(groups, entering, leaving)
    arguments = [x, weight, *([torch.randn(groups * leaving)] if bias else [])]
    upstream = torch.randn(groups * leaving, 300, 5).permute(2, 1, 0)
    found = gradients(arguments, upstream)
    for one, other in zip(found, gradients([a.double() for a in arguments], upstream.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def gradients(arguments: list[Tensor], upstream: Tensor, twice: bool = False) -> list[Tensor]:
    """The output and its first derivatives, or the second ones."""
    leaves = [a.clone().requires_grad_() for a in arguments]
    output = group_linear(*leaves)
    first = torch.autograd.grad(output, leaves, upstream, create_graph=twice)
    if not twice:
        return [output.detach(), *first]
    return list(torch.autograd.grad(sum(one.square().sum() for one in first[:2]), leaves[:2]))


def test_a_bias_learns_alone() -> None:
    x, weight, bias = layer(1100, 2, bias=True)
    group_linear(x, weight, bias.requires_grad_()).sum().backward()
    assert torch.equal(bias.grad, torch.full((256,), 1100.0))


def test_second_derivatives_equal_float64() -> None:
    arguments = [torch.randn(1100, 192), torch.randn(2, 96, 128)]
    upstream = torch.randn(1100, 256)
    found = gradients(arguments, upstream, twice=True)
    for one, other in zip(found, gradients([a.double() for a in arguments], upstream.double(), True), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def test_whoever_follows_gradients_in_another_way_gets_operations_of_torch() -> None:
    x, weight, bias = layer(1100, 2, bias=True)
    assert only_gradients(x, weight.requires_grad_(), bias)
    expected = gradients([x, weight, bias], torch.ones(1100, 256))
    compiled = torch.compile(group_linear, backend="aot_eager", fullgraph=True)
    leaves = [a.detach().clone().requires_grad_() for a in (x, weight, bias)]
    output = compiled(*leaves)
    found = [output.detach(), *torch.autograd.grad(output.sum(), leaves)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(group_linear(dual, weight, bias)).tangent
    torch.testing.assert_close(tangent, group_linear(torch.ones_like(x), weight))


def test_only_values_are_asked_for_where_nobody_follows() -> None:
    x, learns = torch.randn(3), torch.randn(3, requires_grad=True)
    assert only_values(x, None)
    assert not only_values(x, learns)
    with torch.no_grad():
        assert only_values(x, learns)
    with plain_torch():
        assert not only_values(x)
    with FlopCounterMode(display=False):
        assert not only_values(x)

    def watched(value: Tensor) -> Tensor:
        assert not only_values(value)
        return 2 * value

    torch.jit.trace(watched, x, check_trace=False)
    torch.func.jvp(watched, (x,), (x,))
    torch.compile(watched, backend="eager", fullgraph=True)(x)
