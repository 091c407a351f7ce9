import pytest
import torch
from torch import nn

from torchdefine.ops import lstm as lstm_layer


@pytest.mark.gpu
@pytest.mark.parametrize(("input_dim", "hidden_dim", "batch", "length"), [(5, 6, 2, 4), (128, 256, 20, 9)])
def test_equals_torchs_lstm_with_gradients(input_dim: int, hidden_dim: int, batch: int, length: int) -> None:
    lstm = nn.LSTM(input_dim, hidden_dim).cuda()
    weights = [lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0, lstm.bias_hh_l0]
    x = torch.randn(length, batch, input_dim, device="cuda", requires_grad=True)
    state = (torch.randn(1, batch, hidden_dim, device="cuda"), torch.randn(1, batch, hidden_dim, device="cuda"))
    ours = lstm_layer(x, *state, weights, "cudnn")
    theirs, after = lstm(x, state)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for one, other in zip(ours, (theirs, *after), strict=True):
        torch.testing.assert_close(one, other)
    wanted = [x, *weights]
    for one, other in zip(
        torch.autograd.grad(ours[0].square().sum(), wanted),
        torch.autograd.grad(theirs.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_computes_in_the_dtype_of_autocast(dtype: torch.dtype) -> None:
    lstm = nn.LSTM(16, 128).cuda()
    weights = [lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0, lstm.bias_hh_l0]
    x = torch.randn(7, 16, 16, device="cuda")
    state = (torch.zeros(1, 16, 128, device="cuda"), torch.zeros(1, 16, 128, device="cuda"))
    exact, _ = lstm(x, state)
    with torch.autocast("cuda", dtype):
        ours, _, _ = lstm_layer(x, *state, weights, "cudnn")
        ours.float().sum().backward()
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), exact, rtol=0.02, atol=0.02)
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in weights)
