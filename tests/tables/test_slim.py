import pytest
import torch
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.tables import load_table, slim_table
from torchdefine.tables.fields import pack
from torchdefine.tables.slim import SlimRows, centres, nearest, shared_pool


def test_decoding_is_that_of_a_loop() -> None:
    rows = SlimRows(7, 12, parts=4, entries=8, dtype="float32")
    rows.pool.normal_()
    codes = torch.randint(0, 8, (7, 4))

    rows.codes = pack(codes, 3)
    expected = torch.stack([torch.cat([rows.pool[code] for code in row]) for row in codes.tolist()])
    assert torch.equal(rows.matrix(), expected)


def test_a_round_of_k_means_is_that_of_a_loop() -> None:
    points, pool = torch.randn(60, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    mass = torch.rand(60, dtype=torch.float64)
    codes = [min(range(5), key=lambda e, p=point: float((p - pool[e]).square().sum())) for point in points]
    assert nearest(points, pool).tolist() == codes
    expected = pool.clone()
    for entry in set(codes):
        own = [n for n, code in enumerate(codes) if code == entry]
        expected[entry] = sum(mass[n] * points[n] for n in own) / sum(mass[n] for n in own)
    found = centres(points, mass, torch.tensor(codes), pool)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def error(points: Tensor, pool: Tensor) -> float:
    return float((points - pool[nearest(points, pool)]).square().sum())


def test_rounds_lower_the_error() -> None:
    points, mass = torch.randn(3_000, 4), torch.full((3_000,), 1 / 3_000)
    lost = [error(points, shared_pool(points, mass, 32, rounds, seed=0)) for rounds in (0, 2, 30)]
    assert lost[0] > lost[1] > lost[2]
    assert lost[2] < 0.85 * lost[0]


def test_a_slim_table_is_found_again(tmp_path) -> None:
    torch.manual_seed(1)
    pool = torch.randn(16, 6).half().float()
    rows = torch.cat([pool[torch.randint(0, 16, (300,))] for _ in range(4)], dim=1)
    rows -= rows.mean(0)
    table = slim_table(rows, parts=4, entries=256)
    torch.testing.assert_close(table(torch.arange(300)), rows, rtol=2e-3, atol=2e-3)
    assert table.stored_bytes == 300 * 4 + 256 * 6 * 2 + 24 * 4
    table.save(tmp_path / "table")
    assert torch.equal(load_table(tmp_path / "table")(torch.arange(300)), table(torch.arange(300)))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="cannot be cut into 5 parts"):
        slim_table(torch.randn(30, 24), parts=5)
    with pytest.raises(UserError, match="a power of two from 2 to 256"):
        slim_table(torch.randn(30, 24), parts=4, entries=300)
