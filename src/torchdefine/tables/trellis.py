"""Rows of a few bits a number, trellis-coded: a column's level depends on the bits of its neighbours too.

A column of k bits has 2^(k + 1) ascending levels, twice as many as its bits can tell apart. In turn they belong to the
subsets 0, 1, 2, 3, 0, …. One bit of each column, the coded one, goes into a convolutional code; from that column's
coded bit and those of the next ``memory`` columns it makes the number of the subset. The other k - 1 bits choose within
it. The encoder searches for the best path (Viterbi), so rows lose about as little as with a quarter of a bit more for
each number. Trellis-coded quantisation: Marcellin & Fischer, 1990; the codes: Ungerboeck, 1982.

Columns of half a bit more or less (0.5, 1.5, …) come in pairs that share one coded bit. The second column of a pair has
a code of its own, so the bits around say two subsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdefine.ops import only_values
from torchdefine.tables.few_rows import MOST_BITS, FewRows
from torchdefine.tables.fields import pack, packed_width, unpack
from torchdefine.tables.rows import Rows, frozen, stored_as

CODES = {4: (0o04, 0o23, 0o35, 0o27), 6: (0o024, 0o103, 0o133, 0o171), 8: (0o362, 0o515, 0o753, 0o561)}
"""By memory: taps of the low and of the high bit of a subset's number, and of the number of a pair's second column; the
lowest tap is the column's own bit."""
SUBSETS = 4
PAIRED = 8
"""So far apart are the two columns of a pair: bytes of coded bits then hold the bits of whole bytes of choices."""
FITTED_ON = 512
"""Rows that levels are fitted to."""
FITTINGS = 4
NUMBERS_AT_ONCE = 1 << 18
"""Costs of paths that the encoder holds at once: what a core's cache holds."""

Runs = Sequence[Sequence[float]]
"""[bits, columns] from left to right. Columns of halves of bits come in sixteens."""


def within_bits(bits: float) -> int:
    """How many bits of a column choose within its subset."""
    return math.ceil(bits) - 1


def coded_bits(bits: float, columns: int) -> int:
    """How many coded bits such columns have."""
    return columns if bits == int(bits) else columns // 2


class TrellisRows(Rows):
    """Columns come in ``runs`` of [bits, columns]; a number is one of its run's levels × its column's scale."""

    kind = "trellis"

    def __init__(self, num_rows: int, runs: Runs, memory: int = 8) -> None:
        super().__init__(num_rows, sum(int(columns) for _, columns in runs))
        self.runs: list[Any] = [[bits, int(columns)] for bits, columns in runs]
        self.memory, self.own_codes = memory, num_rows * self.width
        whole = all(columns % 8 == 0 and bits <= MOST_BITS for bits, columns in self.runs)
        self.together = few_together if whole else None
        self.coded = sum(coded_bits(*run) for run in self.runs)
        within = sum(packed_width(columns, within_bits(bits)) for bits, columns in self.runs)
        self.codes: Tensor = nn.Buffer(torch.zeros(num_rows, packed_width(self.coded, 1) + within, dtype=torch.uint8))
        self.levels = frozen(torch.zeros(sum(map(self._level_count, self.runs)), dtype=torch.float16))
        self.scales = frozen(torch.zeros(self.width, dtype=torch.float16))

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        packed, start = torch.embedding(self.codes, rows), packed_width(self.coded, 1)
        chosen = self._subset(packed[..., :start]) + self.constant(self.first_levels, torch.int32)
        parts = []
        for bits, columns in self.runs:
            own = within_bits(bits)
            stop = start + packed_width(columns, own)
            held = packed[..., start:stop]
            parts.append(unpack(held, own, columns) if own else held.new_zeros(()).expand(*rows.shape, columns))
            start = stop
        chosen = chosen + SUBSETS * torch.cat(parts, dim=-1).int()  # (…, width)
        levels = self.constant(lambda: self.levels.to(dtype), dtype, self.levels)
        return levels.index_select(0, chosen.reshape(-1)).view(chosen.shape) * self.scales.to(dtype)

    def first_levels(self) -> Tensor:
        """Where the levels of each column begin, (width,)."""
        starts = accumulate(map(self._level_count, self.runs), initial=0)
        numbers = [start for start, (_, columns) in zip(starts, self.runs, strict=False) for _ in range(columns)]
        return torch.tensor(numbers, dtype=torch.int32, device=self.codes.device)

    def sharing(self) -> list[list[int]]:
        """The columns of each coded bit: one, or two."""
        found: list[list[int]] = []
        start = 0
        for bits, columns in self.runs:
            own = torch.arange(start, start + columns)
            paired = coded_bits(bits, columns) < columns
            found += (own.view(-1, 2, PAIRED).transpose(1, 2).flatten(0, 1) if paired else own.unsqueeze(1)).tolist()
            start += columns
        return found

    @staticmethod
    def _level_count(run: Sequence[Any]) -> int:
        return SUBSETS << within_bits(run[0])

    def _subset(self, packed: Tensor) -> Tensor:
        """The number of each column's subset, (…, width)."""
        paired = self.coded < self.width
        numbers = [self._numbers(packed, second) for second in ((False, True) if paired else (False,))]  # (…, coded)
        if not paired:
            return numbers[0]
        parts, start = [], 0
        for run in self.runs:
            stop = start + coded_bits(*run)
            own = [number[..., start:stop] for number in numbers]
            if stop - start < run[1]:
                own[0] = torch.stack([one.unflatten(-1, (-1, PAIRED)) for one in own], -2).flatten(-3)
            parts.append(own[0])
            start = stop
        return torch.cat(parts, dim=-1)

    def _numbers(self, packed: Tensor, second: bool) -> Tensor:
        """What the bits around each coded bit say, of its column or of the second of its two, (…, coded)."""
        if packed.is_cpu and only_values(packed):
            of_own, of_following = subsets_of_bytes(self.memory, second)
            own, following = packed.int(), F.pad(packed[..., 1:], (0, 1)).int()
            numbers = of_own.index_select(0, own.view(-1)) ^ of_following.index_select(0, following.view(-1))
            return numbers.view(torch.uint8).view(*own.shape[:-1], 8 * own.shape[-1])[..., : self.coded]
        coded = F.pad(unpack(packed, 1, self.coded), (0, self.memory))
        made: list[Any] = []
        for taps in CODES[self.memory][2 * second : 2 * second + 2]:
            ones = [tap for tap in range(self.memory + 1) if taps >> tap & 1]
            made.append(sum(coded[..., tap : tap + self.coded] for tap in ones) % 2)
        found: Tensor = 2 * made[1] + made[0]
        return found


