import math

import pytest
import torch

from torchdefine.errors import UserError
from torchdefine.inference import TensorTrainRows, tensor_train_table
from torchdefine.inference.tensor_train import _divisors, _factors_of_at_least, tensor_train_rows


@pytest.mark.parametrize("number", [1, 7, 90, 1000, 30_522, 267_735])
def test_factors_hold_the_vocabulary_with_little_waste(number: int) -> None:
    product = math.prod(_factors_of_at_least(number, 3))
    assert number <= product <= max(1.2 * number, number + 8)


def test_width_factors_multiply_to_the_width() -> None:
    assert sorted(_divisors(384, 3)) == [6, 8, 8]
    assert math.prod(_divisors(97, 3)) == 97


def test_rows_match_the_whole_tensor() -> None:
    rows = TensorTrainRows(50, [4, 4, 4], [2, 3, 4], [1, 5, 6, 1])
    for core in rows.cores:
        torch.nn.init.normal_(core)
    first, second, third = rows.cores
    whole = torch.einsum("xaib,bcjd,dekz->aceijk", first, second, third).reshape(64, 24)
    torch.testing.assert_close(rows.matrix(), whole[:50])


def test_full_ranks_rebuild_the_matrix_and_fewer_lose() -> None:
    pytest.importorskip("tltorch")
    x = torch.randn(50, 24)
    torch.testing.assert_close(tensor_train_rows(x, 1_000).matrix(), x, rtol=1e-4, atol=1e-4)
    errors = [float((tensor_train_rows(x, rank).matrix() - x).square().mean()) for rank in (2, 6)]
    assert errors[0] > errors[1] > 0.01


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tltorch", None)
    with pytest.raises(UserError, match=r"torchdefine\[tt\]"):
        tensor_train_table(torch.randn(50, 24), 4)


@pytest.mark.parametrize(
    ("row_factors", "width_factors", "ranks"),
    [([2, 4], [2, 2, 2], [1, 2, 1]), ([2, 4], [2, 2], [1, 2]), ([2, 2], [2, 2], [1, 2, 1])],
)
def test_factors_and_ranks_that_do_not_belong_together_are_refused(
    row_factors: list[int], width_factors: list[int], ranks: list[int]
) -> None:
    with pytest.raises(UserError, match=r"with the ranks .* do not hold 8 rows"):
        TensorTrainRows(8, row_factors, width_factors, ranks)
