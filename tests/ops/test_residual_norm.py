import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.philox import drawn_mask
from torch import Tensor, nn
from torch.nn import functional as F

from torchdefine.ops import has_fused_kernels, kernel_gate, relu_dropout, residual_norm
from torchdefine.ops.dropout import Kept, kept_features
from torchdefine.ops.residual_norm import plain_residual_norm


def norm_of(width: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> nn.LayerNorm:
    norm = nn.LayerNorm(width, eps=1e-4).to(device, dtype)
    with torch.no_grad():
        norm.weight.add_(torch.randn_like(norm.weight), alpha=0.3)
        norm.bias.add_(torch.randn_like(norm.bias))
    return norm


def step_by_step(
    x: Tensor, update: Tensor, norm: nn.LayerNorm, mask: Tensor | None, keep: float, pre: bool
) -> tuple[Tensor, Tensor]:
    total = x + (update if mask is None else update * mask / keep)
    normed = F.layer_norm(total, total.shape[-1:], norm.weight, norm.bias, norm.eps)
    return (total, normed) if pre else (normed, normed)


@settings(max_examples=60)
@given(
    rows=st.integers(0, 7),
    width=st.integers(1, 20),
    p=st.sampled_from([0.0, 0.3]),
    pre=st.booleans(),
    used=st.sampled_from([(1, 1), (1, 0), (0, 1)]),
    seed=st.integers(0, 1000),
)
def test_plain_torch_equals_its_parts_in_float64_with_gradients(
    rows: int, width: int, p: float, pre: bool, used: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    norm, shift = norm_of(width), torch.randn(width, dtype=torch.float64, requires_grad=True)
    x, raw = (torch.randn(2, rows, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.manual_seed(seed)
    ours = residual_norm(x, raw, norm, p, pre=pre, update_bias=shift)
    torch.manual_seed(seed)
    mask = kept_features(raw, p, by_kernels=False).by
    theirs = step_by_step(x, raw + shift, norm, mask if mask is None else mask.view_as(raw), 1 - p, pre)
    inputs = (x, raw, norm.weight, norm.bias, shift)
    upstream = [torch.randn_like(x) for _ in ours]
    results = []
    for outputs in (ours, theirs):
        kept = [(output * weight).sum() for output, weight, use in zip(outputs, upstream, used, strict=True) if use]
        results.append((*outputs, *torch.autograd.grad(sum(kept), inputs, materialize_grads=True)))
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)


def test_the_stream_keeps_its_precision_and_products_get_theirs() -> None:
    norm = norm_of(6, torch.float32)
    x = torch.randn(3, 6, dtype=torch.bfloat16, requires_grad=True)
    update = torch.randn(3, 6, dtype=torch.bfloat16, requires_grad=True)
    past, read = residual_norm(x, update, norm)
    assert (past.dtype, read.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(past.to(torch.bfloat16), read)
    gradients = torch.autograd.grad(past.sum() + read.sum(), (x, update, norm.weight))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_second_derivatives_by_kernels_are_refused(kernel_device: str) -> None:
    x = torch.randn(3, 6, device=kernel_device, requires_grad=True)
    norm = norm_of(6, torch.float32, kernel_device)
    for result in (residual_norm(x, x, norm, impl="kernel")[0], relu_dropout(x, impl="kernel")):
        (gradient,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


def test_the_cpu_has_no_kernels() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert not has_fused_kernels(torch.empty(2, 4))


def by_both(
    x: Tensor,
    update: Tensor,
    shift: Tensor | None,
    seeded: Kept,
    incoming: tuple[Tensor | None, Tensor | None],
    pre: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients by kernels and by plain torch, which drops the same features."""
    from torchdefine.ops.residual_norm_kernels import ResidualNorm

    width = x.shape[-1]
    norm, rows = norm_of(width, torch.float32, x.device.type), x.numel() // width
    known = seeded if seeded.by is None else seeded._replace(by=drawn_mask(seeded.by, rows, width, seeded.probability))
    inputs = [x, update, norm.weight, norm.bias, *([] if shift is None else [shift])]
    for tensor in inputs:
        tensor.requires_grad_()
    results = []
    for outputs in (
        ResidualNorm.apply(x, update, norm.weight, norm.bias, shift, *seeded, norm.eps, pre),
        plain_residual_norm(x, update, norm, pre, shift, known),
    ):
        used = [(output, given) for output, given in zip(outputs, incoming, strict=True) if given is not None]
        gradients = torch.autograd.grad([output for output, _ in used], inputs, [given for _, given in used])
        results.append([*outputs, *gradients])
    return results[0], results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("rows", "width", "masked"), [(1, 1, False), (9, 7, True), (37, 384, True), (3, 2100, False)])
def test_kernels_give_the_numbers_of_plain_torch(
    kernel_device: str, rows: int, width: int, masked: bool, both: bool, pre: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(rows, width, device=kernel_device)
    update = torch.randn_like(x).to(dtype)
    seeded = kept_features(update, 0.2 if masked else 0.0, by_kernels=True)
    shift = torch.randn(width, device=kernel_device) if both else None
    incoming = (torch.randn_like(x) if both or pre else None, torch.randn_like(x).to(dtype))
    for ours, theirs in zip(*by_both(x, update, shift, seeded, incoming, pre), strict=True):
        assert ours.dtype == theirs.dtype
        tolerance = 2e-3 if ours.dtype == torch.float16 else 2e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_more_rows_than_programs_take_turns(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchdefine.ops import residual_norm_kernels as kernels

    monkeypatch.setattr(kernels, "MOST_PROGRAMS", 2)
    x = torch.randn(90, 5, device=kernel_device)
    found, expected = by_both(x, torch.randn_like(x), None, Kept(None, 1.0), (torch.randn_like(x), None), False)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("pre", [False, True])
def test_gradients_are_read_where_they_lie(kernel_device: str, pre: bool) -> None:
    """What comes back from a segment behind its memory is part of a larger tensor; other gradients come expanded."""
    longer = torch.randn(3, 7, 16, device=kernel_device)
    for read in (longer[:, 3:], longer[:, :3].transpose(0, 1), longer[0, 0].expand(3, 4, 16)):
        x = torch.randn(*read.shape, device=kernel_device)
        past = torch.randn(*read.transpose(0, 1).shape, device=kernel_device).transpose(0, 1)
        update = torch.randn_like(x)
        for ours, theirs in zip(*by_both(x, update, None, Kept(None, 1.0), (past, read), pre), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("by_kernels", [False, True])
def test_backward_keeps_what_forward_kept_whatever_the_gate_says_by_then(
    kernel_device: str, by_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with several GPUs, the current one may differ between the two."""
    x, update = torch.zeros(40, 24, device=kernel_device), torch.ones(40, 24, device=kernel_device, requires_grad=True)
    monkeypatch.setattr(kernel_gate, "kernels_run", lambda like: by_kernels)
    total, _ = residual_norm(x, update, norm_of(24, torch.float32, kernel_device), 0.5, pre=True)
    monkeypatch.setattr(kernel_gate, "kernels_run", lambda like: not by_kernels)
    (gradient,) = torch.autograd.grad(total.sum(), update)
    assert 0 < (total != 0).sum() < total.numel()
    assert torch.equal(gradient, total)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(9000, 384), (4096, 512), (333, 410), (17, 41)])
def test_kernels_equal_float64_to_half_precision_and_always_give_the_same_bits(
    rows: int, width: int, pre: bool, dtype: torch.dtype
) -> None:
    norm = norm_of(width, torch.float32, "cuda")
    shift = torch.randn(width, device="cuda", requires_grad=True)
    x = torch.randn(rows, width, device="cuda", requires_grad=True)
    raw = torch.randn(rows, width, device="cuda").to(dtype).requires_grad_()
    upstream = [torch.randn_like(x), torch.randn_like(x)]
    results = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            torch.manual_seed(3)
            past, read = residual_norm(x, raw, norm, 0.1, pre=pre, update_bias=shift)
            objective = (past * upstream[0]).sum() + (read.float() * upstream[1]).sum()
            results.append([past, read, *torch.autograd.grad(objective, (x, raw, norm.weight, norm.bias, shift))])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for once, twice in zip(*results, strict=True):
        assert torch.equal(once, twice)
    torch.manual_seed(3)
    seed, share = kept_features(raw, 0.1, by_kernels=True)
    assert seed is not None
    mask = drawn_mask(seed, rows, width, share)
    exact = copy.deepcopy(norm).double()
    inputs = [t.detach().double().requires_grad_() for t in (x, raw, shift)]
    past, read = step_by_step(inputs[0], inputs[1] + inputs[2], exact, mask, share, pre)
    objective = (past * upstream[0]).sum() + (read * upstream[1]).sum()
    wanted = (*inputs[:2], exact.weight, exact.bias, inputs[2])
    for ours, true in zip(results[0], (past, read, *torch.autograd.grad(objective, wanted)), strict=True):
        close = {torch.float32: 3e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}[ours.dtype]
        assert (ours.double() - true).norm() <= close * true.norm()


@pytest.mark.gpu
def test_replayed_graphs_draw_new_masks() -> None:
    norm = norm_of(64, torch.float32, "cuda")
    x, update = torch.zeros(128, 64, device="cuda"), torch.ones(128, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        residual_norm(x, update, norm, 0.5, pre=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total, _ = residual_norm(x, update, norm, 0.5, pre=True)
    sums = []
    for _ in range(2):
        graph.replay()
        sums.append(total.clone())
    assert not torch.equal(*sums)
    assert set(sums[1].unique().tolist()) == {0.0, 2.0}
