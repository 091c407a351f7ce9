from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torchdefine.ops import add_column_sums, softmax_loss
from torchdefine.ops.softmax_loss import Classes

plain_softmax_loss = partial(softmax_loss, impl="torch")


def problem(
    rows: int, classes: int, padded: int, biased: bool, smoothing: float, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Classes]:
    """Logits with anything at all behind the classes, about a quarter of whose rows do not count."""
    logits = 3 * torch.randn(rows, padded, dtype=torch.float64)
    logits[:, classes:] = 1e4
    bias = torch.randn(padded, dtype=torch.float64) if biased else None
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    counted = (torch.rand(rows) > 0.25).to(device)
    columns = torch.randint(0, classes, (rows,), device=device)
    held_against = Classes(columns, counted, classes, None if bias is None else bias.to(device, exact), smoothing)
    return logits.to(device, dtype), held_against


def truth(logits: Tensor, classes: Classes) -> tuple[Tensor, Tensor]:
    """By torch in float64, over the classes alone; gradients (t, P) of the rows that count."""
    given = logits.double().requires_grad_()
    scores = given[:, : classes.number]
    if classes.bias is not None:
        scores = scores + classes.bias[: classes.number].double()
    losses = F.cross_entropy(scores, classes.columns, reduction="none", label_smoothing=classes.label_smoothing)
    losses = torch.where(classes.counted, losses, 0.0)
    (gradient,) = torch.autograd.grad(losses.sum(), given)
    return losses.detach(), gradient


@settings(max_examples=60)
@given(
    rows=st.integers(0, 9),
    classes=st.integers(1, 30),
    padding=st.integers(0, 15),
    biased=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_plain_torch_equals_cross_entropy_over_the_classes_alone(
    rows: int, classes: int, padding: int, biased: bool, smoothing: float
) -> None:
    logits, held_against = problem(rows, classes, classes + padding, biased, smoothing, torch.float64)
    expected_losses, expected = truth(logits, held_against)
    losses, gradient = plain_softmax_loss(logits.clone(), held_against, with_gradient=True)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=1e-10)
    counted = held_against.counted
    torch.testing.assert_close(gradient[counted], expected[counted], rtol=1e-10, atol=1e-10)
    assert not gradient[:, classes:].any()  # exactly
    alone, nothing = plain_softmax_loss(logits.clone(), held_against, with_gradient=False)
    assert torch.equal(alone, losses)
    assert nothing is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("rows", "classes", "padded", "biased"),
    [(3, 1, 16, False), (5, 37, 48, True), (7, 4096, 4096, False), (4, 9000, 9008, True), (0, 5, 16, True)],
)
def test_the_kernel_gives_the_numbers_of_plain_torch(
    kernel_device: str, rows: int, classes: int, padded: int, biased: bool, smoothing: float, dtype: torch.dtype
) -> None:
    from torchdefine.ops import softmax_loss_kernels

    logits, held_against = problem(rows, classes, padded, biased, smoothing, dtype, kernel_device)
    expected_losses, expected = plain_softmax_loss(logits.clone(), held_against, with_gradient=True)
    evaluated, _ = softmax_loss_kernels.softmax_loss(logits.clone(), held_against, with_gradient=False)
    losses, gradient = softmax_loss_kernels.softmax_loss(logits, held_against, with_gradient=True)
    assert gradient is logits
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected_losses, rtol=2e-6, atol=2e-6)
    assert torch.equal(evaluated, losses)
    expected = torch.where(held_against.counted[:, None], expected, 0.0)
    torch.testing.assert_close(gradient, expected.to(dtype), rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-6)
    assert not gradient[:, classes:].any()


def test_forbidden_classes_leave_a_whole_block_without_probability(kernel_device: str) -> None:
    from torchdefine.ops import softmax_loss_kernels

    logits, held_against = problem(3, 5000, 5008, True, 0.0, torch.float32, kernel_device)
    held_against.bias[:4500] = -torch.inf
    held_against.columns.fill_(4800)
    expected_losses, expected = truth(logits, held_against)
    losses, gradient = softmax_loss_kernels.softmax_loss(logits, held_against, with_gradient=True)
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 70), (2100, 65)])
def test_column_sums_are_those_of_a_product_in_float64(kernel_device: str, rows: int, columns: int) -> None:
    from torchdefine.ops import softmax_loss_kernels

    matrix = torch.randn(rows, columns, device=kernel_device, dtype=torch.float16)
    for weights in (torch.ones(rows, dtype=torch.long), torch.randn(rows)):
        expected = matrix.double().T @ weights.double().to(kernel_device) + 1
        for way in (softmax_loss_kernels.add_column_sums, partial(add_column_sums, impl="torch")):
            total = torch.ones(columns, device=kernel_device)
            way(total, matrix, weights.to(kernel_device))
            torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("worst", [-40.0, -75.0, -200.0, -torch.inf])
def test_targets_of_hardly_any_probability_have_the_right_loss(worst: float, smoothing: float) -> None:
    logits, _ = problem(6, 50, 50, False, smoothing, torch.float32)
    columns = torch.arange(6)
    logits[3, 3] = worst
    smoothing = 0.0 if worst == -torch.inf else smoothing  # the mean of all logits would be infinite as well
    held_against = Classes(columns, torch.ones(6, dtype=torch.bool), 50, None, smoothing)
    expected_losses, expected = truth(logits, held_against)
    losses, gradient = plain_softmax_loss(logits.clone(), held_against, with_gradient=True)
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_cpu_looks_for_the_largest_only_where_a_target_is_improbable() -> None:
    class Operations(TorchDispatchMode):
        seen: list[str]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    for lowest, searches in ((-10.0, 0), (-100.0, 2)):
        logits = torch.randn(4, 30)
        logits[2, 7] = lowest
        held_against = Classes(torch.full((4,), 7), torch.ones(4, dtype=torch.bool), 30)
        with Operations() as operations:
            operations.seen = []
            plain_softmax_loss(logits, held_against, with_gradient=True)
        assert operations.seen.count("amax") == searches
