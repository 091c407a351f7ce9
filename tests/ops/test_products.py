import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torchdefine.ops import group_linear, plain_torch, product
from torchdefine.ops.kernel_gate import only_values


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
    weight.requires_grad_()
    group_linear(x, weight, bias).sum().backward()  # with a gradient
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
