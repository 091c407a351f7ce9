import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.philox import drawn_mask
from torch.nn import functional as F

from torchdefine.ops import relu_dropout
from torchdefine.ops.dropout import kept_features, plain_relu_dropout


@settings(max_examples=40)
@given(
    rows=st.integers(0, 7),
    width=st.integers(1, 20),
    p=st.sampled_from([0.0, 0.4]),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_plain_torch_equals_relu_and_dropout_in_float64_with_gradients(
    rows: int, width: int, p: float, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    z = torch.randn(2, rows, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(width, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(seed)
    ours = relu_dropout(z, p, bias if biased else None)
    torch.manual_seed(seed)
    mask = kept_features(z, p, by_kernels=False).by
    theirs = F.relu(z + bias if biased else z) * (1 if mask is None else mask.view_as(z) / (1 - p))
    torch.testing.assert_close(ours, theirs)
    upstream, inputs = torch.randn_like(ours), (z, bias) if biased else (z,)
    for mine, reference in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, reference)


def test_what_is_not_a_number_stays_so() -> None:
    assert relu_dropout(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(("rows", "width", "masked"), [(1, 1, False), (300, 130, True), (21, 384, True), (0, 5, False)])
def test_kernels_give_the_numbers_of_plain_torch(
    kernel_device: str, rows: int, width: int, masked: bool, summed: bool, dtype: torch.dtype
) -> None:
    from torchdefine.ops.dropout_kernels import ReluDropout

    z = torch.randn(rows, width, device=kernel_device).to(dtype).requires_grad_()
    gradient = torch.randn_like(z)
    seeded = kept_features(z, 0.3 if masked else 0.0, by_kernels=True)
    known = seeded if seeded.by is None else seeded._replace(by=drawn_mask(seeded.by, rows, width, seeded.probability))
    bias = torch.randn(width, device=kernel_device, requires_grad=True) if summed else None
    wanted = [z] if bias is None else [z, bias]
    results = []
    for out in (ReluDropout.apply(z, bias, *seeded), plain_relu_dropout(z, bias, known)):
        results.append((out, *torch.autograd.grad(out, wanted, gradient)))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        tolerance = 1e-3 if ours.dtype == torch.float16 else 2e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_kernels_let_through_what_is_not_a_number(kernel_device: str) -> None:
    out = relu_dropout(torch.tensor([[torch.nan, -1.0]], device=kernel_device), impl="kernel")
    assert out.isnan().tolist() == [[True, False]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(9000, 1920), (4096, 2048), (77, 41)])
def test_kernels_equal_float64_to_half_precision(rows: int, width: int, dtype: torch.dtype) -> None:
    z = torch.randn(rows, width, device="cuda").to(dtype).requires_grad_()
    bias = torch.randn(width, device="cuda", requires_grad=True)
    upstream = torch.randn_like(z)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.manual_seed(5)
        ours = relu_dropout(z, 0.1, bias)
        gradients = torch.autograd.grad(ours, (z, bias), upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.manual_seed(5)
    seed, share = kept_features(z, 0.1, by_kernels=True)
    assert seed is not None
    exact = z.detach().double().requires_grad_()
    expected = F.relu(exact + bias.detach().double()) * drawn_mask(seed, rows, width, share) / share
    (of_z,) = torch.autograd.grad(expected, exact, upstream.double())
    close = {torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for mine, true in ((ours, expected), (gradients[0], of_z), (gradients[1], of_z.sum(0))):
        assert (mine.double() - true).norm() <= close * true.norm()
