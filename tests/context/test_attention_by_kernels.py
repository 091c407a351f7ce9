"""The way by our own kernels, here with their twin in plain torch, against the way by torch's fused attention."""

import pytest
import torch
from torch import Tensor

from torchdefine.context import TransformerXL, TransformerXLConfig, transformer_xl
from torchdefine.context.relative_attention import KernelSurroundings, Surroundings
from torchdefine.context.transformer_xl import Reach


def make(reach: Reach, dtype: torch.dtype = torch.float64, **more) -> TransformerXL:
    sizes = {"layers": 2, "heads": 2, "head_dim": 3, "inner_dim": 10}
    evaluation = {"eval_same_length": reach.same_length, "eval_clamp": reach.clamp}
    model = TransformerXL(6, TransformerXLConfig(**sizes | reach._asdict() | evaluation | more)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than they start, so that an error would show
            parameter.add_(torch.randn_like(parameter), alpha=0.4)
    model.prepare()
    return model


def run(model: TransformerXL, segments: list[Tensor]) -> Tensor:
    state = model.initial_state(segments[0].shape[0])
    outputs = []
    for segment in segments:
        output, state = model(segment, state)
        outputs.append(output)
    return torch.cat(outputs, 1)


def with_gradients(model: TransformerXL, segments: list[Tensor]) -> list[Tensor]:
    output = run(model, segments)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), [*model.parameters(), *segments])]


@pytest.fixture
def _kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_xl, "has_attention_kernel", lambda device, dtype, width: True)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize(
    "reach",
    [Reach(5), Reach(3), Reach(5, same_length=True), Reach(4, clamp=3), Reach(7, True, 2), Reach(1)],
    ids=str,
)
def test_both_ways_give_the_same_numbers_and_gradients(
    reach: Reach, pre_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(reach, pre_norm=pre_norm)
    segments = [torch.randn(2, length, 6, dtype=torch.float64, requires_grad=True) for length in (4, 3, 4)]
    expected = with_gradients(model, segments)
    monkeypatch.setattr(transformer_xl, "has_attention_kernel", lambda device, dtype, width: True)
    for one, other in zip(with_gradients(model, segments), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("_kernels_everywhere")
def test_kernels_are_taken_unless_shares_are_dropped_or_layers_compiled() -> None:
    x, filled = torch.randn(2, 4, 6), torch.zeros(1, dtype=torch.long)
    dropping = make(Reach(5), torch.float32, attention_dropout=0.1)
    assert isinstance(dropping.surroundings(x, 5, filled), Surroundings)
    assert isinstance(dropping.eval().surroundings(x, 5, filled), KernelSurroundings)
    model = make(Reach(5), torch.float32)
    assert isinstance(model.surroundings(x, 5, filled), KernelSurroundings)
    model.compile_layers()
    assert isinstance(model.surroundings(x, 5, filled), Surroundings)


@pytest.mark.usefixtures("_kernels_everywhere")
def test_autocast_reaches_what_surrounds_the_kernels() -> None:
    model = make(Reach(8), torch.float32)
    segments = [torch.randn(2, 8, 6, requires_grad=True) for _ in range(2)]
    exact = with_gradients(model, segments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = with_gradients(model, segments)
    for one, other in zip(rough, exact, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert (one - other).norm() <= 0.1 * other.norm()
    assert not torch.equal(rough[0], exact[0])


@pytest.mark.usefixtures("_kernels_everywhere")
def test_what_was_never_written_is_never_seen() -> None:
    model = make(Reach(6))
    memories, filled = model.initial_state(2)
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    spoilt = [torch.full_like(memory, 1e3) for memory in memories]
    torch.testing.assert_close(model(x, (spoilt, filled))[0], model(x, (memories, filled))[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reach", [Reach(50), Reach(40, same_length=True, clamp=30)], ids=str)
def test_kernels_in_a_model_stay_close_to_float64(reach: Reach, dtype: torch.dtype) -> None:
    model = TransformerXL(
        64, TransformerXLConfig(layers=2, heads=4, head_dim=17, inner_dim=128, **reach._asdict())
    ).cuda()
    model.prepare()
    segments = [torch.randn(3, 37, 64, device="cuda", requires_grad=True) for _ in range(2)]
    with torch.autocast("cuda", dtype):
        assert isinstance(model.surroundings(segments[0], 50, torch.zeros(1).cuda()), KernelSurroundings)
        ours = with_gradients(model, segments)
    exact = with_gradients(model.double(), [segment.detach().double().requires_grad_() for segment in segments])
    for one, other in zip(ours, exact, strict=True):
        assert (one.double() - other).norm() <= 0.1 * other.norm()


@pytest.mark.gpu
def test_no_step_by_kernels_waits_for_the_gpu() -> None:
    """Torch itself raises an error where something waits."""
    model = TransformerXL(
        32,
        TransformerXLConfig(
            layers=2,
            heads=2,
            head_dim=9,
            inner_dim=64,
            memory=16,
            input_dropout=0.1,
            hidden_dropout=0.1,
            output_dropout=0.1,
        ),
    ).cuda()
    model.prepare()
    x, state = torch.randn(2, 16, 32, device="cuda"), model.initial_state(2)
    for mode in ("default", "error"):  # the first step compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                output, state = model(x, state)
            output.float().square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert output.isfinite().all()
