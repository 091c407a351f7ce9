"""Trellis-coded rows: decoded as a naive loop does, encoded as well as an exhaustive search, as good as published."""

import itertools

import pytest
import torch

from torchdefine.tables import trellis
from torchdefine.tables.bits import LOSSES
from torchdefine.tables.trellis import CODES, TrellisRows, trellis_rows

RUNS = [[5, 3], [3, 1], [1, 7]]


def naive_row(rows: TrellisRows, row: int) -> list[float]:
    """One row from its bytes, bit by bit."""
    bits = [int(byte) >> place & 1 for byte in rows.codes[row] for place in range(8)]
    coded = bits[: rows.width] + [0] * rows.memory
    start, column, first_level, numbers = -(-rows.width // 8) * 8, 0, 0, []
    low, high = CODES[rows.memory]
    for width, columns in rows.runs:
        within = [0] * columns
        for field in (one for one in (4, 2, 1) if (width - 1) & one):
            for at in range(columns):
                value = sum(bits[start + at * field + place] << place for place in range(field))
                within[at] = within[at] * 2**field + value
            start += -(-columns * field // 8) * 8
        for at in range(columns):
            window = coded[column : column + rows.memory + 1]
            parity = [sum(bit for tap, bit in enumerate(window) if code >> tap & 1) % 2 for code in (low, high)]
            level = first_level + 4 * within[at] + 2 * parity[1] + parity[0]
            numbers.append(float(rows.levels[level].float() * rows.scales[column].float()))
            column += 1
        first_level += 2 ** (width + 1)
    return numbers


@pytest.mark.parametrize("memory", CODES)
def test_decoding_matches_a_naive_loop(memory: int) -> None:
    rows = trellis_rows(torch.randn(9, 11) * torch.logspace(0, -1, 11), RUNS, memory)
    given = rows(torch.tensor([[0, 8], [3, 3]]), torch.float32)
    for place, row in (((0, 0), 0), ((0, 1), 8), ((1, 1), 3)):
        assert given[place].tolist() == pytest.approx(naive_row(rows, row), abs=1e-6)


def test_the_encoder_finds_the_best_of_all_codes() -> None:
    """All rows that 1 + 1 + 2 + 1 bits can hold, decoded: none is nearer."""
    x = torch.randn(40, 4)
    rows = trellis_rows(x, [[2, 1], [1, 3]], 4)
    packed = itertools.product(range(16), range(2))  # a byte of coded bits, and one with the bit within the first
    every = TrellisRows(32, [[2, 1], [1, 3]], 4)
    every.codes = torch.tensor(list(packed), dtype=torch.uint8)
    every.levels, every.scales = rows.levels, rows.scales
    distances = torch.cdist(x / rows.scales.float(), every.matrix() / rows.scales.float())
    reached = ((x - rows.matrix()) / rows.scales.float()).norm(dim=-1)
    torch.testing.assert_close(reached, distances.min(1).values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6])
def test_the_loss_is_what_the_allocation_counts_on(bits: int) -> None:
    x = torch.randn(600, 64, generator=torch.Generator().manual_seed(bits))
    error = (trellis_rows(x, [[bits, 64]]).matrix() - x).square().mean() / x.square().mean()
    assert float(error) == pytest.approx(LOSSES[bits], rel=0.15)


def test_more_memory_loses_less() -> None:
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(1))
    errors = [float((trellis_rows(x, [[2, 64]], memory).matrix() - x).square().mean()) for memory in CODES]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.75 * 0.1175  # what the best four levels by themselves lose


def test_parts_do_not_change_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50, 16)
    whole = trellis_rows(x, [[3, 8], [1, 8]], 6)
    monkeypatch.setattr(trellis, "NUMBERS_AT_ONCE", 7 << 7)
    assert torch.equal(trellis_rows(x, [[3, 8], [1, 8]], 6).codes, whole.codes)
