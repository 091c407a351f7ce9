"""Rows that nobody used take no bytes, and the others have all of them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdefine.adapt import FitOptions, fit
from torchdefine.errors import UserError
from torchdefine.tables import METHODS, load_table, transform_table, used_table

V, M = 900, 24


def table_and_counts(seed: int = 0, used: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(V, M, generator=generator) @ torch.diag(torch.logspace(0, -1, M)) + 0.5
    counts = torch.zeros(V, dtype=torch.long)
    counts[torch.randperm(V, generator=generator)[:used]] = torch.randint(1, 500, (used,), generator=generator)
    return table, counts


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99), st.integers(40, V - 1), st.integers(7_000, 15_000))
def test_it_keeps_within_its_bytes_and_unused_rows_are_their_mean(seed: int, used: int, budget: int) -> None:
    table, counts = table_and_counts(seed, used)
    made = used_table(table, budget, counts=counts)
    assert made.stored_bytes <= budget
    found = made(torch.arange(V))
    unused = found[counts == 0]
    torch.testing.assert_close(unused, table[counts == 0].mean(0).expand_as(unused), atol=2e-3, rtol=0)


def test_used_rows_lose_less_than_if_all_had_bits() -> None:
    table, counts = table_and_counts()
    lost = [
        float((one(torch.arange(V)) - table)[counts > 0].square().sum(-1) @ counts[counts > 0].float())
        for one in (used_table(table, 8_000, counts=counts), transform_table(table, 8_000, counts=counts))
    ]
    assert lost[0] < 0.8 * lost[1]


def test_it_is_saved_and_compiled_programs_read_it(tmp_path: Path) -> None:
    table, counts = table_and_counts()
    made = used_table(table, 9_000, counts=counts, padding_idx=3)
    made.save(tmp_path / "table.safetensors")
    ids = torch.randint(V, (4, 7))
    again = load_table(tmp_path / "table.safetensors")
    assert torch.equal(again(ids), made(ids))
    program = torch.export.export(made, (ids,)).module()
    torch.testing.assert_close(program(ids), made(ids))
    assert not made(torch.tensor(3)).any()


def test_counts_that_leave_nothing_out_are_refused() -> None:
    table, counts = table_and_counts()
    for given_, words in ((None, "Without counts"), (counts + 1, "Every row"), (counts * 0, "No row")):
        with pytest.raises(UserError, match=f"{words} .*take transform_table"):
            used_table(table, 9_000, counts=given_)
    fitted = fit(table, counts + 1, 9_000, options=FitOptions(methods=("bits", "used")))
    assert [one.name for one in fitted.skipped] == ["bits by importance, used rows"]


def test_it_is_one_of_the_methods_that_are_tried() -> None:
    table, counts = table_and_counts()
    assert METHODS["used"].in_fit
    fitted = fit(table, counts, 9_000, options=FitOptions(methods=("bits", "int", "used")))
    assert "used" in {one.method for one in fitted.measured}
