import pytest
import torch
from torch import nn

from torchdefine.context import LSTM, LSTMConfig
from torchdefine.errors import UserError


def test_equals_torchs_stacked_lstm_with_gradients() -> None:
    ours = LSTM(6, LSTMConfig(layers=3, hidden_dim=8)).double()
    theirs = nn.LSTM(6, 8, num_layers=3, batch_first=True).double()
    with torch.no_grad():
        for index, layer in enumerate(ours.layers):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                getattr(theirs, f"{name}_l{index}").copy_(getattr(layer, f"{name}_l0"))
    x = torch.randn(4, 7, 6, dtype=torch.float64, requires_grad=True)
    y, state = ours(x, ours.initial_state(4))
    expected, (h, c) = theirs(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.cat([s[0] for s in state]), h)
    torch.testing.assert_close(torch.cat([s[1] for s in state]), c)
    one, other = torch.autograd.grad(y.square().sum(), x)[0], torch.autograd.grad(expected.square().sum(), x)[0]
    torch.testing.assert_close(one, other)


def test_carried_state_makes_two_segments_one() -> None:
    lstm = LSTM(6, LSTMConfig(layers=2, hidden_dim=8, output_dim=5)).eval()
    x = torch.randn(3, 10, 6)
    whole, _ = lstm(x, lstm.initial_state(3))
    first, state = lstm(x[:, :4], lstm.initial_state(3))
    second, _ = lstm(x[:, 4:], state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole)
    assert whole.shape == (3, 10, 5)
    assert not any(t.requires_grad for pair in state for t in pair)


def test_step_by_step_is_the_whole() -> None:
    dropout = dict.fromkeys(("input_dropout", "hidden_dropout", "recurrent_dropout", "state_dropout"), 0.3)
    lstm = LSTM(6, LSTMConfig(layers=2, hidden_dim=8, output_dim=5, **dropout)).double().eval()
    x, state = torch.randn(3, 10, 6, dtype=torch.float64), lstm.initial_state(3)
    expected, last = lstm(x, state)
    for place in range(10):
        y, state = lstm.step(x[:, place : place + 1], state)
        torch.testing.assert_close(y, expected[:, place : place + 1])
    torch.testing.assert_close(state, last)


def test_the_carried_state_keeps_its_precision() -> None:
    lstm = LSTM(6, LSTMConfig(layers=2, hidden_dim=8)).bfloat16()
    state = [(h.float(), c.float()) for h, c in lstm.initial_state(3)]
    y, after = lstm(torch.randn(3, 4, 6, dtype=torch.bfloat16), state)
    assert y.dtype == torch.bfloat16
    assert {part.dtype for pair in after for part in pair} == {torch.float32}


@pytest.mark.parametrize(("place", "layer"), [("input", 0), ("hidden", 1)])
def test_dropout_holds_one_mask_for_all_positions(place: str, layer: int) -> None:
    """Seen where it is: in what enters the layer behind it, and in no other layer."""
    lstm = LSTM(64, LSTMConfig(layers=2, hidden_dim=64, **{f"{place}_dropout": 0.5}))
    x, state = torch.randn(2, 9, 64), lstm.initial_state(2)
    entered: list[torch.Tensor] = []
    for part in lstm.layers:
        part.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))  # (T, B, 64)
    y, _ = lstm(x, state)
    assert y.all(), "what leaves the last layer is whole"
    gone = entered[layer] == 0
    assert torch.equal(gone, gone[:1].expand_as(gone))
    assert not torch.equal(gone[0, 0], gone[0, 1])
    assert 0.3 < gone.float().mean() < 0.7
    assert entered[1 - layer].all()
    if place == "input":
        torch.testing.assert_close(entered[0], x.transpose(0, 1) * 2 * ~gone)
    lstm.eval()
    assert torch.equal(lstm(x, state)[0], lstm(x, state)[0])


