"""Fast ways of looking rows up, held to the plain one: no kept constants, all of it in torch's own operations."""

import copy
import io

import pytest
import torch
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.ops import plain_torch
from torchdefine.tables import CompactTable, coded_table, quantised_table, svd_table, transform_table
from torchdefine.tables.codes import CodeLearning
from torchdefine.tables.rows import FEW, BandedRows, frozen
from torchdefine.tables.trellis import TrellisRows

V, M = 700, 48
GENERATOR = torch.Generator().manual_seed(5)
MATRIX = torch.randn(V, M, generator=GENERATOR) @ torch.diag(torch.logspace(0, -2, M)) + 0.1
IN_ORDER = torch.arange(V, 0, -1).float() ** 2
MIXED = torch.randperm(V, generator=GENERATOR).float() ** 2
TABLES = {
    "bits": lambda: transform_table(MATRIX, 14_000, counts=IN_ORDER),
    "bits, ranked": lambda: transform_table(MATRIX, 14_000, counts=MIXED, padding_idx=3),
    "bits, few bytes": lambda: transform_table(MATRIX, 3_500, counts=MIXED),
    "ranks by frequency": lambda: transform_table(MATRIX, 20_000, counts=MIXED, storage="int4"),
    "svd": lambda: svd_table(MATRIX, 20, counts=MIXED, storage="int8"),
    "frequent rows": lambda: svd_table(MATRIX, 20, 30, counts=MIXED, storage="int8"),
    "int8": lambda: quantised_table(MATRIX, 8),
    "int8, a step a row": lambda: quantised_table(MATRIX, 8, M),
    "int4": lambda: quantised_table(MATRIX, 4),
    "int4 of odd width": lambda: quantised_table(MATRIX[:, :47], 4, 16),
    "int3": lambda: quantised_table(MATRIX, 3, 16),
    "codes": lambda: coded_table(MATRIX, 6, 16, learning=CodeLearning(steps=20, rounds=1)),
}


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> CompactTable:
    return TABLES[request.param]()


def some_ids(count: int) -> Tensor:
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(count))


def plainly(table: CompactTable, ids: Tensor) -> Tensor:
    with plain_torch():
        return table(ids)


@pytest.mark.parametrize("count", [0, 1, 8, FEW, FEW + 1, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_the_plain_way(table: CompactTable, count: int, dtype: torch.dtype) -> None:
    table.mean.data = table.mean.data.to(dtype)
    ids, close = some_ids(count), 0.05 if dtype == torch.bfloat16 else 1e-5
    for _ in range(2):  # the second time from what was kept
        for shaped in (ids, ids.int(), ids.view(-1, 1), ids.expand(3, -1)):
            found, expected = table(shaped), plainly(table, shaped)
            assert found.dtype == expected.dtype == dtype
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=close, atol=close)
    with torch.inference_mode():
        assert torch.equal(table(ids), table(ids))


@pytest.mark.parametrize("count", [1, FEW + 1])
@pytest.mark.parametrize("wrong", [-1, V, -V, 2 * V, 2**40])
def test_an_id_that_does_not_exist_is_refused(table: CompactTable, count: int, wrong: int) -> None:
    ids = some_ids(count)
    table(ids)
    ids[-1] = wrong
    with pytest.raises(UserError, match=f"The id {wrong} is outside the vocabulary"):
        table(ids)


def test_whatever_is_kept_follows_its_tensors(table: CompactTable) -> None:
    ids = some_ids(10)
    table(ids)
    with torch.no_grad():
        for number, parameter in enumerate(table.parameters()):
            parameter.mul_(1 + 0.1 * number)
    torch.testing.assert_close(table(ids), plainly(table, ids), rtol=1e-5, atol=1e-5)
    for rows in table.modules():
        if "codes" in getattr(rows, "_buffers", {}):
            rows.codes = rows.codes.flip(0)
    torch.testing.assert_close(table(ids), plainly(table, ids), rtol=1e-5, atol=1e-5)
    other = copy.deepcopy(table)
    other.load_state_dict({name: value.roll(1, 0) for name, value in table.state_dict().items()})
    torch.testing.assert_close(other(ids), plainly(other, ids), rtol=1e-5, atol=1e-5)


def test_copies_and_files_are_like_any_module(table: CompactTable) -> None:
    ids, before = some_ids(10), {name: value.clone() for name, value in table.state_dict().items()}
    expected, file = table(ids), io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    for other in (copy.deepcopy(table), torch.load(file, weights_only=False)):
        assert torch.equal(other(ids), expected)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_gradients_of_the_floats_equal_the_plain_ones(table: CompactTable) -> None:
    ids = some_ids(100)
    table(ids)
    table.float().requires_grad_(True)

    def gradients() -> list[Tensor]:
        table.zero_grad()
        table(ids).sin().sum().backward()
        return [parameter.grad for parameter in table.parameters() if parameter.grad is not None]

    found = gradients()
    with plain_torch():
        expected = gradients()
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


LAYOUTS = [
    [[8, 8], [7, 8], [6, 16], [1, 8]],
    [[6, 8], [5, 8], [3, 8]],
    [[4, 24], [2, 8]],
    [[1, 24]],
    [[3.5, 16], [3, 8], [1.5, 32], [1, 8], [0.5, 16]],
    [[0.5, 48]],
    [[3, 8], [1, 8]],
]


@pytest.mark.parametrize("runs", LAYOUTS)
@pytest.mark.parametrize("memory", [8, 12])
def test_the_tables_of_a_layout_find_every_value(runs: list[list[float]], memory: int) -> None:
    """Beside a band of one bit, which has fewer bytes and columns."""
    bands = [TrellisRows(5, runs, memory), TrellisRows(9, [[1, 16]], memory)]
    for band in bands:
        band.codes = torch.randint(256, band.codes.shape, dtype=torch.uint8)
        band.scales = frozen(torch.rand(band.width))
    flat = torch.cat([band.codes.flatten() for band in bands])
    found = TrellisRows.together(bands, flat, torch.float32).decoded(torch.arange(14))
    for band, rows in zip(bands, found.split([5, 9]), strict=True):
        with plain_torch():
            assert torch.equal(rows[:, : band.width], band.matrix())
        assert torch.equal(rows[:, : band.width], band.matrix())
        assert not rows[:, band.width :].any()


def test_joined_codes_take_no_more_memory() -> None:
    table = TABLES["bits"]()
    assert isinstance(table.rows.factor, BandedRows)
    table(some_ids(3))
    memory = {band.codes.untyped_storage().data_ptr() for band in table.rows.factor.bands}
    assert len(memory) == 1
    assert (
        sum(band.codes.nbytes for band in table.rows.factor.bands)
        == table.rows.factor.bands[0].codes.untyped_storage().nbytes()
    )
