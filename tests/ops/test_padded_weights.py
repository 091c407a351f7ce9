import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from torchdefine.ops import padded_inward, padded_outward

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
    weight = torch.randn(4 * heads * head_dim, dim, device=device, requires_grad=True)
    difference = torch.randn(heads, head_dim, device=device, requires_grad=True)
    ours, expected = (padded_inward(weight, difference, width, dtype, impl) for impl in ("kernel", "torch"))
    assert torch.equal(ours[0], expected[0])
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-2, atol=1e-4)
    computed = torch.arange(len(ours[1]), device=device) % width == head_dim  # all others are copies
    assert torch.equal(ours[1][~computed], expected[1][~computed])
    upstream = [torch.randn(part.shape, device=device).to(dtype) for part in ours]
    gradients = [torch.autograd.grad(parts, (weight, difference), upstream) for parts in (ours, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    outward = torch.randn(dim, heads * head_dim, device=device, requires_grad=True)
    parts = [padded_outward(outward, heads, width, dtype, impl) for impl in ("kernel", "torch")]
    assert torch.equal(*parts)
    upstream = torch.randn(parts[0].shape, device=device).to(dtype)
    assert torch.equal(*(torch.autograd.grad(part, outward, upstream)[0] for part in parts))
