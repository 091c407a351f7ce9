from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.context import residual
from torchdefine.context.residual import Stream, Update, add_and_norm, add_then_norm, closing, expanded


@pytest.mark.parametrize("add", [add_and_norm, add_then_norm])
@pytest.mark.parametrize(("closes_fused", "adds_fused"), [(True, True), (True, False), (False, True), (False, False)])
def test_no_bias_is_lost_or_counted_twice(
    add: Callable[..., Stream], closes_fused: bool, adds_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether kernels run is asked twice, of tensors that differ in width."""
    expand, reduce, norm = nn.Linear(6, 9).double(), nn.Linear(9, 6).double(), nn.LayerNorm(6).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    monkeypatch.setattr(residual, "has_fused_kernels", lambda x: closes_fused)
    update = closing(expanded(x, expand, 0.0), reduce)
    assert (update.bias is not None) == closes_fused
    monkeypatch.setattr(residual, "has_fused_kernels", lambda x: adds_fused)
    past, read = add(x, update, norm, 0.0)
    total = x + F.linear(F.relu(F.linear(x, expand.weight, expand.bias)), reduce.weight, reduce.bias)
    torch.testing.assert_close(past, norm(total) if add is add_and_norm else total)
    torch.testing.assert_close(read, norm(total))
    wanted = [*expand.parameters(), *reduce.parameters(), *norm.parameters()]
    weights = torch.randn_like(read)
    for ours, theirs in zip(
        torch.autograd.grad((read * weights).sum(), wanted),
        torch.autograd.grad((norm(total) * weights).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_dropout_is_of_the_whole_update(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = nn.LayerNorm(50).double()
    update = Update(torch.ones(40, 50, dtype=torch.float64), torch.ones(50, dtype=torch.float64))
    for fused in (False, True):
        monkeypatch.setattr(residual, "has_fused_kernels", lambda x, fused=fused: fused)
        past, _ = add_then_norm(torch.zeros(40, 50, dtype=torch.float64), update, norm, 0.5)
        assert set(past.unique().tolist()) == {0.0, 4.0}


def test_an_adapter_around_a_linear_layer_is_not_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.more = base, nn.Linear(base.in_features, base.out_features)
            self.weight, self.bias = base.weight, base.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.more(x)

    monkeypatch.setattr(residual, "has_fused_kernels", lambda x: True)
    plain, x = nn.Linear(4, 4), torch.randn(3, 4)
    adapted = Adapted(plain)
    torch.testing.assert_close(residual.closing(x, adapted).whole(), adapted(x))  # type: ignore[arg-type]
    torch.testing.assert_close(residual.expanded(x, adapted, 0.0), adapted(x).relu())  # type: ignore[arg-type]
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda _module, _given, output: 2 * output)
    torch.testing.assert_close(residual.closing(x, hooked).whole(), hooked(x))
    torch.testing.assert_close(residual.closing(x, plain).whole(), plain(x))
