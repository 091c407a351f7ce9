"""GroupReduce (Chen et al., NeurIPS 2018): blocks of rows by frequency, each with a low rank of its own.

Rows first lie in blocks by how often they occur, and a block's rank is proportional to the mean weight of its rows.
Refinement then moves rows to the block whose directions rebuild them best, and finds the directions anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.tables.bits import band_edges
from torchdefine.tables.budget import Budget
from torchdefine.tables.compact_table import CompactTable, table_bytes
from torchdefine.tables.low_rank import empty_low_rank, low_rank_rows, principal_directions
from torchdefine.tables.rows import BandedRows, Rows, in_bands
from torchdefine.tables.source import Candidate, Method, Source, TableLike, centred

ROUNDS = 5
LEAST_GAIN = 1e-3
"""A round of refinement that lowers the error by a smaller fraction is the last."""
HALVINGS = 40


@torch.no_grad()
def group_reduce_table(
    table: TableLike | Source, budget: int, *, storage: str = "float32", rounds: int = ROUNDS, **known: Any
) -> CompactTable:
    """Blocks by frequency with a low rank each, refined in at most ``rounds``, in at most ``budget`` bytes.

    ``storage`` is float32, float16, bfloat16, or int8 … int1. Without ``counts`` all blocks have the same rank.
    """
    source = Source.of(table, **known)
    weights = source.weights()
    rows, mean = centred(source.matrix, weights)
    block_of, ranks = blocks_by_frequency(weights, rows.shape[1], budget, storage)
    block_of = refined(rows, weights, block_of, ranks, prices(ranks, rows.shape[1], storage), rounds)
    order = block_of.argsort(stable=True)
    members = order.split(block_of.bincount(minlength=len(ranks)).tolist())
    made = [
        low_rank_rows(rows[some], rank, weights[some], storage)
        for some, rank in zip(members, ranks, strict=True)
        if len(some)
    ]
    return CompactTable(in_bands(list(made), order), mean, source.padding_idx)


def blocks_by_frequency(weights: Tensor, width: int, budget: int, storage: str) -> tuple[Tensor, list[int]]:
    """The block of each row, (V,), most frequent first, and the rank of each block; only the first may be whole."""
    sizes = torch.tensor([stop - start for start, stop in pairwise(band_edges(len(weights)))])
    order = torch.sort(weights, descending=True, stable=True).indices
    block_of = torch.empty_like(order)
    block_of[order] = torch.arange(len(sizes)).repeat_interleave(sizes).to(order.device)
    ranks = affordable_ranks(weights, block_of, width, budget, storage)
    while (whole := ranks.count(width)) > 1:
        block_of = (block_of - whole + 1).clamp(min=0)
        ranks = affordable_ranks(weights, block_of, width, budget, storage)
    return block_of, ranks


def affordable_ranks(weights: Tensor, block_of: Tensor, width: int, budget: int, storage: str) -> list[int]:
    """The highest ranks that fit, proportional to the mean weights of blocks: at least 1, and whole at most."""
    sizes = block_of.bincount()
    means = torch.zeros(len(sizes), device=weights.device).index_add_(0, block_of, weights) / sizes
    relative = (means / means.min()).tolist()

    def ranks(lowest: int) -> list[int]:
        """In tenths of a rank, so that those of rows seldom seen can grow one by one."""
        return [min(max(round(lowest * more / 10), 1), width) for more in relative]

    lowest = Budget(budget).largest(10 * width, lambda lowest: _empty(sizes.tolist(), ranks(lowest), width, storage))
    if not lowest:
        least = table_bytes(partial(_empty, sizes.tolist(), [1] * len(sizes), width, storage))
        raise UserError(f"{budget:,} bytes are too few for blocks of rank 1: allow {least:,} or more.")
    return ranks(lowest)


def _empty(sizes: Sequence[int], ranks: Sequence[int], width: int, storage: str) -> Rows:
    """Blocks without values, and what says which row is in which."""
    return BandedRows([empty_low_rank(size, rank, width, storage) for size, rank in zip(sizes, ranks, strict=True)])


def prices(ranks: Sequence[int], width: int, storage: str) -> Tensor:
    """The bytes that one more row takes in each block."""
    sizes = [[table_bytes(partial(empty_low_rank, rows, rank, width, storage)) for rows in (1, 2)] for rank in ranks]
    return torch.tensor([two - one for one, two in sizes], dtype=torch.float64)


def refined(
    rows: Tensor, weights: Tensor, block_of: Tensor, ranks: Sequence[int], price: Tensor, rounds: int
) -> Tensor:
    """The block of each row, (V,), after moving rows to where they are rebuilt best, until a round gains too little.

    A row's weighted error in a block counts together with its bytes there, so that all rows together take no more than
    before.
    """
    errors = block_errors(rows, weights, block_of, ranks)  # (V, blocks)
    for _ in range(rounds):
        moved = cheapest(errors, price.to(rows.device), block_of)
        after = block_errors(rows, weights, moved, ranks)
        before, now = (float(e.gather(1, at[:, None]).sum()) for e, at in ((errors, block_of), (after, moved)))
        if now >= before:
            break
        errors, block_of = after, moved
        if before - now < LEAST_GAIN * before:
            break
    return block_of


def block_errors(rows: Tensor, weights: Tensor, block_of: Tensor, ranks: Sequence[int]) -> Tensor:
    """The weighted squared error of every row along the directions of every block, (V, blocks)."""
    width, whole = rows.shape[1], rows.square().sum(-1)
    errors = rows.new_empty(len(rows), len(ranks))
    for block, rank in enumerate(ranks):
        own = block_of == block
        directions = principal_directions(rows[own], width, weights[own])  # (m, m)
        kept, lost = directions.split([rank, width - rank])
        if len(lost) < len(kept):
            errors[:, block] = (rows @ lost.T).square().sum(-1)
        else:
            errors[:, block] = (whole - (rows @ kept.T).square().sum(-1)).clamp(min=0)
    return errors * weights.unsqueeze(-1)


def cheapest(errors: Tensor, price: Tensor, block_of: Tensor) -> Tensor:
    """The block of each row with the least error, at the lowest price of a byte that keeps within today's bytes."""
    room = price[block_of].sum()
    low, high = 0.0, 2 * float(errors.max() / price.min())  # there all rows are where they are cheapest
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        chosen = (errors + middle * price).argmin(-1)
        low, high = (low, middle) if price[chosen].sum() <= room else (middle, high)
    return (errors + high * price).argmin(-1)


@dataclass(frozen=True)
class GroupReduce(Method):
    """Blocks by frequency with the highest ranks that fit, in 4 bits and in 8, or in float32."""

    sure_of_its_size: ClassVar[bool] = False
    rounds: int = ROUNDS

    def within(self, rows: int, width: int, budget: Budget) -> Iterator[Candidate]:
        for storage in ("float32",) if budget.floats_only else ("int4", "int8"):
            make = partial(group_reduce_table, budget=budget.bytes, storage=storage, rounds=self.rounds)
            yield Candidate(f"blocks of low rank, {storage}", make)
