import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdefine.ops import taken_rows


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 5),
    sizes=st.lists(st.integers(0, 12), max_size=3),
    seed=st.integers(0, 1000),
)
def test_rows_and_gradients_are_those_of_separate_selections(
    rows: int, width: int, sizes: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    matrix = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    places = [torch.randint(rows, (size,)) for size in sizes]
    ours = taken_rows(matrix, places)
    theirs = (matrix, *(matrix.index_select(0, taken) for taken in places))
    weights = [torch.randn_like(given) for given in theirs]
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine, expected)
    sums = [
        sum((w * given.square()).sum() for w, given in zip(weights, found, strict=True)) for found in (ours, theirs)
    ]
    (mine,), (expected,) = (torch.autograd.grad(total, matrix, create_graph=True) for total in sums)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    (mine,), (expected,) = (torch.autograd.grad(first.square().sum(), matrix) for first in (mine, expected))
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_gradients_that_others_hold_stay_as_they_are() -> None:
    matrix = torch.randn(4, 3, requires_grad=True)
    whole, part = taken_rows(matrix, [torch.tensor([1, 1])])
    incoming = torch.ones(4, 3)
    torch.autograd.backward((whole, part), (incoming, torch.ones(2, 3)))
    assert torch.equal(incoming, torch.ones(4, 3))
    assert torch.equal(matrix.grad[1], torch.full((3,), 3.0))


def test_a_row_that_nobody_uses_whole_still_gets_its_gradient() -> None:
    matrix = torch.randn(4, 3, requires_grad=True)
    taken_rows(matrix, [torch.tensor([2])])[1].sum().backward()
    assert torch.equal(matrix.grad, torch.tensor([0.0, 0.0, 1.0, 0.0])[:, None].expand(4, 3))
