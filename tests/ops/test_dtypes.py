import pytest
import torch

from torchdefine.ops import exact_dtype, product_dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("on", [False, True])
def test_products_have_the_dtype_that_torch_gives_them(dtype: torch.dtype, on: bool) -> None:
    x = torch.ones(2, 2, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        assert product_dtype(x) == (x @ x).dtype
        assert product_dtype(x.to("meta")) == dtype  # which has no autocast


def test_sums_are_exact() -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert [exact_dtype(torch.ones(1, dtype=kind)) for kind in kinds] == [torch.float32] * 3 + [torch.float64]
