"""QRNN and SRU: against loops over positions written here, and what they share with every stack of recurrent layers."""

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training.test_loop import StopAt, assert_same_run
from torch import Tensor, nn

from torchdefine import load_run, train
from torchdefine.context import QRNN, SRU, QRNNConfig, RecurrentState, SRUConfig
from torchdefine.errors import UserError
from torchdefine.training import Interrupted

STACKS = {
    "qrnn": lambda **given: QRNN(6, QRNNConfig(layers=3, hidden_dim=8, output_dim=5, **given)),
    "wide qrnn": lambda **given: QRNN(
        6, QRNNConfig(layers=2, hidden_dim=8, windows=(1, 4), output_gate=False, **given)
    ),
    "sru": lambda **given: SRU(6, SRUConfig(layers=3, hidden_dim=8, output_dim=5, **given)),
    "sru of one width": lambda **given: SRU(6, SRUConfig(layers=2, hidden_dim=6, highway_bias=-1.0, **given)),
}


def by_position(stack: Any, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
    """The papers' formulas, one position and one layer after another."""
    outputs, state = [], [list(part) for part in state]
    for position in range(x.shape[1]):
        hidden = x[:, position]
        for layer, carried in zip(stack.layers, state, strict=True):
            hidden = (qrnn_cell if isinstance(stack, QRNN) else sru_cell)(layer, hidden, carried)
        outputs.append(hidden)
    return torch.stack(outputs, 1), [tuple(part) for part in state]


def qrnn_cell(layer: Any, x: Tensor, carried: list[Tensor]) -> Tensor:
    window, width = layer.window, layer.output_dim
    seen = torch.cat((*carried[1:], x[None]))  # (window, B, input), the oldest first
    sums = layer.linear.bias
    for back in range(window):
        taps = layer.linear.weight[:, back * x.shape[1] : (back + 1) * x.shape[1]]
        sums = sums + seen[window - 1 - back] @ taps.T
    z, f = torch.tanh(sums[:, :width]), torch.sigmoid(sums[:, width : 2 * width])
    c = f * carried[0][0] + (1 - f) * z
    carried[:] = [c[None], seen[1:]] if window > 1 else [c[None]]
    return torch.sigmoid(sums[:, 2 * width :]) * c if sums.shape[1] == 3 * width else c


def sru_cell(layer: Any, x: Tensor, carried: list[Tensor]) -> Tensor:
    before = carried[0][0]
    u = x @ layer.linear.weight.T
    parts = [u[:, start : start + layer.output_dim] for start in range(0, u.shape[1], layer.output_dim)]
    f = torch.sigmoid(parts[1] + layer.peepholes[0] * before + layer.biases[0])
    r = torch.sigmoid(parts[2] + layer.peepholes[1] * before + layer.biases[1])
    c = f * before + (1 - f) * parts[0]
    carried[:] = [c[None]]
    around = parts[3] if len(parts) == 4 else math.sqrt(1 + 2 * math.exp(layer.highway_bias)) * x
    return r * c + (1 - r) * around


@pytest.mark.parametrize("kind", STACKS)
def test_equals_its_formulas_in_float64_with_states_and_gradients(kind: str) -> None:
    stack = STACKS[kind]().double()
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    state = [tuple(torch.randn_like(part) for part in one) for one in stack.initial_state(3)]
    found = []
    for function in (stack, lambda x, state: by_position(stack, x, state)):
        y, after = function(x, state)
        gradients = torch.autograd.grad(y.sin().sum(), [x, *stack.parameters()])
        found.append([y, *(part for one in after for part in one), *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("first", [1, 4])
def test_carried_state_makes_two_segments_one(kind: str, first: int) -> None:
    stack = STACKS[kind](input_dropout=0.3, hidden_dropout=0.3, state_dropout=0.3).double().eval()
    x = torch.randn(3, 10, 6, dtype=torch.float64)
    whole, last = stack(x, stack.initial_state(3))
    start, state = stack(x[:, :first], stack.initial_state(3))
    rest, after = stack(x[:, first:], state)
    torch.testing.assert_close(torch.cat((start, rest), 1), whole)
    torch.testing.assert_close(after, last)
    assert whole.shape == (3, 10, stack.output_dim)
    assert not any(part.requires_grad for one in after for part in one)


@pytest.mark.parametrize("kind", STACKS)
def test_step_by_step_is_the_whole(kind: str) -> None:
    dropout = {"weight_dropout": 0.3, "zoneout": 0.3} if "qrnn" in kind else {}
    stack = STACKS[kind](input_dropout=0.3, hidden_dropout=0.3, **dropout).double().eval()
    x, state = torch.randn(3, 9, 6, dtype=torch.float64), stack.initial_state(3)
    expected, last = stack(x, state)
    for place in range(9):
        y, state = stack.step(x[:, place : place + 1], state)
        torch.testing.assert_close(y, expected[:, place : place + 1])
    torch.testing.assert_close(state, last)
    assert len(stack.state_tensors()) == sum(map(len, state))


@pytest.mark.parametrize("kind", STACKS)
def test_the_carried_state_keeps_its_precision(kind: str) -> None:
    stack = STACKS[kind]().bfloat16()
    state = [tuple(part.float() for part in one) for one in stack.initial_state(3)]
    y, after = stack(torch.randn(3, 4, 6, dtype=torch.bfloat16), state)
    assert y.dtype == torch.bfloat16
    assert {part.dtype for one in after for part in one} == {torch.float32}


@pytest.mark.parametrize("kind", ["qrnn", "sru"])
def test_under_compile_it_draws_and_gives_the_same(kind: str) -> None:
    stack = STACKS[kind](input_dropout=0.2, hidden_dropout=0.2, state_dropout=0.2)
    torch._dynamo.reset()  # what other tests compiled
    compiled = torch.compile(stack, backend="aot_eager", fullgraph=True)
    x, found = torch.randn(2, 4, 6), []
    for module in (stack, compiled):
        torch.manual_seed(7)
        y, after = module(x, stack.initial_state(2))
        found.append((y, *after[0], *torch.autograd.grad(y.square().sum(), list(stack.parameters()))))
    for plain, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, plain)


def test_weights_are_dropped_in_training_alone() -> None:
    qrnn = QRNN(5, QRNNConfig(hidden_dim=6, windows=(1,), weight_dropout=0.5)).double()
    x, state, linear = torch.randn(2, 4, 5, dtype=torch.float64), qrnn.initial_state(2), qrnn.layers[0].linear
    torch.manual_seed(3)
    y, _ = qrnn(x, state)
    torch.manual_seed(3)
    whole = linear.weight.detach().clone()
    with torch.no_grad():
        linear.weight.copy_(F.dropout(whole, 0.5))
    torch.testing.assert_close(qrnn.eval()(x, state)[0], y)
    assert (linear.weight == 0).any()


def test_zoneout_keeps_cells_in_training_and_slows_them_evenly_in_evaluation() -> None:
    qrnn = QRNN(3, QRNNConfig(hidden_dim=400, zoneout=0.25, windows=(1,), output_gate=False))
    x, cell = torch.randn(1, 1, 3), torch.full((1, 1, 400), 2.0)  # no candidate is as large
    kept = qrnn(x, [(cell,)])[0] == 2
    assert 0.15 < kept.float().mean() < 0.35
    plain = QRNN(3, QRNNConfig(hidden_dim=400, windows=(1,), output_gate=False))
    plain.load_state_dict(qrnn.state_dict())
    moved, would_move = (module.eval()(x, [(cell,)])[0] - 2 for module in (qrnn, plain))
    torch.testing.assert_close(moved, 0.75 * would_move)


@pytest.mark.parametrize(("place", "layer"), [("input", 0), ("hidden", 1)])
def test_dropout_holds_one_mask_for_all_positions(place: str, layer: int) -> None:
    stack = SRU(64, SRUConfig(layers=2, hidden_dim=64, **{f"{place}_dropout": 0.5}))
    entered: list[Tensor] = []
    for part in stack.layers:
        part.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))  # (T, B, 64)
    stack(torch.randn(2, 9, 64), stack.initial_state(2))
    gone = entered[layer] == 0
    assert torch.equal(gone, gone[:1].expand_as(gone))
    assert 0.3 < gone.float().mean() < 0.7
    assert entered[1 - layer].all()


