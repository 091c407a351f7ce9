"""Trellis-coded rows: decoded as a naive loop does, encoded as well as an exhaustive search, as good as published."""

import itertools

import pytest
import torch

from torchdefine.ops import plain_torch
from torchdefine.tables import trellis
from torchdefine.tables.bits import LADDERS
from torchdefine.tables.trellis import CODES, TrellisRows, trellis_rows

RUNS = [[5, 3], [3, 1], [1, 7]]
HALVES = [[2.5, 16], [1, 8], [0.5, 32]]


def naive_row(rows: TrellisRows, row: int) -> list[float]:
    """One row from its bytes, bit by bit."""
    bits = [int(byte) >> place & 1 for byte in rows.codes[row] for place in range(8)]
    count = sum(columns if width == int(width) else columns // 2 for width, columns in rows.runs)
    coded = bits[:count] + [0] * rows.memory
    start, column, step, first_level, numbers = -(-count // 8) * 8, 0, 0, 0, []
    for width, columns in rows.runs:
        paired, uncoded = width != int(width), int(width + 0.5) - 1
        within = [0] * columns
        for field in (one for one in (4, 2, 1) if uncoded & one):
            for at in range(columns):
                value = sum(bits[start + at * field + place] << place for place in range(field))
                within[at] = within[at] * 2**field + value
            start += -(-columns * field // 8) * 8
        for at in range(columns):
            own, second = (at // 16 * 8 + at % 8, at // 8 % 2) if paired else (at, 0)
            window = coded[step + own : step + own + rows.memory + 1]
            codes = CODES[rows.memory][2 * second : 2 * second + 2]
            low, high = (sum(bit for tap, bit in enumerate(window) if code >> tap & 1) % 2 for code in codes)
            level = first_level + 4 * within[at] + 2 * high + low
            numbers.append(float(rows.levels[level].float() * rows.scales[column].float()))
            column += 1
        step += columns // 2 if paired else columns
        first_level += 4 * 2**uncoded
    return numbers


@pytest.mark.parametrize("memory", CODES)
@pytest.mark.parametrize("runs", [RUNS, HALVES])
def test_decoding_matches_a_naive_loop(memory: int, runs: list[list[float]]) -> None:
    width = sum(int(columns) for _, columns in runs)
    rows = trellis_rows(torch.randn(9, width) * torch.logspace(0, -1, width), runs, memory)
    given = rows(torch.tensor([[0, 8], [3, 3]]), torch.float32)
    for place, row in (((0, 0), 0), ((0, 1), 8), ((1, 1), 3)):
        assert given[place].tolist() == pytest.approx(naive_row(rows, row), abs=1e-6)
    with plain_torch():
        assert torch.equal(rows(torch.tensor([[0, 8], [3, 3]]), torch.float32), given)


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


def test_the_encoder_finds_the_best_of_all_codes_of_pairs() -> None:
    """Eight bits for sixteen columns, decoded: none is nearer."""
    x = torch.randn(30, 16)
    rows = trellis_rows(x, [[0.5, 16]], 4)
    every = TrellisRows(256, [[0.5, 16]], 4)
    every.codes = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    every.levels, every.scales = rows.levels, rows.scales
    distances = torch.cdist(x / rows.scales.float(), every.matrix() / rows.scales.float())
    reached = ((x - rows.matrix()) / rows.scales.float()).norm(dim=-1)
    torch.testing.assert_close(reached, distances.min(1).values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 6])
def test_the_loss_is_what_the_allocation_counts_on(bits: float) -> None:
    x = torch.randn(600, 64, generator=torch.Generator().manual_seed(int(bits)))
    error = (trellis_rows(x, [[bits, 64]]).matrix() - x).square().mean() / x.square().mean()
    assert float(error) == pytest.approx(dict(zip(*LADDERS["mixed"], strict=True))[bits], rel=0.15)


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