def test_recurrent_dropout_is_a_mask_on_the_recurrent_weights_with_gradients() -> None:
    """Against a plain loop over positions in float64 that uses the same mask."""
    lstm = LSTM(5, LSTMConfig(hidden_dim=6, recurrent_dropout=0.5)).double()
    layer = lstm.layers[0]
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    torch.manual_seed(3)
    y, state = lstm(x, lstm.initial_state(2))
    torch.manual_seed(3)
    weight_hh = nn.functional.dropout(layer.weight_hh_l0, 0.5)
    assert (weight_hh == 0).any()
    h = c = torch.zeros(2, 6, dtype=torch.float64)
    expected = []
    for t in range(4):
        gates = x[:, t] @ layer.weight_ih_l0.T + layer.bias_ih_l0 + h @ weight_hh.T + layer.bias_hh_l0
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        expected.append(h)
    torch.testing.assert_close(y, torch.stack(expected, 1))
    torch.testing.assert_close(state[0][1][0], c)
    parameters = list(layer.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(y.square().sum(), parameters),
        torch.autograd.grad(torch.stack(expected, 1).square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_recurrent_dropout_leaves_weights_and_evaluation_alone() -> None:
    torch.manual_seed(0)
    dropped = LSTM(5, LSTMConfig(layers=2, hidden_dim=6, recurrent_dropout=0.5))
    plain = LSTM(5, LSTMConfig(layers=2, hidden_dim=6))
    plain.load_state_dict(dropped.state_dict())
    x = torch.randn(2, 4, 5)
    assert not torch.equal(dropped(x, dropped.initial_state(2))[0], plain(x, plain.initial_state(2))[0])
    dropped.eval()
    torch.testing.assert_close(dropped(x, dropped.initial_state(2))[0], plain(x, plain.initial_state(2))[0])


def test_some_rows_begin_anew_in_all_layers_alike() -> None:
    torch.manual_seed(0)
    rows = 400
    lstm = LSTM(5, LSTMConfig(layers=2, hidden_dim=6, state_dropout=0.25))
    plain = LSTM(5, LSTMConfig(layers=2, hidden_dim=6))
    plain.load_state_dict(lstm.state_dict())
    x = torch.randn(rows, 4, 5)
    carried = [(torch.randn(1, rows, 6), torch.randn(1, rows, 6)) for _ in range(2)]
    y, state = lstm(x, carried)
    (goes_on, after), (anew, after_anew) = plain(x, carried), plain(x, plain.initial_state(rows))
    begins = (y - anew).abs().amax((1, 2)) < 1e-6
    assert 0.15 < begins.float().mean() < 0.35
    torch.testing.assert_close(y[~begins], goes_on[~begins])
    for ours, others, empty in zip(state, after, after_anew, strict=True):
        torch.testing.assert_close(ours[1][0, ~begins], others[1][0, ~begins])
        torch.testing.assert_close(ours[1][0, begins], empty[1][0, begins])
    lstm.eval()
    torch.testing.assert_close(lstm(x, carried)[0], goes_on)


def test_bad_arguments() -> None:
    with pytest.raises(UserError, match="layers is 0, but must be at least 1"):
        LSTMConfig(layers=0)
    with pytest.raises(UserError, match=r"hidden_dropout is 1\.0, but must be at least 0 and below 1"):
        LSTMConfig(hidden_dropout=1.0)


def test_recurrent_dropout_under_compile_draws_and_gives_the_same() -> None:
    lstm = LSTM(5, LSTMConfig(layers=2, hidden_dim=6, recurrent_dropout=0.5, hidden_dropout=0.2))
    compiled = torch.compile(lstm, backend="aot_eager")
    x = torch.randn(2, 4, 5)
    found = []
    for module in (lstm, compiled):
        torch.manual_seed(7)
        y, _ = module(x, lstm.initial_state(2))
        found.append((y, *torch.autograd.grad(y.square().sum(), list(lstm.parameters()))))
    for plain, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, plain)
