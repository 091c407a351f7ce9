import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from torchdefine.ops import padded_inward, padded_outward
from torchdefine.ops.padded_weights import change_width, pad, unpad

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


def test_weights_are_padded_with_gradients_as_torch_pads_them() -> None:
    heads, head_dim, width, dim = 3, 5, 8, 4
    weight = torch.randn(4 * heads * head_dim, dim, dtype=torch.float64, requires_grad=True)
    difference = torch.randn(heads, head_dim, dtype=torch.float64, requires_grad=True)
    outward = torch.randn(dim, heads * head_dim, dtype=torch.float64, requires_grad=True)

    by_head = F.pad(weight.view(4, heads, head_dim, dim), (0, 0, 0, width - head_dim))
    spare = torch.einsum("hk,hkd->hd", difference, weight.view(4, heads, head_dim, dim)[3])
    to_distances = by_head[3] + F.pad(spare[:, None], (0, 0, head_dim, width - head_dim - 1))
    expected = [
        by_head[:3].reshape(3 * heads * width, dim),
        to_distances.reshape(heads * width, dim),
        F.pad(outward.view(dim, heads, head_dim), (0, width - head_dim)).flatten(1),
    ]
    ours = [
        *padded_inward(weight, difference, width, torch.float64),
        padded_outward(outward, heads, width, torch.float64),
    ]
    upstream = [torch.randn_like(part) for part in expected]
    wanted = [weight, difference, outward]
    for one, other in zip(
        [*ours, *torch.autograd.grad(ours, wanted, upstream)],
        [*expected, *torch.autograd.grad(expected, wanted, upstream)],
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize(("heads", "head_dim", "width", "dim"), [(3, 5, 8, 4), (2, 41, 48, 150), (1, 15, 16, 128)])
def test_interpreted_padding_equals_plain_torch(heads: int, head_dim: int, width: int, dim: int) -> None:
    assert_kernels_equal_plain_torch(heads, head_dim, width, dim, torch.device("cpu"), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim", "width", "dim"), [(3, 5, 8, 4), (10, 41, 48, 384), (1, 15, 16, 128)])
def test_padding_kernels_equal_plain_torch(heads: int, head_dim: int, width: int, dim: int, dtype: torch.dtype) -> None:
    assert_kernels_equal_plain_torch(heads, head_dim, width, dim, torch.device("cuda"), dtype)


def assert_kernels_equal_plain_torch(
    heads: int, head_dim: int, width: int, dim: int, device: torch.device, dtype: torch.dtype
) -> None:
    from torchdefine.ops import padding_kernels as kernels

    weight = torch.randn(4 * heads * head_dim, dim, device=device)
    difference = torch.randn(heads, head_dim, device=device)
    ours, expected = (way(weight, difference, width, dtype) for way in (kernels.pad, pad))
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-4)
    computed = torch.arange(len(ours), device=device) % width == head_dim  # all others are copies
    assert torch.equal(ours[~computed], expected[~computed])
    gradients = torch.randn(len(ours), dim, device=device, dtype=dtype).tensor_split((3 * heads * width,))
    for one, other in zip(
        kernels.unpad(weight, difference, *gradients), unpad(weight, difference, *gradients), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    outward = torch.randn(dim, heads * head_dim, device=device)
    for way, back in ((kernels.change_width, change_width), (change_width, kernels.change_width)):
        padded = way(outward, heads, width, dtype)
        assert torch.equal(padded, change_width(outward, heads, width, dtype))
        assert torch.equal(back(padded, heads, head_dim, torch.float32), outward.to(dtype).float())
