from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.compiling import INTERPRETED
from torch import Tensor

from torchdefine.ops import light_recurrence


def inputs_of(
    length: int, rows: int, width: int, peeps: bool, like: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    like = torch.empty(0, dtype=torch.float64) if like is None else like

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(like).requires_grad_()

    candidates, start = draw(length, rows, width), draw(rows, width)
    if peeps:
        return draw(length, rows, width), candidates, start, draw(width)
    gates = torch.rand(length, rows, width, dtype=torch.float64)
    return gates.round(decimals=1).to(like).requires_grad_(), candidates, start, None  # with gates at 0 and 1


def step_by_step(forget: Tensor, candidates: Tensor, start: Tensor, peephole: Tensor | None) -> Tensor:
    cell, cells = start, []
    for gate, new in zip(forget, candidates, strict=True):
        f = gate if peephole is None else torch.sigmoid(gate + peephole * cell)
        cell = f * cell + (1 - f) * new
        cells.append(cell)
    return torch.stack(cells)


def with_gradients(function: Any, inputs: tuple[Tensor | None, ...], upstream: Tensor, **given: Any) -> list[Tensor]:
    cells = function(*inputs, **given)
    return [cells, *torch.autograd.grad((cells * upstream).sum(), [one for one in inputs if one is not None])]


SIZES = {"length": st.integers(1, 12), "rows": st.integers(1, 4), "width": st.integers(1, 6)}


@settings(max_examples=20)
@given(**SIZES, peeps=st.booleans(), seed=st.integers(0, 1000))
def test_equals_its_formula_in_float64_with_gradients(
    length: int, rows: int, width: int, peeps: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    inputs = inputs_of(length, rows, width, peeps)
    upstream = torch.randn(length, rows, width, dtype=torch.float64)
    found = [with_gradients(function, inputs, upstream) for function in (light_recurrence, step_by_step)]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_long_texts_with_closed_gates_stay_finite() -> None:
    """Nothing is divided by a product of gates, which would be zero here."""
    gates = torch.zeros(2000, 1, 4)
    gates[::3] = 1e-20
    cells = light_recurrence(gates, torch.ones_like(gates), torch.full((1, 4), 1e30))
    torch.testing.assert_close(cells[1:], torch.ones_like(cells[1:]))


def test_half_precision_carries_the_cell_in_single() -> None:
    gates, candidates = torch.full((400, 1, 1), 0.996, dtype=torch.bfloat16), torch.ones(400, 1, 1).bfloat16()
    start = torch.zeros(1, 1, requires_grad=True)
    cells = light_recurrence(gates, candidates, start)
    assert cells.dtype == torch.bfloat16
    expected = step_by_step(gates.double(), candidates.double(), start.double(), None)
    torch.testing.assert_close(cells.double(), expected, rtol=2**-8, atol=0)
    assert torch.autograd.grad(cells.sum(), start)[0].dtype == torch.float32


@pytest.mark.parametrize("peeps", [False, True])
def test_compilers_take_it_whole(peeps: bool) -> None:
    inputs = inputs_of(5, 2, 3, peeps)
    torch.library.opcheck(torch.ops.torchdefine.light_recurrence.default, (*inputs, "auto"))
    compiled = torch.compile(light_recurrence, backend="aot_eager", fullgraph=True)
    upstream = torch.randn(5, 2, 3, dtype=torch.float64)
    found = [with_gradients(function, inputs, upstream) for function in (light_recurrence, compiled)]
    for plain, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("peeps", [False, True])
@pytest.mark.parametrize(("length", "rows", "width"), [(1, 1, 1), (5, 3, 7), (9, 2, 300)])
@pytest.mark.usefixtures("_forgotten_memory_is_nan")
def test_kernels_give_the_numbers_of_plain_torch(
    kernel_device: str, length: int, rows: int, width: int, peeps: bool, dtype: torch.dtype
) -> None:
    if kernel_device == "cpu" and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    inputs = inputs_of(length, rows, width, peeps, torch.empty(0, device=kernel_device, dtype=dtype))
    upstream = torch.randn(length, width, rows, device=kernel_device, dtype=dtype).transpose(1, 2)
    kernel, plain = (with_gradients(light_recurrence, inputs, upstream, impl=impl) for impl in ("kernel", "torch"))
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    for ours, theirs in zip(kernel, plain, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("peeps", [False, True])
def test_kernels_equal_float64_on_a_gpu(peeps: bool) -> None:
    torch.manual_seed(0)
    exact = inputs_of(140, 60, 2500, peeps)
    inputs = tuple(None if one is None else one.detach().float().cuda().requires_grad_() for one in exact)
    upstream = torch.randn(140, 60, 2500, dtype=torch.float64)
    ours = with_gradients(light_recurrence, inputs, upstream.float().cuda())
    for found, true in zip(ours, with_gradients(light_recurrence, exact, upstream), strict=True):
        assert (found.double().cpu() - true).norm() <= 1e-5 * true.norm()