def test_a_fresh_sru_keeps_the_variance_of_its_inputs() -> None:
    """What its start is for: the outputs of ten layers are about as large as their inputs."""
    for bias in (0.0, -3.0):
        stack = SRU(256, SRUConfig(layers=10, hidden_dim=256, highway_bias=bias))
        y, _ = stack(torch.randn(4, 30, 256), stack.initial_state(4))
        assert 0.5 < y.var() < 2


def test_windows_need_a_number() -> None:
    with pytest.raises(UserError, match="windows is empty: give at least one number"):
        QRNNConfig(windows=())
    with pytest.raises(UserError, match=r"windows is \(2, 0\), but must be at least 1"):
        QRNNConfig(windows=(2, 0))
    assert [QRNNConfig(windows=(3, 2)).window(layer) for layer in range(4)] == [3, 2, 2, 2]


@pytest.mark.parametrize("kind", ["qrnn", "sru"])
def test_a_stopped_run_resumes_bit_for_bit_and_generates(kind: str, recipe_file: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    settings: dict[str, Any] = {
        "context": {"kind": kind, "layers": 2, "hidden_dim": 24, "hidden_dropout": 0.2, "state_dropout": 0.1},
        "train": {"steps": 24, "eval_every": 12, "log_every": 4},
    }
    if kind == "qrnn":
        settings["context"] |= {"weight_dropout": 0.1, "zoneout": 0.1}
    train(recipe_file, out=tmp_path / "whole", **settings)
    with pytest.raises(Interrupted):
        train(recipe_file, out=tmp_path / "broken", reporter=StopAt(8, signal.SIGTERM), **settings)
    train(recipe_file, out=tmp_path / "broken", resume=True, **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    run = load_run(tmp_path / "whole")
    text = run.generate(length=12, seed=3)
    assert text == run.generate(length=12, seed=3)