def few_together(bands: Sequence[TrellisRows], flat: Tensor, dtype: torch.dtype) -> FewRows:
    """``flat`` has the codes of all bands, which have one memory."""
    both = zip(*(subsets_of_bytes(bands[0].memory, second) for second in (False, True)), strict=True)
    of_own, of_following = (torch.cat(some) for some in both)
    return FewRows.of(bands, flat, (of_own, of_following), SUBSETS, dtype)


@torch.no_grad()
def trellis_rows(matrix: Tensor, runs: Runs, memory: int = 8) -> TrellisRows:
    """Round a matrix; each run's levels are fitted to its numbers, each column is scaled to a mean square of one."""
    made = TrellisRows(len(matrix), runs, memory)
    if matrix.is_meta:  # only to see what they would take
        return made
    made.to(matrix.device)
    squares = sum(chunk.float().square().sum(0) for chunk in matrix.split(FITTED_ON)) / len(matrix)
    made.scales.copy_(stored_as(torch.as_tensor(squares).sqrt().clamp(min=1e-7), torch.float16))
    some = matrix[:: -(-len(matrix) // FITTED_ON)].float() / made.scales.float()
    levels = [_start_levels(bits).to(matrix.device) for bits, _ in made.runs]
    for _ in range(FITTINGS):
        chosen = torch.cat([_Path(part, made, levels).chosen for part in _parts(some, memory)])
        levels = [
            _refitted(old, numbers, codes)
            for old, numbers, codes in zip(levels, _by_run(some, runs), _by_run(chosen, runs), strict=True)
        ]
    levels = [stored_as(one, torch.float16) for one in levels]
    made.levels.copy_(torch.cat(levels))
    start = 0
    for part in _parts(matrix, memory):
        path = _Path(part.float() / made.scales.float(), made, [one.float() for one in levels])
        by_run = zip(runs, _by_run(path.chosen, runs), strict=True)
        within = [pack(chosen // SUBSETS, own) for (bits, _), chosen in by_run if (own := within_bits(bits))]
        made.codes[start : start + len(part)] = torch.cat([pack(path.coded, 1), *within], dim=-1)
        start += len(part)
    return made


class _Path:
    """The best path for each row of a matrix: the number of every column's level, (rows, width), and its coded bits."""

    def __init__(self, matrix: Tensor, rows: TrellisRows, levels: Sequence[Tensor]) -> None:
        first, second = (_subset_numbers(rows.memory, two).to(matrix.device) for two in (False, True))
        self.subsets, self.pairs = (first, second), SUBSETS * first + second  # (2 × states,)
        self.states, self.matrix, self.sharing = 1 << rows.memory, matrix, rows.sharing()
        self.levels = [some for some, (_, columns) in zip(levels, rows.runs, strict=True) for _ in range(columns)]
        self.chosen = torch.empty(matrix.shape, dtype=torch.int32, device=matrix.device)
        self.coded = self.chosen.new_empty(len(matrix), rows.coded)
        self._trace(*self._search())

    def _search(self) -> tuple[Tensor, list[Tensor], list[list[Tensor]]]:
        """From the last column, the least important, to the first: the state reached at least cost, and for each coded
        bit the choice between two ways to a state, and its columns' best levels of the four subsets."""
        count = len(self.matrix)
        cost = self.matrix.new_full((self.states, count), torch.inf)
        cost[0] = 0
        from_upper: list[Tensor] = []
        nearest: list[list[Tensor]] = []
        for columns in reversed(self.sharing):
            near, losses = zip(*map(self._near, columns), strict=True)
            if len(columns) == 1:
                loss = losses[0].index_select(0, self.subsets[0])
            else:
                loss = (losses[0].unsqueeze(1) + losses[1]).flatten(0, 1).index_select(0, self.pairs)
            # lower and upper half of the states before, each to two
            ways = cost.view(2, -1, 1, count) + loss.view(2, -1, 2, count)
            from_upper.append((ways[1] < ways[0]).view(-1, count))
            cost = torch.minimum(ways[0], ways[1]).view(-1, count)  # (states, rows)
            nearest.append(list(near))
        return cost.argmin(0), from_upper[::-1], nearest[::-1]

    def _near(self, column: int) -> tuple[Tensor, Tensor]:
        """The best level of each subset, and what it loses, (4, rows)."""
        numbers, levels = self.matrix[:, column].contiguous(), self.levels[column]
        near = torch.stack([_nearest(numbers, levels, one) for one in range(SUBSETS)])
        return near, (numbers - levels[near]).square()

    def _trace(self, state: Tensor, from_upper: list[Tensor], nearest: list[list[Tensor]]) -> None:
        for bit, (columns, upper, near) in enumerate(zip(self.sharing, from_upper, nearest, strict=True)):
            window = state + self.states * upper.gather(0, state.unsqueeze(0)).squeeze(0)
            for column, some, subset in zip(columns, near, self.subsets, strict=False):
                self.chosen[:, column] = some.gather(0, subset[window].unsqueeze(0)).squeeze(0)
            self.coded[:, bit] = window & 1
            state = window >> 1


def _nearest(numbers: Tensor, levels: Tensor, subset: int) -> Tensor:
    """The number of the nearest level that belongs to a subset."""
    own = levels[subset::SUBSETS]
    return torch.bucketize(numbers, (own[1:] + own[:-1]) / 2) * SUBSETS + subset


def _subset_numbers(memory: int, second: bool) -> Tensor:
    """The subset for each window of ``memory`` + 1 coded bits, the own bit lowest: of a column or a pair's second."""
    windows = range(2 << memory)
    low, high = CODES[memory][2 * second : 2 * second + 2]
    return torch.tensor([2 * ((one & high).bit_count() % 2) + (one & low).bit_count() % 2 for one in windows])


@lru_cache(maxsize=2 * len(CODES))
def subsets_of_bytes(memory: int, second: bool) -> tuple[Tensor, Tensor]:
    """What a byte of coded bits says of the subsets of its own eight columns, and of those of the byte before, (256,).
    With ``second`` of those that share their coded bits as the second of a pair.

    The numbers of eight subsets are one whole number. They are parities, so the two parts are joined by exclusive or.
    """
    with torch.inference_mode(False), torch.device("cpu"):
        byte = torch.arange(256).unsqueeze(1)
        windows = [word >> torch.arange(8) & ((2 << memory) - 1) for word in (byte, byte << 8)]
        numbers = _subset_numbers(memory, second).to(torch.uint8)
        own, following = (numbers[one].view(torch.int64).squeeze(1) for one in windows)
    return own, following


def _start_levels(bits: float) -> Tensor:
    """Quantiles of a normal variable a little wider than the numbers are."""
    count = SUBSETS << within_bits(bits)
    return torch.erfinv(2 * (torch.arange(count) + 0.5) / count - 1) * (1.3 * 2**0.5)


def _refitted(levels: Tensor, numbers: Tensor, chosen: Tensor) -> Tensor:
    """Each level at the mean of the numbers that chose it."""
    chosen, numbers = chosen.flatten(), numbers.flatten()
    sums = torch.zeros_like(levels).index_add_(0, chosen, numbers)
    masses = torch.zeros_like(levels).index_add_(0, chosen, torch.ones_like(numbers))
    return torch.where(masses > 0, sums / masses.clamp(min=1), levels).sort().values


def _by_run(matrix: Tensor, runs: Runs) -> tuple[Tensor, ...]:
    return matrix.split([int(columns) for _, columns in runs], dim=-1)


def _parts(matrix: Tensor, memory: int) -> Iterator[Tensor]:
    """Rows that the encoder treats together."""
    yield from matrix.split(max(NUMBERS_AT_ONCE >> (memory + 1), 1))
