"""What is packed, and what a way of packing it must say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from torchdefine.embedding import finished_table
from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.tables.budget import Budget
from torchdefine.tables.compact_table import CompactTable

TableLike = Tensor | np.ndarray | nn.Module
Counts = Tensor | np.ndarray | Sequence[int] | Sequence[float]
"""How often each token occurs, by id."""

ROWS_AT_ONCE = 16_384
FREQUENCY_POWER = 0.75
"""A model is less sensitive to each occurrence of a frequent token's error than of a rare one's (about half as much for
ten times the count, in a sentence encoder), so a token's weight grows more slowly than its count."""
DRAWN_POWER = 0.75
"""Rows are drawn by weight to this power and the rest of the weight is in the loss, so that light rows come up too."""


@dataclass(frozen=True)
class Source:
    """The table to be packed, and what is known of it."""

    matrix: Tensor
    """(V, m), float32."""
    counts: Counts | None = None
    """Frequent tokens are kept more precisely."""
    sensitivity: Tensor | None = None
    """How sensitive a model is to an error in each direction, (m, m) (``adapt.Behaviour.sensitivity``); for methods
    that can use it."""
    padding_idx: int | None = None
    """The token whose vector is always zero."""
    progress: Progress | None = None
    """Called with (done, total) during long work."""

    def __post_init__(self) -> None:
        if self.sensitivity is None:
            return
        shape, width = tuple(self.sensitivity.shape), self.matrix.shape[1]
        if shape != (width, width):
            raise UserError(f"The sensitivity has the shape {shape}, but rows are {width} wide.")
        if not bool(torch.isfinite(self.sensitivity).all()) or not float(self.sensitivity.diagonal().mean()) > 0:
            problem = "The sensitivity has values that are not finite, or a diagonal without positive values"
            raise UserError(f"{problem}: measure it again with Behaviour.sensitivity.")

    @classmethod
    def of(cls, table: TableLike | Source, **known: Any) -> Source:
        """A tensor, an array or any embedding with what is ``known`` of it: other fields; a source as it is."""
        return table if isinstance(table, Source) else cls(as_matrix(table), **known)

    def weights(self, power: float = FREQUENCY_POWER) -> Tensor:
        """How much each row counts, (V,); see ``as_weights``."""
        return as_weights(self.counts, self.matrix, power)


@dataclass(frozen=True)
class Candidate:
    """A table that a method would make; ``build`` makes it of its source."""

    label: str
    build: Callable[[Source], CompactTable]


class Method(ABC):
    """A way of packing tables. Its fields are what a user may set; ``METHODS`` names it.

    What it builds is a ``CompactTable`` of some kind of ``Rows``, which looks vectors up, saves and loads.
    """

    sure_of_its_size: ClassVar[bool] = True
    """Whether every candidate can be made; else some turn out to be too small only when they are built."""

    @abstractmethod
    def within(self, rows: int, width: int, budget: Budget) -> Iterator[Candidate]:
        """The largest tables of this kind and shape that fit, the likely best first; none if nothing fits."""

    def usual_bytes(self, rows: int, width: int) -> int | None:
        """The bytes of a method that has a size of its own, where nobody gives a budget."""
        return None


def as_matrix(table: TableLike) -> Tensor:
    """The vectors of all tokens, (V, m) float32, of a tensor, an array or any embedding."""
    if not isinstance(table, Tensor | np.ndarray | nn.Module):
        raise TypeError(f"A table is a matrix or an embedding, not {type(table).__name__}: pass its weight.")
    matrix = finished_table(table) if isinstance(table, nn.Module) else torch.as_tensor(table).detach()
    if matrix.dim() != 2 or 0 in matrix.shape or not matrix.is_floating_point():
        raise UserError(f"A table is a matrix of floats, not {matrix.dtype} of the shape {tuple(matrix.shape)}.")
    if not bool(torch.isfinite(matrix).all()):
        raise UserError("The table has values that are not finite: repair it before packing it.")
    return matrix.float()


def as_weights(counts: Counts | None, matrix: Tensor, power: float = FREQUENCY_POWER) -> Tensor:
    """How much each row counts, (V,), float32, adding up to 1: (count + 1) to a power."""
    if counts is None:
        return torch.full((len(matrix),), 1 / len(matrix), device=matrix.device)
    given = torch.as_tensor(counts, dtype=torch.float64, device=matrix.device)
    if given.shape != (len(matrix),):
        raise UserError(f"There are {given.numel()} counts for {len(matrix)} rows: give one for each token id.")
    if not bool(torch.isfinite(given).all()) or bool((given < 0).any()):
        raise UserError("Some counts are negative or not finite: count each token's occurrences in some text.")
    weights = (given + 1) ** power
    return (weights / weights.sum()).float()


def centred(matrix: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows less their (weighted) mean, and the mean."""
    mean = matrix.mean(0) if weights is None else weights @ matrix
    return matrix - mean, mean


@torch.no_grad()
def lost_variance(table: nn.Module, matrix: Tensor, weights: Tensor | None = None) -> float:
    """The fraction of a matrix's (weighted) variance that a table made of it has lost."""
    mass = as_weights(None, matrix) if weights is None else weights
    mean = mass @ matrix
    variance = lost = torch.zeros((), device=matrix.device)
    for ids in torch.arange(len(matrix), device=matrix.device).split(ROWS_AT_ONCE):
        rows = matrix[ids]
        variance = variance + ((rows - mean).square().sum(-1) * mass[ids]).sum()
        lost = lost + ((table(ids).float() - rows).square().sum(-1) * mass[ids]).sum()
    return float(lost / variance.clamp(min=1e-30))


class RowDraws:
    """Batches of rows, heavy ones more often; the mean of errors times ``left`` is the weighted sum over all rows."""

    def __init__(self, weights: Tensor, generator: torch.Generator) -> None:
        powers = weights.double() ** DRAWN_POWER
        self._ends = (powers / powers.sum()).cumsum(0)
        self._generator = generator
        self.left = (weights.double() ** (1 - DRAWN_POWER) * powers.sum()).float()

    def draw(self, count: int) -> Tensor:
        """(count,) row numbers, with replacement."""
        at = torch.rand(count, dtype=torch.float64, device=self._ends.device, generator=self._generator)
        return torch.searchsorted(self._ends, at).clamp(max=len(self._ends) - 1)
