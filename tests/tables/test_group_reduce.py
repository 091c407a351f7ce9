from itertools import pairwise

import pytest
import torch
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.tables import load_table
from torchdefine.tables.bits import band_edges
from torchdefine.tables.group_reduce import block_errors, cheapest, group_reduce_table, refined
from torchdefine.tables.source import as_weights, lost_variance

RANKS = [5, 3, 2]
PRICE = torch.tensor([20.0, 12.0, 8.0], dtype=torch.float64)


def mixed(rows: int = 120, width: int = 9) -> Tensor:
    """Rows of three kinds, each with directions of its own, in an order that has nothing to do with it."""
    generator = torch.Generator().manual_seed(2)
    kinds = torch.randn(3, 3, width, generator=generator, dtype=torch.float64)
    kind = torch.randint(0, 3, (rows,), generator=generator)
    inside = torch.randn(rows, 1, 3, generator=generator, dtype=torch.float64) @ kinds[kind]
    return inside.squeeze(1) + 0.1 * torch.randn(rows, width, generator=generator, dtype=torch.float64)


def naive_errors(rows: Tensor, weights: Tensor, block_of: list[int]) -> list[list[float]]:
    """The published method in a loop: a weighted SVD a block, then every row along the directions of every block."""
    bases = []
    for block, rank in enumerate(RANKS):
        own = [row for row, at in enumerate(block_of) if at == block]
        scaled = torch.stack([weights[row].sqrt() * rows[row] for row in own])
        bases.append(torch.linalg.svd(scaled, full_matrices=False).Vh[:rank])
    errors = []
    for row, weight in zip(rows, weights, strict=True):
        errors.append([float(weight * (row - basis.T @ (basis @ row)).square().sum()) for basis in bases])
    return errors


def test_errors_are_those_of_a_loop_of_weighted_svds() -> None:
    rows, weights = mixed(), torch.rand(120, dtype=torch.float64)
    block_of = torch.arange(120) // 40
    ours = block_errors(rows, weights, block_of, RANKS)
    reference = torch.tensor(naive_errors(rows, weights, block_of.tolist()), dtype=torch.float64)
    torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)


def test_refinement_is_that_of_a_loop_and_loses_less_in_no_more_bytes() -> None:
    rows, weights = mixed(), torch.rand(120, dtype=torch.float64)
    start = torch.arange(120) // 40
    block_of = start.tolist()
    lost = [sum(errors[at] for errors, at in zip(naive_errors(rows, weights, block_of), block_of, strict=True))]
    for _ in range(2):
        errors, room = naive_errors(rows, weights, block_of), sum(float(PRICE[at]) for at in block_of)
        low, high = 0.0, 2 * max(max(row) for row in errors) / float(PRICE.min())
        for _ in range(60):
            middle = (low + high) / 2
            best = [min(range(3), key=lambda b, row=row: row[b] + middle * float(PRICE[b])) for row in errors]
            low, high = (low, middle) if sum(float(PRICE[at]) for at in best) <= room else (middle, high)
        block_of = [min(range(3), key=lambda b, row=row: row[b] + high * float(PRICE[b])) for row in errors]
        found = naive_errors(rows, weights, block_of)
        lost.append(sum(one[at] for one, at in zip(found, block_of, strict=True)))
    ours = refined(rows, weights, start, RANKS, PRICE, rounds=2)
    assert ours.tolist() == block_of
    assert lost[2] < lost[1] < 0.7 * lost[0]
    assert PRICE[ours].sum() <= PRICE[start].sum()


def test_rows_go_where_they_are_rebuilt_best_as_far_as_there_is_room() -> None:
    errors = torch.tensor([[0.0, 9.0], [0.0, 1.0], [0.0, 5.0]])
    price = torch.tensor([2.0, 1.0], dtype=torch.float64)
    assert cheapest(errors, price, torch.tensor([1, 0, 0])).tolist() == [0, 1, 0]
    assert cheapest(errors, price, torch.tensor([1, 1, 1])).tolist() == [1, 1, 1]


def test_frequent_blocks_have_more_directions_and_refinement_lowers_the_loss(tmp_path) -> None:
    rows, counts = mixed(700, 16).float(), [20_000 // (1 + row) for row in range(700)]
    weights = as_weights(counts, rows)
    plain, better = (group_reduce_table(rows, 14_000, counts=counts, rounds=rounds) for rounds in (0, 5))
    ranks = [band.factor.width for band in plain.rows.bands]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] > ranks[-1]
    assert better.stored_bytes <= 14_000
    assert lost_variance(better, rows, weights) < 0.99 * lost_variance(plain, rows, weights)
    better.save(tmp_path / "table")
    ids = torch.arange(700)
    assert torch.equal(load_table(tmp_path / "table")(ids), better(ids))


def test_without_refinement_a_block_is_the_weighted_svd_of_its_rows() -> None:
    rows, counts = mixed(400, 16).float(), torch.arange(400, 0, -1)
    table = group_reduce_table(rows, 12_000, counts=counts, rounds=0)
    weights = as_weights(counts, rows).double()
    centred, sizes = (
        rows.double() - weights @ rows.double(),
        [stop - start for start, stop in pairwise(band_edges(400))],
    )
    expected = []
    blocks = zip(centred.split(sizes), weights.split(sizes), table.rows.bands, strict=True)
    for block, own, band in blocks:
        weighted = own.sqrt().unsqueeze(1) * block
        basis = torch.linalg.svd(weighted, full_matrices=False).Vh[: band.factor.width]
        expected.append(block @ basis.T @ basis + weights @ rows.double())
    assert len(expected) > 1
    torch.testing.assert_close(table(torch.arange(400)).double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_too_few_bytes_are_refused_with_the_least() -> None:
    with pytest.raises(UserError, match="1,000 bytes are too few for blocks of rank 1: allow 3,"):
        group_reduce_table(torch.randn(700, 16), 1_000)
