"""The unit's layers as one operation, against the unit itself, layer by layer."""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchdefine.embedding import DefineUnit, UnitConfig
from torchdefine.ops import Impl, group_stack, has_fused_kernels
from torchdefine.ops.group_stack import Seam, StackForm, Statistics, backward_seam, forward_seam


def unit_of(n: int, k: int, m: int, depth: int, variant: str = "define", **changes: Any) -> DefineUnit:
    config = UnitConfig.of(variant, embedding_dim=m, expand_dim=k, depth=depth, **changes)
    unit = DefineUnit(n, config)
    for parameter in unit.parameters():  # biases and norms that matter
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return unit


def in_one(unit: DefineUnit, x: Tensor, dtype: torch.dtype, impl: Impl = "auto") -> Tensor:
    return group_stack(x, unit._stack(), unit._form(), dtype, impl)


def results(work: Any, unit: DefineUnit, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Output and gradients of the input and of all weights, in float64."""
    x = x.detach().clone().requires_grad_()
    output = work(x)
    wanted = [x, *unit.parameters()]
    return [t.detach().double() for t in (output, *torch.autograd.grad(output, wanted, upstream.to(output.dtype)))]


@settings(max_examples=60, deadline=None)
@given(
    variant=st.sampled_from(["define", "define-no-mixer", "hgt", "glt", "linear", "define-no-reduce"]),
    chunks=st.tuples(st.integers(1, 3), st.integers(3, 6), st.integers(1, 3)),
    depth=st.integers(1, 5),
    scheme=st.sampled_from(["halving", "cycle"]),
    norm=st.sampled_from(["none", "layer"]),
    activation=st.sampled_from(["gelu", "relu", "silu", "tanh", "none"]),
    bias=st.booleans(),
    equalised=st.booleans(),
    tokens=st.sampled_from([(), (0,), (1,), (3, 2)]),
)
def test_one_operation_equals_the_unit_layer_by_layer_in_float64(
    variant: str,
    chunks: tuple[int, int, int],
    depth: int,
    scheme: str,
    norm: str,
    activation: str,
    bias: bool,
    equalised: bool,
    tokens: tuple[int, ...],
) -> None:
    n, k, m = (16 * chunk for chunk in chunks)
    m = k if variant == "define-no-reduce" else m
    rules = {} if variant in ("glt", "linear") else {"groups": scheme}
    options = {"norm": norm, "activation": activation, "bias": bias, "equalised": equalised}
    unit = unit_of(n, k, m, depth, variant, **options, **rules).double()
    x = torch.randn(*tokens, n, dtype=torch.float64)
    upstream = torch.randn(*tokens, m, dtype=torch.float64)
    apart = results(unit, unit, x, upstream)
    together = results(lambda x: in_one(unit, x, torch.float64), unit, x, upstream)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_second_derivatives_are_refused() -> None:
    unit = unit_of(16, 48, 16, 2).double()
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(in_one(unit, x, torch.float64).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


SEAMS = [
    Seam(1, 32, 32, 1, 48, 48, StackForm(16, True, "gelu", 1e-5)),
    Seam(4, 9, 16, 2, 26, 32, StackForm(16, True, "gelu", 1e-5)),  # chunks filled up on both sides
    Seam(2, 20, 24, 4, 14, 16, StackForm(16, False, "silu", 1e-5)),  # the whole input before the whole output
    Seam(16, 5, 8, 8, 10, 16, StackForm(0, True, "tanh", 1e-5)),  # nothing seen again
    Seam(1, 130, 136, 2, 66, 72, StackForm(2, True, "relu", 1e-5)),
    Seam(2, 520, 520, 1, 1044, 1048, StackForm(4, True, "none", 1e-5)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("seam", "biased", "normed"),
    [
        (seam, *kind)
        for seam, kind in zip(SEAMS, itertools.cycle([(True, True), (True, False), (False, True), (False, False)]))
    ]
    + [(SEAMS[1], True, True), (SEAMS[3], True, True)],
)
@pytest.mark.parametrize("tokens", [1, 41])
def test_kernels_give_the_numbers_of_plain_torch(
    kernel_device: str, seam: Seam, biased: bool, normed: bool, tokens: int, dtype: torch.dtype
) -> None:
    from torchdefine.ops import group_stack_kernels as kernels

    torch.manual_seed(tokens)
    make = torch.Generator(kernel_device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device=kernel_device, generator=make)  # noqa: E731
    leaving = draw(seam.groups, tokens, seam.room).to(dtype)
    of_entering = draw(seam.next_groups, tokens, seam.next_room).to(dtype)
    x = draw(tokens, seam.form.seen)
    finish = (
        draw(seam.width) if biased else None,
        1 + 0.3 * draw(seam.width) if normed else None,
        draw(seam.width) if normed else None,
    )
    earlier = draw(tokens, seam.form.seen)
    made = []
    for forward, backward in ((kernels.forward_seam, kernels.backward_seam), (forward_seam, backward_seam)):
        statistics = Statistics(x.new_zeros(tokens), x.new_zeros(tokens))
        entering = torch.full((seam.next_groups, tokens, seam.next_room), torch.nan, dtype=dtype, device=kernel_device)
        forward(leaving, finish, x, seam, statistics, entering)
        of_leaving, grad_x = torch.full_like(leaving, torch.nan), earlier.clone()
        sums = backward(of_entering, leaving, finish, seam, statistics, False, of_leaving, grad_x)
        fresh_x = torch.full_like(earlier, torch.nan)
        backward(of_entering, leaving, finish, seam, statistics, True, of_leaving, fresh_x)
        kept = sums[[True, normed, normed]]
        made.append((entering, *statistics, of_leaving, grad_x, fresh_x, kept))
    for ours, theirs in zip(*made, strict=True):
        assert ours.dtype == theirs.dtype
        tolerance = 2e-3 if ours.dtype == torch.float16 else 2e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_whole_unit_by_kernels(kernel_device: str, depth: int) -> None:
    torch.manual_seed(0)
    unit = unit_of(32, 112, 48, depth, groups="cycle", norm="layer").to(kernel_device)
    x, upstream = torch.randn(37, 32, device=kernel_device), torch.randn(37, 48, device=kernel_device)
    together = results(lambda x: in_one(unit, x, torch.float32, "kernel"), unit, x, upstream)
    for one, other in zip(together, results(unit, unit, x, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.fixture
def runs_in_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[DefineUnit, Tensor], bool]:
    """Whether a unit takes the one operation, on a device that has kernels."""
    module = sys.modules[DefineUnit.__module__]
    calls: list[Tensor] = []
    monkeypatch.setattr(module, "has_fused_kernels", lambda x: True)
    monkeypatch.setattr(module, "group_stack", lambda x, *given: calls.append(x) or group_stack(x, *given))

    def answer(unit: DefineUnit, x: Tensor) -> bool:
        calls.clear()
        unit(x)
        return bool(calls)

    return answer


@pytest.mark.parametrize("part", ["", ".linear", ".norm"])
def test_a_unit_with_a_hook_goes_layer_by_layer(runs_in_one: Callable[[DefineUnit, Tensor], bool], part: str) -> None:
    unit, x = unit_of(16, 48, 16, 3, norm="layer"), torch.randn(2, 16)
    assert not runs_in_one(unit, x)
    unit.prepare()
    assert runs_in_one(unit, x)
    unit.get_submodule(f"expansions.1{part}").register_forward_hook(lambda *given: None)
    unit.prepare()
    assert not runs_in_one(unit, x)


def test_a_unit_with_dropout_goes_layer_by_layer_in_training(
    runs_in_one: Callable[[DefineUnit, Tensor], bool],
) -> None:
    unit, x = unit_of(16, 48, 16, 3, dropout=0.1), torch.randn(2, 16)
    unit.prepare()
    assert not runs_in_one(unit, x)
    assert runs_in_one(unit.eval(), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "k", "m", "depth", "tokens"), [(256, 1024, 256, 3, 3700), (512, 1024, 512, 11, 999), (64, 96, 40, 4, 1)]
)
def test_under_autocast_it_is_as_near_to_float64_as_the_unit_layer_by_layer(
    n: int, k: int, m: int, depth: int, tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rules = {"groups": "cycle", "reach_expand_dim": False, "rounding": "down", "equalised": depth == 3}
    unit = unit_of(n, k, m, depth, norm="layer", **rules).cuda()
    x, upstream = torch.randn(tokens, n, device="cuda"), torch.randn(tokens, m, device="cuda").to(dtype)
    unit.prepare()
    assert not has_fused_kernels(x)

    def layer_by_layer(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype):
            return unit.layer_outputs(x)[-1]

    def together(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype):
            assert unit.fused
            assert has_fused_kernels(x)
            return unit(x)

    results(together, unit, x, upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        x_ = x.clone().requires_grad_()
        torch.autograd.grad(together(x_), [x_, *unit.parameters()], upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ours, again = (results(together, unit, x, upstream) for _ in range(2))
    theirs = results(layer_by_layer, unit, x, upstream)
    unit.double()
    exact = results(unit, unit, x.double(), upstream)
    close = {torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    for one, same, other, true in zip(ours, again, theirs, exact, strict=True):
        assert torch.equal(one, same)
        assert (one - true).norm() <= 1.5 * (other - true).norm() + 0.1 * close * true.norm()
        assert (one - true).norm() <= close * true.norm()
