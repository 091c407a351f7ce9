"""Large tables are worked through some rows at a time, which must not show."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchdefine.tables import codes, low_rank, quantised
from torchdefine.tables.codes import CodedRows

ROWS = torch.randn(50, 24, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.rand(50, generator=torch.Generator().manual_seed(2))
CODES = CodedRows.of(torch.arange(50).unsqueeze(1) % 8, ROWS[:8].unsqueeze(0))  # one book: no draws depend on chunks


def kept_by_directions(weights: Tensor | None) -> Tensor:
    directions = low_rank.principal_directions(ROWS, 5, weights)
    return directions.T @ directions


MADE: dict[str, Callable[[], Tensor]] = {
    "quantised": lambda: quantised.quantise_rows(ROWS, 4, 8).matrix(),
    "principal directions": lambda: kept_by_directions(None),
    "weighted directions": lambda: kept_by_directions(WEIGHTS),
    "refined codes": lambda: codes.refine_codes(ROWS, CODES, weights=WEIGHTS, rounds=3).matrix(),
}


@pytest.mark.parametrize("name", MADE)
def test_rows_a_few_at_a_time_give_the_same_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MADE[name]()
    for module in (codes, low_rank, quantised):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)
    torch.testing.assert_close(MADE[name](), whole, rtol=1e-4, atol=1e-4)
