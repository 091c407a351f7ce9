"""Tables that are trained in few bits: what every reader sees, what learns, and what is stored of it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchdefine import DeFINE, HostMap, load_run, train
from torchdefine.embedding import ProjectiveMap, StandardMap
from torchdefine.embedding.define import map_from_config
from torchdefine.embedding.few_bits import STEPS, rounded
from torchdefine.errors import UserError
from torchdefine.output import FullSoftmax
from torchdefine.tables import load_table, quantised_table


def naive(rows: Tensor, bits: int) -> Tensor:
    """Number by number: the nearest of 2^bits levels around zero."""
    found = torch.zeros_like(rows)
    for r, row in enumerate(rows.tolist()):
        size = sum(abs(x) for x in row) / len(row) if bits == 1 else (sum(x * x for x in row) / len(row)) ** 0.5
        step = float(torch.tensor(2 * size if bits == 1 else STEPS[bits] * size, dtype=torch.float16))
        levels = [(code - (2**bits - 1) / 2) * step for code in range(2**bits)]
        for c, x in enumerate(row):
            found[r, c] = min(levels, key=lambda level: abs(level - x))
    return found


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_rounding_is_that_of_a_loop_and_gradients_pass_it(bits: int) -> None:
    rows = torch.randn(5, 7, dtype=torch.float64).requires_grad_(True)
    seen = rounded(rows, bits)
    torch.testing.assert_close(seen.detach(), naive(rows.detach(), bits), rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(seen)
    assert torch.equal(torch.autograd.grad(seen, rows, cotangent)[0], cotangent)


def test_one_bit_is_the_sign_times_the_mean_magnitude() -> None:
    rows = torch.tensor([[0.5, -1.5, 1.0, -1.0]])
    assert torch.equal(rounded(rows, 1), torch.tensor([[1.0, -1.0, 1.0, -1.0]]))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_steps_lose_least_of_normal_numbers(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, lost = torch.randn(50, 2_000), {}
    for factor in (0.9, 1.0, 1.1):
        monkeypatch.setitem(STEPS, bits, {2: 0.9957, 3: 0.5860, 4: 0.3352}[bits] * factor)
        lost[factor] = float((rounded(rows, bits) - rows).square().mean())
    assert min(lost, key=lost.get) == 1.0
    assert lost[1.0] == pytest.approx({2: 0.1188, 3: 0.03744, 4: 0.01154}[bits], rel=0.02)  # Max, 1960


@pytest.mark.parametrize("kind", ["standard", "projective"])
def test_a_map_shows_the_same_rows_to_those_that_look_up_and_to_a_tied_output(kind: str) -> None:
    build = {
        "standard": lambda **kw: StandardMap(50, 16, **kw),
        "projective": lambda **kw: ProjectiveMap(50, 16, 24, **kw),
    }
    layer = build[kind](scale=3.0, padding_idx=4, bits=2)
    read = layer(torch.arange(50))
    behind = layer.projection if kind == "projective" else torch.nn.Identity()
    torch.testing.assert_close(read, behind(layer.compared()) * 3.0)
    assert layer.compared()[7].unique().numel() <= 4 < layer.table.weight[7].unique().numel()
    assert not read[4].any()
    assert FullSoftmax(16, layer, bias=False).weight.equal(layer.compared())
    again = map_from_config(layer.to_config())
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(torch.arange(50)), read)
    layer.resize(60)
    assert torch.equal(layer(torch.arange(50)), read)


def test_a_table_in_few_bits_saves_and_loads_behind_a_unit(tmp_path: Path) -> None:
    embedding = DeFINE.over(StandardMap(50, 16, bits=1), 24, expand_dim=32, depth=2).eval()
    embedding.save(tmp_path)
    assert torch.equal(DeFINE.load(tmp_path).eval()(torch.arange(50)), embedding(torch.arange(50)))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [1.0, 2.7])
def test_it_is_stored_exactly_as_it_was_trained(bits: int, scale: float, tmp_path: Path) -> None:
    layer = StandardMap(90, 12, scale=scale, padding_idx=3, bits=bits)
    table = quantised_table(layer(torch.arange(90)).detach(), 4, padding_idx=3)
    assert table.stored_bytes <= 90 * (-(-12 * bits // 8) + 1 + 2) + 4 * 12
    table.save(tmp_path / "table")
    for made in (table, load_table(tmp_path / "table")):
        assert torch.equal(made(torch.arange(90)), layer(torch.arange(90)))


def test_a_run_learns_in_two_bits_and_is_cached_and_compressed_as_it_learned(recipe_file: Path, tmp_path: Path) -> None:
    few = {"kind": "standard", "map_dim": 16, "bits": 2}
    parts = {"unit": {"kind": "none"}, "output": {"kind": "full"}, "context": {"layers": 1, "output_dim": 16}}
    run = train(recipe_file, out=tmp_path / "run", embedding=few, train={"steps": 80}, optim={"lr": 0.02}, **parts)
    rows = run.embedding.table()
    assert all(len(row.unique()) <= 4 for row in rows)
    assert run.result["test_perplexity"] < run.result["test_unigram_perplexity"]
    run.cache()
    (packed,) = run.compress("int").values()
    assert packed.lost == 0
    assert packed.bytes < rows.numel() * 4 / 6
    exact = load_run(tmp_path / "run").evaluate("test").perplexity
    for way in ({"cached": True}, {"compressed": True}):
        again = load_run(tmp_path / "run", **way)
        assert torch.equal(again.embedding(torch.arange(len(rows))), rows)
        assert again.evaluate("test").perplexity == exact


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="trained in 5 bits: use 1 to 4"):
        StandardMap(50, 16, bits=5)
    with pytest.raises(UserError, match="this table learns in 2 bits"):
        HostMap(StandardMap(50, 16, bits=2), 20)


@pytest.mark.slow
def test_its_exported_program_looks_up_the_rounded_rows(recipe_file: Path, tmp_path: Path) -> None:
    few = {"kind": "standard", "map_dim": 16, "bits": 1}
    parts = {"unit": {"kind": "none"}, "output": {"kind": "full"}, "context": {"layers": 1, "output_dim": 16}}
    run = train(recipe_file, out=tmp_path / "run", embedding=few, train={"steps": 10}, **parts)
    run.export(tmp_path / "exported")  # refuses a program that gives other numbers than the model
    assert run.embedding.map.bits == 1
