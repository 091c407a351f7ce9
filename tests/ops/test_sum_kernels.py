import pytest
import torch

from torchdefine.ops.softmax_loss import add_onto


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize(
    ("groups", "rows", "columns"), [(1, 1, 1), (3, 37, 384), (1, 0, 5), (2, 130, 41), (1, 1500, 17), (1, 4, 300)]
)
def test_rows_are_summed(
    kernel_device: str, groups: int, rows: int, columns: int, onto: bool, dtype: torch.dtype
) -> None:
    from torchdefine.ops.sum_kernels import sum_rows

    parts = torch.randn(groups, rows, columns, device=kernel_device)
    before = torch.randn(groups, columns, device=kernel_device).to(dtype)
    expected = parts.double().sum(1) + (before.double() if onto else 0)
    totals = sum_rows(parts, before.clone(), onto=onto)
    assert totals.dtype == dtype
    tolerance = 2e-3 if dtype == torch.float16 else 1e-4
    torch.testing.assert_close(totals.double(), expected, rtol=tolerance, atol=tolerance)


def test_part_of_a_row_is_filled_and_the_rest_left_alone(kernel_device: str) -> None:
    from torchdefine.ops.sum_kernels import sum_rows

    parts, longer = torch.randn(1, 6, 20, device=kernel_device), torch.full((1, 60), 7.0, device=kernel_device)
    sum_rows(parts, longer[:, :20])
    torch.testing.assert_close(longer[:, :20], parts.sum(1))
    assert (longer[:, 20:] == 7).all()


@pytest.mark.parametrize("shape", [(1, 1), (33, 128), (48, 43)])
def test_halves_are_added_to_a_total_in_full_precision(kernel_device: str, shape: tuple[int, int]) -> None:
    from torchdefine.ops import sum_kernels

    before = torch.randn(shape, device=kernel_device)
    values = torch.randn(shape, device=kernel_device).to(torch.bfloat16)
    for way in (sum_kernels.add_onto, add_onto):
        total = before.clone()
        way(total, values)
        assert torch.equal(total, before + values)


@pytest.mark.gpu
def test_the_same_rows_always_give_the_same_bits() -> None:
    from torchdefine.ops.sum_kernels import sum_rows

    parts = torch.randn(3, 750, 384, device="cuda")
    once, twice = (sum_rows(parts, parts.new_empty(3, 384)) for _ in range(2))
    assert torch.equal(once, twice)
    assert (once.double() - parts.double().sum(1)).abs().max() < 1e-3
