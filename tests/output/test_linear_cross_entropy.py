import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torchdefine.errors import UserError
from torchdefine.output import linear_cross_entropy

IGNORED = -100


def problem(
    tokens: int, vocabulary: int, width: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden, weight, bias that want gradients, and targets of which about a quarter do not count."""
    targets = torch.randint(0, vocabulary, (tokens,))
    targets[torch.rand(tokens) < 0.25] = IGNORED
    inputs = (torch.randn(tokens, width), torch.randn(vocabulary, width) / width**0.5, torch.randn(vocabulary))
    hidden, weight, bias = (given.to(dtype).requires_grad_() for given in inputs)
    return hidden, weight, bias, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, **options)


def value_and_gradients(
    function: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor, Tensor], **options: Any
) -> tuple[Tensor, ...]:
    hidden, weight, bias, targets = inputs
    loss = function(hidden, weight, targets, bias, **options)
    incoming = torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype, device=loss.device).reshape(loss.shape)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias), incoming)


def assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], tolerance: float) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance, equal_nan=True)


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 40),
    vocabulary=st.integers(1, 30),
    width=st.integers(1, 9),
    tokens_at_once=st.integers(1, 50),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 1000),
)
def test_equals_torch(
    tokens: int, vocabulary: int, width: int, tokens_at_once: int, reduction: str, label_smoothing: float, seed: int
) -> None:
    torch.manual_seed(seed)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    inputs = problem(tokens, vocabulary, width)
    ours = value_and_gradients(linear_cross_entropy, inputs, tokens_at_once=tokens_at_once, **options)
    assert_same(ours, value_and_gradients(plain, inputs, **options), 1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("vocabulary", "width"), [(1, 1), (16, 9), (19, 8), (33, 5)])
def test_columns_and_features_that_fill_up_for_a_gpu_change_nothing(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, width: int, reduction: str, label_smoothing: float
) -> None:
    file = sys.modules[linear_cross_entropy.__module__]
    monkeypatch.setattr(file, "_aligned_shape", lambda weight: file.aligned_shape(*weight.shape))
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    inputs = problem(30, vocabulary, width)
    with Operations() as operations:
        ours = value_and_gradients(linear_cross_entropy, inputs, tokens_at_once=16, **options)
    assert_same(ours, value_and_gradients(plain, inputs, **options), 1e-10)
    columns, _ = file.aligned_shape(vocabulary, width)
    assert operations.largest >= 16 * columns  # the longer rows were really there
    unbiased = [
        torch.autograd.grad(f(*inputs[:2], inputs[3], **options).sum(), inputs[:2])
        for f in (plain, linear_cross_entropy)
    ]
    assert_same(*unbiased, 1e-10)


def test_shapes_are_filled_up_to_what_products_like() -> None:
    file = sys.modules[linear_cross_entropy.__module__]
    assert file.aligned_shape(20_003, 128) == (20_016, 128)
    assert file.aligned_shape(160_000, 2) == (160_000, 8)
    assert file._aligned_shape(torch.empty(19, 5)) == (19, 5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_equals_torch_in_float32(reduction: str) -> None:
    inputs = problem(70, 50, 16, torch.float32)
    ours = value_and_gradients(linear_cross_entropy, inputs, reduction=reduction, tokens_at_once=32)
    assert ours[0].dtype == torch.float32
    assert_same(ours, value_and_gradients(plain, inputs, reduction=reduction), 2e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_no_token_counts(reduction: str, label_smoothing: float) -> None:
    *inputs, targets = problem(7, 5, 3)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    for kept in (0, 7):
        cut = (inputs[0][:kept], inputs[1], inputs[2], torch.full_like(targets, IGNORED)[:kept])
        ours = value_and_gradients(linear_cross_entropy, cut, **options)
        if kept:
            assert_same(ours, value_and_gradients(plain, cut, **options), 1e-10)
        assert not any(gradient.any() for gradient in ours[1:])
    assert bool(ours[0].isnan().all()) == (reduction == "mean")


def test_an_ignored_id_inside_the_vocabulary() -> None:
    inputs = problem(30, 6, 3)
    inputs[-1].clamp_(0)
    ours = value_and_gradients(linear_cross_entropy, inputs, ignore_index=0, tokens_at_once=8)
    assert_same(ours, value_and_gradients(plain, inputs, ignore_index=0), 1e-10)


def test_a_forbidden_token_leaves_ignored_ones_alone() -> None:
    hidden, weight, bias, targets = problem(9, 5, 3)
    forbidding = bias.detach().clone()
    forbidding[0] = -torch.inf  # the column that stands in for an ignored target
    targets = torch.where(targets == 0, 1, targets)
    loss = linear_cross_entropy(hidden, weight, targets, forbidding)
    torch.testing.assert_close(loss, plain(hidden, weight, targets, forbidding))


def test_without_bias_and_with_a_frozen_weight() -> None:
    hidden, weight, _, targets = problem(20, 11, 4)
    weight.requires_grad_(False)
    (ours,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden)
    (theirs,) = torch.autograd.grad(plain(hidden, weight, targets), hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_can_be_repeated_but_not_differentiated(reduction: str) -> None:
    hidden, weight, bias, targets = problem(20, 11, 4)
    loss = linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction).sum()
    (once,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, weight, retain_graph=True)
    assert torch.equal(once, twice)
    with pytest.raises(RuntimeError, match="no second derivatives: use"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_is_no_worse_than_torch(reduction: str, autocast: bool, device: str) -> None:
    exact = problem(300, 43, 30)
    dtype = torch.float32 if autocast else torch.bfloat16
    inputs = [given.detach().bfloat16().to(device, dtype).requires_grad_() for given in exact[:3]]
    targets = exact[3].to(device)
    truth_inputs = [given.detach().double().requires_grad_() for given in inputs]
    truth = value_and_gradients(plain, (*truth_inputs, targets), reduction=reduction)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        theirs = value_and_gradients(plain, (*inputs, targets), reduction=reduction)
        ours = value_and_gradients(linear_cross_entropy, (*inputs, targets), reduction=reduction, tokens_at_once=64)
    assert ours[0].dtype == torch.float32
    assert all(gradient.dtype == dtype for gradient in ours[1:])
    for mine, reference, true in zip(ours, theirs, truth, strict=True):
        size = true.norm()
        assert (mine.double() - true).norm() / size <= (reference.double() - true).norm() / size + 5e-4


def test_the_weight_gradient_adds_up_in_float32() -> None:
    """Each chunk adds the same small number, which bfloat16 would soon stop noticing."""
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(4096, dtype=torch.long)
    linear_cross_entropy(hidden, weight, targets, reduction="sum", tokens_at_once=1).backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [-2048.0, 2048.0]


class Operations(TorchDispatchMode):
    """Remembers the names of the operations and the size of the largest tensor that any of them gave."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
        return out


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_the_logits_never_exist(reduction: str) -> None:
    inputs = problem(200, 300, 4)
    sizes = {}
    for function, options in ((plain, {}), (linear_cross_entropy, {"tokens_at_once": 16})):
        with Operations() as operations:
            value_and_gradients(function, inputs, reduction=reduction, label_smoothing=0.1, **options)
        sizes[function] = operations.largest
    assert sizes == {plain: 200 * 300, linear_cross_entropy: 16 * 300}


def test_evaluation_works_out_no_gradient() -> None:
    hidden, weight, bias, targets = problem(3, 50, 40)
    with torch.no_grad(), Operations() as operations:
        loss = linear_cross_entropy(hidden, weight, targets, bias)
        assert "scatter_add_" not in operations.names
        torch.testing.assert_close(loss, plain(hidden, weight, targets, bias))
    with Operations() as operations:
        linear_cross_entropy(hidden, weight, targets, bias)
    assert "scatter_add_" in operations.names


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_whole(reduction: str) -> None:
    inputs = problem(30, 11, 4)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    options = {"reduction": reduction, "tokens_at_once": 16}
    ours = value_and_gradients(compiled, inputs, **options)
    assert_same(ours, value_and_gradients(linear_cross_entropy, inputs, **options), 1e-10)


def test_bad_arguments_are_refused() -> None:
    hidden, weight, bias, targets = problem(6, 5, 3)
    cases: dict[str, Callable[[], Tensor]] = {
        "'average' is unknown: use mean, sum or none": lambda: linear_cross_entropy(
            hidden,
            weight,
            targets,
            reduction="average",  # type: ignore[arg-type]
        ),
        "label_smoothing is 1.5": lambda: linear_cross_entropy(hidden, weight, targets, label_smoothing=1.5),
        "tokens_at_once is 0": lambda: linear_cross_entropy(hidden, weight, targets, tokens_at_once=0),
        r"must be \(T, d\) and \(V, d\)": lambda: linear_cross_entropy(hidden[:, :2], weight, targets),
        "one id for each of the 6 rows": lambda: linear_cross_entropy(hidden, weight, targets[:5]),
        "one number for each of 5 rows": lambda: linear_cross_entropy(hidden, weight, targets, bias[:4]),
        "convert one, or use autocast": lambda: linear_cross_entropy(hidden.float(), weight, targets),
        "The id 5 is outside": lambda: linear_cross_entropy(hidden, weight, torch.full((6,), 5)),
    }
    for message, call in cases.items():
        with pytest.raises(UserError, match=message):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("vocabulary", "width"), [(1000, 64), (20_003, 126)])
