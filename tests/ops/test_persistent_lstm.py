import copy
from functools import partial

import pytest
import torch
from tests.ops.compiling import INTERPRETED
from torch import Tensor, nn

from torchdefine.ops import lstm as lstm_layer
from torchdefine.ops.lstm import padded, row_blocks

by_kernel = partial(lstm_layer, impl="kernel")


def layer_and_inputs(
    input_dim: int, hidden_dim: int, batch: int, length: int, like: Tensor
) -> tuple[nn.LSTM, list[Tensor], Tensor, tuple[Tensor, Tensor]]:
    lstm = nn.LSTM(input_dim, hidden_dim).to(like)
    weights = [lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0, lstm.bias_hh_l0]
    x = torch.randn(length, batch, input_dim).to(like).requires_grad_()
    state = (torch.randn(1, batch, hidden_dim).to(x), torch.randn(1, batch, hidden_dim).to(x))
    return lstm, weights, x, state


@pytest.fixture
def like(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Where kernels run, and in what dtype.

    Triton's interpreter runs programs one after another, so there one has all units, and nobody to wait for.
    """
    if kernel_device == "cuda":
        return torch.empty(0, device="cuda", dtype=torch.bfloat16)
    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    from torchdefine.ops import lstm_kernels as kernels

    monkeypatch.setattr(kernels, "UNITS_PER_PROGRAM", 128)
    monkeypatch.setattr(kernels, "_wait", lambda counter, programs: None)
    return torch.empty(0)


def test_more_rows_than_a_program_takes_are_shared_out() -> None:
    assert [row_blocks(rows) for rows in (1, 128, 129, 256, 257)] == [1, 1, 2, 2, 3]


def test_widths_are_padded_to_whole_lines() -> None:
    assert [padded(width) for width in (1, 64, 65, 400, 1150)] == [128, 128, 128, 512, 1152]


@pytest.mark.parametrize(
    ("input_dim", "hidden_dim", "batch", "length"), [(5, 6, 2, 4), (3, 70, 1, 1), (7, 64, 5, 9), (16, 128, 3, 3)]
)
def test_kernels_equal_torchs_lstm_with_gradients(
    like: Tensor, input_dim: int, hidden_dim: int, batch: int, length: int
) -> None:
    lstm, weights, x, state = layer_and_inputs(input_dim, hidden_dim, batch, length, like)
    upstream = torch.randn(length, batch, hidden_dim).to(like)
    made = []
    for y, h, c in (by_kernel(x, *state, weights), exactly(lstm, x, state)):
        made.append((y, h, c, *torch.autograd.grad((y * upstream).sum(), [x, *weights])))
    for ours, theirs in zip(*made, strict=True):
        assert relative_error(ours, theirs) < (1e-5 if like.dtype == torch.float32 else 4e-2)


def exactly(lstm: nn.LSTM, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """By torch in float64, with the same parameters."""
    parameters = {name: parameter.double() for name, parameter in lstm.named_parameters()}
    with torch.backends.cudnn.flags(enabled=False):
        given = (x.double(), tuple(s.double() for s in state))
        y, (h, c) = torch.func.functional_call(copy.deepcopy(lstm).double(), parameters, given)
    return y, h, c


def test_what_is_given_back_is_the_callers(like: Tensor) -> None:
    _, weights, x, state = layer_and_inputs(16, 128, 3, 4, like)
    y, h, c = by_kernel(x, *state, weights)
    expected = torch.autograd.grad(y.sum(), [x, *weights], retain_graph=True)
    for kept in (h, c):
        kept.zero_()  # a state may be emptied before the backward pass
    gradients = torch.autograd.grad(y.sum(), [x, *weights])
    gradients[-1].zero_()
    for ours, theirs in zip(gradients[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_second_derivative_is_refused(like: Tensor) -> None:
    _, weights, x, state = layer_and_inputs(5, 6, 2, 3, like)
    y = by_kernel(x, *state, weights)[0]
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_inputs_may_be_a_view_of_other_memory(like: Tensor) -> None:
    """Batches come as (B, T, …) and are only turned round."""
    _, weights, _, state = layer_and_inputs(8, 6, 3, 4, like)
    x = torch.randn(3, 4, 8).to(like).requires_grad_()
    turned = torch.autograd.grad(by_kernel(x.transpose(0, 1), *state, weights)[0].square().sum(), [x, *weights])
    copied = by_kernel(x.transpose(0, 1).contiguous(), *state, weights)[0]
    for ours, theirs in zip(turned, torch.autograd.grad(copied.square().sum(), [x, *weights]), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("input_dim", "hidden_dim", "batch", "length"),
    [
        (5, 6, 2, 4),
        (400, 1150, 20, 70),
        (1150, 400, 20, 33),
        (384, 1024, 64, 20),
        (64, 128, 100, 3),
        (64, 256, 130, 5),
        (64, 1024, 256, 3),
    ],
)
def test_kernels_equal_the_exact_lstm_to_half_precision(
    input_dim: int, hidden_dim: int, batch: int, length: int, dtype: torch.dtype
) -> None:
    lstm, weights, x, state = layer_and_inputs(input_dim, hidden_dim, batch, length, torch.empty(0, device="cuda"))
    with torch.autocast("cuda", dtype):
        y, h, c = by_kernel(x, *state, weights)
    exact = copy.deepcopy(lstm).double()
    with torch.backends.cudnn.flags(enabled=False):
        expected, (expected_h, expected_c) = exact(x.double(), tuple(s.double() for s in state))
    close = {torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for ours, theirs in ((y, expected), (h, expected_h), (c, expected_c)):
        assert relative_error(ours, theirs) < close
    upstream = torch.randn_like(y)
    gradients = torch.autograd.grad((y * upstream).float().sum(), [x, *weights])
    expected_gradients = torch.autograd.grad((expected * upstream.double()).sum(), [x, *exact.parameters()])
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert relative_error(ours, theirs) < 2 * close


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())
