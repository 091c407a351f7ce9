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
from torch.utils.checkpoint import checkpoint

from torchdefine.embedding import DefineUnit, UnitConfig
from torchdefine.ops import Impl, StackForm, StackLayer, group_stack, has_fused_kernels


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
    weight_scaling=st.booleans(),
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
    weight_scaling: bool,
    tokens: tuple[int, ...],
) -> None:
    n, k, m = (16 * chunk for chunk in chunks)
    m = k if variant == "define-no-reduce" else m
    rules = {} if variant in ("glt", "linear") else {"groups": scheme}
    options = {"norm": norm, "activation": activation, "bias": bias, "weight_scaling": weight_scaling}
    unit = unit_of(n, k, m, depth, variant, **options, **rules).double()
    x = torch.randn(*tokens, n, dtype=torch.float64)
    upstream = torch.randn(*tokens, m, dtype=torch.float64)
    apart = results(unit, unit, x, upstream)
    together = results(lambda x: in_one(unit, x, torch.float64), unit, x, upstream)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_second_derivatives_by_kernels_are_refused(kernel_device: str) -> None:
    unit = unit_of(16, 48, 16, 2).to(kernel_device)
    x = torch.randn(3, 16, device=kernel_device, requires_grad=True)
    output = in_one(unit, x, torch.float32, "kernel")
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


SEAMS = [
    # seen, mixed, activation, groups and chunk of a product, groups of the next
    (16, True, "gelu", 1, 32, 1),
    (16, True, "gelu", 4, 9, 2),  # chunks filled up on both sides
    (16, False, "silu", 2, 20, 4),  # the whole input before the whole output
    (0, True, "tanh", 16, 5, 8),  # nothing seen again
    (2, True, "relu", 1, 130, 2),
    (4, True, "none", 2, 520, 1),
]


@pytest.mark.usefixtures("_forgotten_memory_is_nan")
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
    kernel_device: str, seam: tuple[Any, ...], biased: bool, normed: bool, tokens: int, dtype: torch.dtype
) -> None:
    """Two seams: the first product's leads back to as many groups as it has, so that the input is seen twice."""
    seen, mixed, activation, groups, chunk, next_groups = seam
    torch.manual_seed(tokens)
    n, width = seen or 16, groups * chunk
    draw = lambda *shape: torch.randn(*shape, device=kernel_device).requires_grad_()  # noqa: E731

    def layer(groups: int, entering: int, leaving: int, last: bool = False) -> StackLayer:
        weight = (draw(groups, entering // groups, leaving // groups) / (entering // groups) ** 0.5).detach()
        bias = draw(leaving) if biased and not last else None
        norm = (draw(leaving), draw(leaving)) if normed and not last else None
        return StackLayer(weight.requires_grad_(), bias, norm)

    middle = groups if (width + seen) % groups == 0 and seen % groups == 0 else 1
    layers = [layer(1, n, width), layer(middle, width + seen, width), layer(next_groups, width + seen, 24, last=True)]
    form, x, upstream = StackForm(seen, mixed, activation, 1e-5), draw(tokens, n), draw(tokens, 24).detach()
    wanted = [x, *(t for weight, bias, norm in layers for t in (weight, bias, *(norm or ())) if t is not None)]
    made = []
    for impl in ("kernel", "torch"):
        output = group_stack(x, layers, form, dtype, impl)
        made.append((output, *torch.autograd.grad(output, wanted, upstream.to(output.dtype))))
    close = {torch.float32: 2e-5, torch.float16: 4e-3}[dtype]
    for ours, theirs in zip(*made, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= close * theirs.norm()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_whole_unit_by_kernels(kernel_device: str, depth: int) -> None:
    torch.manual_seed(0)
    unit = unit_of(32, 112, 48, depth, groups="cycle", norm="layer").to(kernel_device)
    x, upstream = torch.randn(37, 32, device=kernel_device), torch.randn(37, 48, device=kernel_device)
    together = results(lambda x: in_one(unit, x, torch.float32, "kernel"), unit, x, upstream)
    for one, other in zip(together, results(unit, unit, x, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    checkpointed = results(
        lambda x: checkpoint(in_one, unit, x, torch.float32, "kernel", use_reentrant=False), unit, x, upstream
    )
    for one, other in zip(together, checkpointed, strict=True):
        assert torch.equal(one, other)


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


def test_the_norm_of_the_output_follows_the_one_operation(runs_in_one: Callable[[DefineUnit, Tensor], bool]) -> None:
    unit, x = unit_of(16, 48, 16, 3, norm="layer", output_norm=True), torch.randn(2, 16)
    apart = unit(x)
    unit.prepare()
    with torch.autocast("cpu", torch.bfloat16):
        assert runs_in_one(unit, x)
        torch.testing.assert_close(unit(x).float(), apart, rtol=0.1, atol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("output_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "k", "m", "depth", "tokens"), [(256, 1024, 256, 3, 3700), (512, 1024, 512, 11, 999), (64, 96, 40, 4, 1)]
)
def test_under_autocast_it_is_as_near_to_float64_as_the_unit_layer_by_layer(
    n: int, k: int, m: int, depth: int, tokens: int, dtype: torch.dtype, output_norm: bool
) -> None:
    torch.manual_seed(0)
    rules = {"groups": "cycle", "reach_expand_dim": False, "rounding": "down", "weight_scaling": depth == 3}
    unit = unit_of(n, k, m, depth, norm="layer", output_norm=output_norm, **rules).cuda()
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
