import pytest
import torch

from torchdefine.errors import UserError
from torchdefine.tables import quantised_table
from torchdefine.tables.quantised import best_steps, nearest_codes, quantise_rows


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_matches_a_naive_loop(bits: int) -> None:
    x = torch.randn(13, 20).double().float()
    rows = quantise_rows(x, bits, group_size=8)
    half = (2**bits - 1) / 2
    naive = torch.empty_like(x)
    for row in range(13):
        for column in range(20):
            step = float(rows.steps[row, column // 8])
            code = min(max(round(float(x[row, column]) / step + half), 0), 2**bits - 1)
            naive[row, column] = (code - half) * step
    torch.testing.assert_close(rows.matrix(), naive, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_step_is_near_the_best_of_a_fine_search(bits: int) -> None:
    x = torch.randn(40, 32)
    half = (2**bits - 1) / 2

    def error(steps: torch.Tensor) -> torch.Tensor:
        levels = nearest_codes(x, steps.unsqueeze(-1), bits) - half
        return (x - levels * steps.unsqueeze(-1)).square().sum(-1)

    largest = x.abs().amax(-1) / half
    best = torch.stack([error(largest * clip) for clip in torch.linspace(0.2, 1.2, 500).tolist()]).amin(0)
    assert error(best_steps(x, bits)).mean() < 1.03 * best.mean()


@pytest.mark.parametrize("bits", [4, 8])
def test_loses_no_more_than_torchao(bits: int) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    x = torch.randn(256, 64)
    kinds = {4: quantization.Int4WeightOnlyConfig, 8: quantization.Int8WeightOnlyConfig}
    linear = torch.nn.Linear(64, 256, bias=False)
    linear.weight = torch.nn.Parameter(x.clone())
    try:
        if bits == 8:
            quantization.quantize_(linear, kinds[8]())
        else:
            config = quantization.IntxWeightOnlyConfig
            quantization.quantize_(linear, config(torch.int4, quantization.PerGroup(32)))
    except (AttributeError, ImportError, NotImplementedError) as error:
        pytest.skip(f"this torchao cannot do it here: {error}")
    theirs = (linear(torch.eye(64)).T - x).square().mean()
    ours = (quantised_table(x, bits, 32 if bits == 4 else 64)(torch.arange(256)) - x).square().mean()
    assert ours < theirs


def test_progress_reaches_its_total() -> None:
    calls: list[tuple[int, int]] = []
    quantise_rows(torch.randn(9000, 4), 4, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(8192, 9000), (9000, 9000)]


def test_a_table_whose_steps_float16_would_lose_is_refused() -> None:
    table = torch.randn(40, 16)
    with pytest.raises(UserError, match=r"as small as .*, which float16 cannot hold"):
        quantised_table(1e-7 * table, 8)
    quantised_table(0 * table, 8)  # nothing is lost of nothing
