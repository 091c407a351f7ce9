"""The search for the strings of bits of trellis-coded rows: Viterbi's algorithm, many rows at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torchdefine.tables.rows import stored_as
from torchdefine.tables.trellis import BOOKS, Runs, TrellisRows, codebooks, steps_of

NEAR = 3
"""So many times the memory are the steps at either end of a row that decide on its first window."""


def rows_together(memory: int) -> int:
    """Rows that the encoder treats together: what a core's cache holds of the costs of all windows."""
    return 1 << min(18 - memory, 9)


@torch.no_grad()
def trellis_rows(matrix: Tensor, runs: Runs, memory: int = 12) -> TrellisRows:
    """Round a matrix; each column's scale is then the one that loses least."""
    made = TrellisRows(len(matrix), runs, memory)
    if matrix.is_meta:  # only to see what they would take
        return made
    made.to(matrix.device)
    together = rows_together(memory)
    squares = torch.stack([part.float().square().sum(0) for part in matrix.split(together)]).sum(0) / len(matrix)
    scales = stored_as(squares.sqrt().clamp(min=1e-7), torch.float16).float()
    encoder = Encoder(runs, memory, codebooks(memory, matrix.device).view(BOOKS, -1), scales.square())
    along, across = torch.zeros_like(scales), torch.zeros_like(scales)
    for part, codes in zip(matrix.split(together), made.codes.split(together), strict=True):
        numbers = (part.float() / scales).T.contiguous()  # (width, rows)
        windows = encoder.windows(numbers)
        codes.copy_(encoder.packed(windows))
        values = encoder.values(windows)
        along += (numbers * values).sum(1)
        across += values.square().sum(1)
    made.scales.copy_(stored_as(scales * torch.where(across > 0, along / across, 1), torch.float16))
    return made


class Encoder:
    """Finds good strings of bits, for up to ``rows_together`` rows at a time; its buffers stay between them."""

    def __init__(self, runs: Runs, memory: int, books: Tensor, weights: Tensor | None = None) -> None:
        """``books`` are (BOOKS, 2^memory). An error counts by its column's weight, (width,)."""
        self.steps, self.memory, self.books = steps_of(runs), memory, books
        self.count, self.bits = rows_together(memory), sum(step.own for step in self.steps)
        each = [step.columns for step in self.steps]
        sizes = torch.tensor(each, device=books.device)
        self.step_of = torch.arange(len(each), device=books.device).repeat_interleave(sizes)  # (width,)
        self.weights = books.new_ones(len(self.step_of)) if weights is None else weights  # alike within a step
        self.weights = torch.stack([part.mean() for part in self.weights.split(each)])  # (steps,)
        self.begins = torch.tensor(
            [(step.book + column) << memory for step in self.steps for column in range(step.columns)],
            device=books.device,
        )
        # |x - v|² less |x|², over the columns of a step: the product of these and (1, x), for each window
        of_books = [books[step.book : step.book + step.columns] for step in self.steps]
        made = {
            step.book: torch.stack([own.square().sum(0), *(-2 * own)], -1)
            for step, own in zip(self.steps, of_books, strict=True)
        }
        self.losses = [made[step.book] for step in self.steps]  # (2^memory, 1 + columns) each
        self.rest = [books.new_empty(2 ** (memory - step.own), self.count) for step in self.steps]
        """What later columns lose at least, by the bits of a step's window that are theirs."""
        self.costs = books.new_empty(2**memory, self.count)

    def windows(self, matrix: Tensor) -> Tensor:
        """(width, rows) → the windows of a string, (steps, rows).

        Of all strings with its first window it loses least. That window is the best one for the columns around it.
        """
        if self.bits <= self.memory:
            return self._nearest(matrix)
        rows = matrix.shape[1]
        weighted = torch.zeros(len(matrix), self.count, device=matrix.device)
        weighted[:, :rows] = matrix * self.weights[self.step_of].unsqueeze(1)
        parts = zip(self.weights, weighted.split([step.columns for step in self.steps]), strict=True)
        factors = [torch.cat([weight.expand(1, self.count), part]) for weight, part in parts]  # (1 + columns, rows)
        order, near = list(range(len(self.steps))), min(NEAR * self.memory, len(self.steps) // 2)
        around = order[-near:] + order[:near]
        self.rest[around[-1]].zero_()
        self._search(around, factors)
        first = self._trace(around, factors, self.costs.argmin(0))[near]
        self.rest[-1].fill_(torch.inf).scatter_(0, (first >> self.steps[-1].own).unsqueeze(0), 0.0)
        self._search(order, factors)
        return self._trace(order, factors, first)[:, :rows]

    def _search(self, order: list[int], factors: list[Tensor]) -> None:
        """From the last of some steps to the first: what they lose at least, by the window of the first."""
        for at, before in zip(order[::-1], [*order[-2::-1], None], strict=True):
            rest = self.rest[at]
            shape = 2 ** self.steps[at].own, *rest.shape
            loss = self.losses[at].view(*shape[:2], -1)
            torch.baddbmm(rest.expand(shape), loss, factors[at].expand(len(loss), -1, -1), out=self.costs.view(shape))
            if before is not None:
                torch.amin(self.costs.view(-1, 2 ** self.steps[before].own, self.count), 1, out=self.rest[before])

    def _trace(self, order: list[int], factors: list[Tensor], window: Tensor) -> Tensor:
        """The best windows after a first one, (rows,) → (steps, rows)."""
        found = [window]
        choices = torch.arange(256, device=window.device).unsqueeze(1)
        for before, at in pairwise(order):
            own = self.steps[before].own
            first = (window << own) & (2**self.memory - 1)
            ways = first + choices[: 2**own]  # (2^own, rows)
            loss = self.losses[at].index_select(0, ways.view(-1)).view(*ways.shape, -1)
            cost = torch.linalg.vecdot(loss, factors[at].T)
            cost += self.rest[at].gather(0, ways & (len(self.rest[at]) - 1))
            window = first + cost.argmin(0)
            found.append(window)
        return torch.stack(found)

    def _nearest(self, matrix: Tensor) -> Tensor:
        """The windows of the nearest of all strings: a string shorter than a window runs on into itself."""
        strings, held = torch.arange(2**self.bits, device=matrix.device), self.bits
        again = strings
        while held < self.bits + self.memory:
            again, held = again << self.bits | strings, held + self.bits
        every = torch.stack([again >> held - step.first - self.memory for step in self.steps])
        every &= 2**self.memory - 1
        roots = self.weights.sqrt()[self.step_of]
        return every[:, torch.cdist(matrix.T * roots, self.values(every).T * roots).argmin(1)]

    def packed(self, windows: Tensor) -> Tensor:
        """(steps, rows) → bytes, (rows, bytes); the first bit is the highest of its byte."""
        own = [(step, self.memory - 1 - bit) for step, one in enumerate(self.steps) for bit in range(one.own)]
        steps, places = torch.tensor(own, device=windows.device).unbind(1)
        bits = (windows[steps] >> places.unsqueeze(1) & 1).view(-1, 8, windows.shape[1])
        weights = 2 ** torch.arange(7, -1, -1, device=bits.device).unsqueeze(1)
        return (bits * weights).sum(1).to(torch.uint8).T

    def values(self, windows: Tensor) -> Tensor:
        """(steps, rows) → (width, rows)."""
        where = windows[self.step_of] + self.begins.unsqueeze(1)
        return self.books.reshape(-1).index_select(0, where.view(-1)).view(where.shape)
