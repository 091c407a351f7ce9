import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.context import Transformer, TransformerConfig, residual
from torchdefine.context.residual import Update, add_and_norm, feed_forward


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize(("closes_fused", "adds_fused"), [(True, True), (True, False), (False, True), (False, False)])
def test_no_bias_is_lost_or_counted_twice(
    pre: bool, closes_fused: bool, adds_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether kernels run is asked twice, of tensors that differ in width."""
    expand, reduce, norm = nn.Linear(6, 9).double(), nn.Linear(9, 6).double(), nn.LayerNorm(6).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    monkeypatch.setattr(residual, "has_fused_kernels", lambda x: closes_fused)
    update = feed_forward(x, expand, reduce, 0.0, True)
    assert (update.bias is not None) == closes_fused
    monkeypatch.setattr(residual, "has_fused_kernels", lambda x: adds_fused)
    past, read = add_and_norm(x, update, norm, 0.0, True, pre)
    total = x + F.linear(F.relu(F.linear(x, expand.weight, expand.bias)), reduce.weight, reduce.bias)
    torch.testing.assert_close(past, total if pre else norm(total))
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
    monkeypatch.setattr(residual, "has_fused_kernels", lambda x: True)
    for fused in (False, True):
        past, _ = add_and_norm(torch.zeros(40, 50, dtype=torch.float64), update, norm, 0.5, fused, pre=True)
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
    shape = TransformerConfig(encoder_layers=1, decoder_layers=1, heads=2, hidden_dim=6, dropout=0.0)
    model, x, visible = Transformer(4, shape).double(), torch.randn(3, 5, 4).double(), torch.ones(3, 5).bool()
    feed_forward = model.encoder[0].feed_forward
    for name in ("expand", "reduce"):
        adapted = copy.deepcopy(model)
        setattr(adapted.encoder[0].feed_forward, name, Adapted(getattr(feed_forward, name)).double())
        expected = adapted.encode(x, visible)  # part by part
        adapted.prepare()
        assert torch.equal(adapted.encode(x, visible), expected)
        assert not torch.equal(expected, model.encode(x, visible))
    plain = model.encode(x, visible)
    model.prepare()
    torch.testing.assert_close(model.encode(x, visible), plain)
    assert feed_forward.fused
    feed_forward.reduce.register_forward_hook(lambda _module, _given, output: 2 * output)
    model.prepare()
    assert not torch.equal(model.encode(x, visible), plain)
    assert not feed_forward.fused