def test_the_gpu_agrees_and_nobody_waits_for_it(
    dtype: torch.dtype, reduction: str, vocabulary: int, width: int
) -> None:
    exact = problem(700, vocabulary, width)
    inputs = [given.detach().to("cuda", dtype).requires_grad_() for given in exact[:3]]
    targets = exact[3].cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(
            inputs[0], inputs[1], targets, inputs[2], reduction=reduction, label_smoothing=0.1, tokens_at_once=256
        )
        gradients = torch.autograd.grad(loss.sum(), inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    truth = [given.detach().cpu().double().requires_grad_() for given in inputs]
    true_loss = plain(truth[0], truth[1], exact[3], truth[2], reduction=reduction, label_smoothing=0.1).sum()
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    for ours, true in zip(gradients, torch.autograd.grad(true_loss, truth), strict=True):
        assert (ours.cpu().double() - true).norm() <= tolerance * true.norm()
    assert abs(loss.sum().item() - true_loss.item()) <= tolerance * true_loss.item()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_bias_may_be_a_column_of_something_else(device: str) -> None:
    matrix = torch.randn(64, 9, device=device)
    hidden, targets = torch.randn(5, 8, device=device), torch.randint(64, (5,), device=device)
    losses = linear_cross_entropy(hidden, matrix[:, :-1], targets, matrix[:, -1], reduction="none")
    expected = F.cross_entropy(hidden @ matrix[:, :-1].T + matrix[:, -1], targets, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_targets_may_be_of_any_whole_number_type(dtype: torch.dtype) -> None:
    """In uint8, -100 is 156, which is a token like any other."""
    hidden, weight = torch.randn(200, 6, dtype=torch.float64), torch.randn(300, 6, dtype=torch.float64)
    targets = torch.arange(200)
    expected = F.cross_entropy(hidden @ weight.T, targets)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets.to(dtype)), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sums_over_many_tokens_do_not_overflow_in_float16(device: str) -> None:
    """Whatever the loss is scaled by, a sum that is too large for float16 could never be saved."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(16_384, 16) + 8, 0.02 * torch.randn(64, 16)
    targets = torch.randint(64, (16_384,))
    targets[::2] = 0
    exact = weight.double().requires_grad_()
    F.cross_entropy(F.linear(hidden.double(), exact), targets).backward()
    given = weight.to(device).requires_grad_()
    with torch.autocast(device, dtype=torch.float16):
        loss = linear_cross_entropy(hidden.to(device), given, targets.to(device))
    (loss * 1024).backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad.cpu().double() / 1024, exact.grad, rtol=1e-2, atol=1e-3)
