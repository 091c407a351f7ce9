"""Where bits do most good: more for frequent rows and for columns that vary much, none where they would be wasted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOSSES = (1.0, 0.3634, 0.1175, 0.03454, 0.009497, 0.002499, 0.000642, 0.000163, 0.0000412)
"""What is left of a normal variable's variance after rounding to the best 2^bits levels, for 0 to 8 bits."""


@dataclass(frozen=True)
class Ladder:
    """Steps of increasing bits for a number, and the share of its variance that each still loses: a convex curve."""

    bits: tuple[float, ...]
    losses: tuple[float, ...]


LADDERS = {
    "mixed": Ladder(tuple(range(9)), LOSSES),
    "int4": Ladder((0, 4.5), (1.0, 0.012)),  # with a float16 step for 32 numbers
    "int8": Ladder((0, 8.5), (1.0, 0.0001)),
    "float16": Ladder((0, 16), (1.0, 0.0)),
    "float32": Ladder((0, 32), (1.0, 0.0)),
}


def allocate(importance: Tensor, rows: Tensor, ladder: Ladder, budget_bits: float) -> Tensor:
    """The step of the ladder for every band and column, (bands, columns), such that the loss is least.

    ``importance`` is each band's and column's variance × the mean weight of the band's rows; ``rows`` counts those. As
    the ladder is convex, taking the steps in order of savings per bit is optimal until one is too expensive; then its
    column stays as it is, and cheaper ones go on.
    """
    more_bits = torch.tensor(ladder.bits, dtype=torch.float64).diff()
    less_loss = -torch.tensor(ladder.losses, dtype=torch.float64).diff()
    saved_by_bit = importance.double().cpu().unsqueeze(-1) * (less_loss / more_bits)  # (bands, columns, steps)
    price = (rows.double().cpu()[:, None, None] * more_bits).expand_as(saved_by_bit)
    order = saved_by_bit.flatten().argsort(descending=True)
    prices, left, steps = price.flatten().tolist(), budget_bits, len(more_bits)
    taken = [0] * importance.numel()
    for index in order.tolist():
        cell, step = divmod(index, steps)
        if step == taken[cell] and prices[index] <= left:
            taken[cell] += 1
            left -= prices[index]
    return torch.tensor(taken).reshape(importance.shape)
