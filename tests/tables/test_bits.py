import itertools

import pytest
import torch

from torchdefine.errors import UserError
from torchdefine.tables import svd_table, transform_table
from torchdefine.tables.bits import LADDERS, TRANSFORM_POWER, allocate, band_edges, metric
from torchdefine.tables.low_rank import FactorisedRows
from torchdefine.tables.source import as_weights
from torchdefine.tables.trellis import TrellisRows


def zipfian(rows: int = 1_500, width: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    """A table whose columns share much variance, and counts as words have them, in no order."""
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(width, width, generator=generator) * torch.logspace(0, -1.5, width)[:, None]
    table = torch.randn(rows, width, generator=generator) @ mixing + 0.2
    counts = (1e5 / (1 + torch.arange(rows)))[torch.randperm(rows, generator=generator)].round()
    return table, counts


def lost(table, matrix: torch.Tensor, counts: torch.Tensor, felt: torch.Tensor | None = None) -> float:
    error = table(torch.arange(len(matrix))) - matrix
    error = error if felt is None else error @ felt
    return float((error.square().sum(-1) * as_weights(counts, matrix, TRANSFORM_POWER)).sum())


def test_allocation_is_the_best_of_all() -> None:
    importance = torch.tensor([[4.0, 1.0], [0.5, 0.1]])
    rows, ladder = torch.tensor([2, 5]), ((0.0, 1.0, 2.0, 3.0), (1.0, 0.29, 0.08, 0.02))
    for budget in (3, 9, 14, 25):
        steps = allocate(importance, rows, ladder, budget)

        def loss_and_price(chosen: torch.Tensor) -> tuple[float, int]:
            share = torch.tensor(ladder[1])[chosen]
            return float((importance * share * rows[:, None]).sum()), int((chosen * rows[:, None]).sum())

        loss, price = loss_and_price(steps)
        assert price <= budget
        every = (torch.tensor(c).reshape(2, 2) for c in itertools.product(range(4), repeat=4))
        better = [c for c in every if (lp := loss_and_price(c))[1] <= price and lp[0] < loss - 1e-9]
        assert not better  # nothing does better for what was spent


@pytest.mark.parametrize("storage", ["mixed", *LADDERS])
@pytest.mark.parametrize("share", [0.2, 0.05])
def test_the_budget_is_kept_and_nearly_spent(storage: str, share: float) -> None:
    table, counts = zipfian()
    budget = int(share * table.numel() * 4)
    made = transform_table(table, budget, counts=counts, storage=storage)
    assert 0.75 * budget < made.stored_bytes <= budget
    assert isinstance(made.rows, FactorisedRows)


def test_rows_that_stand_in_order_spend_nothing_on_their_places() -> None:
    table, counts = zipfian()
    order = torch.argsort(counts, descending=True, stable=True)
    budget = table.numel() // 2
    in_order = transform_table(table[order], budget, counts=counts[order])
    mixed_up = transform_table(table, budget, counts=counts)
    assert 0.95 * budget < in_order.stored_bytes <= budget
    assert not any(name.endswith("band_of") for name in in_order.state_dict())
    assert any(name.endswith("band_of") for name in mixed_up.state_dict())


def test_more_bytes_lose_less_and_importance_beats_evenness() -> None:
    table, counts = zipfian()
    losses = [lost(transform_table(table, size, counts=counts), table, counts) for size in (12_000, 20_000, 40_000)]
    assert losses[0] > losses[1] > losses[2]
    even = svd_table(table, 24, counts=counts, storage="int4")
    hybrid = svd_table(table, 12, 150, counts=counts, storage="int4")
    for other in (even, hybrid):
        ours = transform_table(table, other.stored_bytes, counts=counts)
        assert lost(ours, table, counts) < 0.75 * lost(other, table, counts)


def test_floats_by_frequency_beat_one_rank_for_all() -> None:
    table, counts = zipfian()
    counts = counts**3  # few rows that matter very much
    plain = svd_table(table, 16, counts=counts)
    ours = transform_table(table, plain.stored_bytes, counts=counts, storage="float32")
    assert lost(ours, table, counts) < 0.7 * lost(plain, table, counts)


@pytest.mark.parametrize(("storage", "at_most"), [("float32", 1.0001), ("int4", 1.1)])
def test_no_other_projection_would_do_much_better_for_the_rows_as_they_were_rounded(
    storage: str, at_most: float
) -> None:
    table, counts = zipfian()
    made = transform_table(table, 40_000, counts=counts, storage=storage)
    assert isinstance(made.rows, FactorisedRows)
    root = as_weights(counts, table, TRANSFORM_POWER).double().sqrt()[:, None]
    rounded, wanted = made.rows.factor.matrix().double() * root, (table - made.mean).double() * root
    best = torch.linalg.lstsq(rounded, wanted, driver="gelsd").solution
    assert lost(made, table, counts) < at_most * float((rounded @ best - wanted).square().sum())


def test_sensitivity_moves_bits_to_what_is_felt() -> None:
    table, counts = zipfian()
    direction = torch.randn(48, 6)
    sensitivity = direction @ direction.T
    felt, back = metric(sensitivity, table)
    torch.testing.assert_close(felt @ back, torch.eye(48), rtol=1e-4, atol=1e-4)
    plain, ours = (transform_table(table, 15_000, counts=counts, sensitivity=s) for s in (None, sensitivity))
    assert lost(ours, table, counts, felt) < 0.8 * lost(plain, table, counts, felt)


def test_bands_cover_every_row_once() -> None:
    for rows in (1, 10, 63, 64, 100, 1_500, 30_522, 10_000_000):
        edges = band_edges(rows)
        assert edges[0] == 0
        assert edges[-1] == rows
        assert edges == sorted(set(edges))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"budget": 10}, "too few"),
        ({"budget": 10_000, "storage": "int5"}, "'int5'"),
        ({"budget": 10_000, "sensitivity": torch.eye(3)}, r"\(3, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, sentence: str) -> None:
    table, counts = zipfian()
    with pytest.raises(UserError, match=sentence):
        transform_table(table, counts=counts, **arguments)


@pytest.mark.parametrize("width", [4, 12, 100])
def test_no_column_of_an_odd_width_is_forgotten(width: int) -> None:
    table = torch.randn(600, width)
    counts = torch.ones(600)
    share = lost(transform_table(table, 620 * width + 4_000 + 30 * width, counts=counts), table, counts)
    assert share < 1e-3 * lost(lambda ids: torch.zeros(len(ids), width), table, counts)


def test_narrow_and_short_tables_work() -> None:
    table = torch.randn(20, 16)
    made = transform_table(table, 900, counts=torch.arange(20))
    assert made(torch.arange(20)).shape == (20, 16)
    assert any(isinstance(module, TrellisRows) for module in made.modules())
