import pytest
import torch
from torch import nn

from torchdefine.errors import UserError
from torchdefine.tables import DenseRows, UnitFitting, svd_table, unit_table
from torchdefine.tables.fitted_unit import UnitRows, _train, start_as_projection, unit_config
from torchdefine.tables.source import as_weights


def curved(rows: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows on a curved sheet of eight dimensions: what a unit can follow and a projection cannot."""
    generator = torch.Generator().manual_seed(2)
    small = torch.randn(rows, 8, generator=generator)
    features = torch.cat((small, small.relu(), small**2 / 2), dim=-1)
    return features @ torch.randn(24, 32, generator=generator), 1e4 / (1 + torch.arange(rows))


def lost(table, matrix: torch.Tensor, counts: torch.Tensor) -> float:
    error = (table(torch.arange(len(matrix))) - matrix).square().sum(-1)
    return float((error * as_weights(counts, matrix)).sum())


@pytest.mark.parametrize("unit", ["define", "mlp"])
@pytest.mark.parametrize(("map_dim", "width"), [(8, 32), (12, 20), (4, 6)])
def test_a_unit_starts_as_the_projection(unit: str, map_dim: int, width: int) -> None:
    made = UnitRows(DenseRows(3, map_dim), unit_config(unit, map_dim, width)).unit
    projection, x = torch.randn(map_dim, width), torch.randn(50, map_dim)
    start_as_projection(made, projection)
    torch.testing.assert_close(made(x), x @ projection, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unit", ["define", "mlp"])
def test_fitting_beats_the_svd_it_starts_from(unit: str) -> None:
    table, counts = curved()
    svd = lost(svd_table(table, 8, counts=counts), table, counts)
    calls: list[tuple[int, int]] = []
    fitting = UnitFitting(steps=250, batch_size=256, lr=3e-3)
    made = unit_table(
        table, unit, 8, counts=counts, fitting=fitting, progress=lambda done, total: calls.append((done, total))
    )
    assert lost(made, table, counts) < 0.7 * svd
    assert calls[-1] == (250, 250)
    torch.manual_seed(99)  # the seed is that of the fitting
    before = torch.get_rng_state()
    again = unit_table(table, unit, 8, counts=counts, fitting=fitting)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(tensor, made.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert sum(p.numel() for p in again.parameters()) == again.num_values
    assert not any(parameter.requires_grad for parameter in made.parameters())


class Constant(nn.Module):
    """A unit that gives one vector for all rows, so the best that it can learn is their weighted mean."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.vector.expand(len(x), 1)


def test_rows_that_are_drawn_too_often_count_for_less() -> None:
    rows, weights = torch.ones(1_001, 1), torch.full((1_001,), 0.5 / 1_000)
    rows[0], weights[0] = 0.0, 0.5  # one row is as heavy as all others together
    unit, small = Constant(), nn.Parameter(torch.zeros(1_001, 1))
    _train(small, unit, rows, torch.eye(1), weights, UnitFitting(steps=200, batch_size=256, lr=0.03), None)
    assert float(unit.vector) == pytest.approx(0.5, abs=0.05)


def test_a_packed_small_table_is_smaller_and_near() -> None:
    table, counts = curved()
    whole, packed = (
        unit_table(table, "mlp", 8, counts=counts, fitting=UnitFitting(steps=100, storage=storage))
        for storage in ("float32", "int8")
    )
    assert packed.stored_bytes < 0.6 * whole.stored_bytes
    assert lost(packed, table, counts) < 1.5 * lost(whole, table, counts)


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(UserError, match="'magic'"):
        unit_table(torch.randn(20, 8), "magic", 4, counts=torch.ones(20))
