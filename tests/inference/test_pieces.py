"""Large tables are worked through some rows at a time, which must not show."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchdefine.inference import code_refinement, factorised, product_codes, quantised

ROWS = torch.randn(50, 24, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.rand(50, generator=torch.Generator().manual_seed(2))
PRODUCT_CODES = product_codes.product_quantise_rows(ROWS, 4, 8)


def kept_by_directions(weights: Tensor | None) -> Tensor:
    directions = factorised.principal_directions(ROWS, 5, weights)
    return directions.T @ directions


MADE: dict[str, Callable[[], Tensor]] = {
    "quantised": lambda: quantised.quantise_rows(ROWS, 4, 8).matrix(),
    "principal directions": lambda: kept_by_directions(None),
    "weighted directions": lambda: kept_by_directions(WEIGHTS),
    "product codes": lambda: product_codes.product_quantise_rows(ROWS, 4, 8, weights=WEIGHTS).matrix(),
    "refined codes": lambda: code_refinement.refine_codes(ROWS, PRODUCT_CODES, weights=WEIGHTS, rounds=3).matrix(),
}


@pytest.mark.parametrize("name", MADE)
def test_rows_a_few_at_a_time_give_the_same_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MADE[name]()
    for module in (code_refinement, factorised, product_codes, quantised):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)
    torch.testing.assert_close(MADE[name](), whole, rtol=1e-4, atol=1e-4)
