"""Rows of a few bits a number, trellis-coded: the bits of a row are one string, and neighbours share them.

A column of k bits has k bits of the string as its own. Its *window* is the ``memory`` bits that begin there and run on
into those of the next columns, and from the row's end into its beginning. A codebook for k bits has a value for every
window: the number is that value × the column's scale. The encoder searches for the string that loses least (Viterbi),
so rows lose much less than if every number had levels of its own. Trellis-coded quantisation: Marcellin & Fischer,
1990; windows: Tseng et al. (QTIP), 2024.

Columns of halves of bits (0.5, 1.5, …) come in pairs, side by side, that share a window of 2k own bits. Each of the two
has a codebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from torchdefine.sealed_tensors import reading_safetensors
from torchdefine.tables.rows import Rows, frozen

BITS = (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
BOOKS = 16
"""A codebook for each of these, two for those of pairs."""
MEMORIES = {12: 1 << 24, 10: 1 << 28, 8: 1 << 62}
"""By memory, the numbers up to which coding a table takes a few minutes at most."""
CODEBOOKS = "codebooks.safetensors"
WORD = 24
"""Bits in which a window lies, wherever in a byte it begins."""

Runs = Sequence[Sequence[float]]
"""[bits, columns] from left to right. Columns of halves of bits come in twos."""


class Step(NamedTuple):
    """A window of a row."""

    first: int
    """Where it begins in the row's bits."""
    own: int
    columns: int
    """One, or two."""
    book: int
    """The codebook of its first column; that of the second one follows."""


def steps_of(runs: Runs) -> list[Step]:
    """The windows of a row, from left to right."""
    found, first = [], 0
    for bits, columns in runs:
        each = 1 if bits == int(bits) else 2
        book = sum(1 if smaller == int(smaller) else 2 for smaller in BITS if smaller < bits)
        for _ in range(int(columns) // each):
            found.append(Step(first, int(bits * each), each, book))
            first += found[-1].own
    return found


class FewRows(NamedTuple):
    """What decodes a few rows out of many bands by as many operations as one band needs.

    A column that a band does not have is a number of scale zero.
    """

    flat: Tensor
    """The codes of all bands, one after another."""
    ends: Tensor
    """The first row after each band, (bands,)."""
    starts: Tensor
    """The bytes of a row, and where row 0 of all bands would begin if they had so many, (bands, 2)."""
    bytes: Tensor
    """Numbers of a row's bytes, and again those of the first two, (bands, bytes)."""
    columns: Tensor
    """Of every column the byte where its window begins, how far to shift it, and where its codebook begins,
    (bands, 3, width)."""
    mask: int
    books: Tensor
    scales: Tensor  # (bands, width)

    @classmethod
    def of(cls, bands: Sequence[Any], flat: Tensor, dtype: torch.dtype) -> FewRows:
        width, memory = max(band.width for band in bands), bands[0].memory
        row_bytes = torch.tensor([band.codes.shape[1] for band in bands])
        rows = torch.tensor([band.num_rows for band in bands])
        used = rows * row_bytes
        places = torch.arange(int(row_bytes.max()) + 2) % row_bytes.unsqueeze(1)
        return cls(
            flat=flat,
            ends=rows.cumsum(0),
            starts=torch.stack([row_bytes, used.cumsum(0) - used - (rows.cumsum(0) - rows) * row_bytes], 1),
            bytes=places.to(torch.int32 if len(flat) < 2**31 else torch.int64),
            columns=torch.stack([F.pad(band.columns(), (0, width - band.width)) for band in bands]),
            mask=2**memory - 1,
            books=codebooks(memory, flat.device),
            scales=torch.stack([F.pad(band.scales.to(dtype), (0, width - band.width)) for band in bands]),
        )

    def decoded(self, place: Tensor) -> Tensor:
        """(T,) → (T, width)."""
        band = torch.bucketize(place, self.ends, right=True)  # (T,)
        starts = self.starts.index_select(0, band)
        begin = torch.addcmul(starts[:, 1], place, starts[:, 0]).to(self.bytes.dtype)
        where = self.bytes.index_select(0, band).add_(begin.unsqueeze(1))  # (T, bytes)
        held = words_of(self.flat.index_select(0, where.view(-1)).view(where.shape), 1)
        byte, shift, book = self.columns.index_select(0, band).unbind(1)  # (T, width)
        byte = byte + torch.arange(0, held.numel(), held.shape[1], dtype=torch.int32).unsqueeze(1)
        windows = held.reshape(-1).index_select(0, byte.view(-1)).view(byte.shape)
        windows.bitwise_right_shift_(shift).bitwise_and_(self.mask).add_(book)
        values = self.books.index_select(0, windows.view(-1)).view(windows.shape)
        return values.to(self.scales.dtype).mul_(self.scales.index_select(0, band))


class TrellisRows(Rows):
    """Columns come in ``runs`` of [bits, columns]; windows of ``memory`` bits decide their values."""

    kind = "trellis"
    together = FewRows.of

    def __init__(self, num_rows: int, runs: Runs, memory: int = 12) -> None:
        super().__init__(num_rows, sum(int(columns) for _, columns in runs))
        self.runs: list[Any] = [[bits, int(columns)] for bits, columns in runs]
        self.memory, self.own_codes = memory, num_rows * self.width
        held = sum(step.own for step in steps_of(runs))
        if held % 8:
            raise ValueError(f"{held} bits of a row do not fill whole bytes")
        self.codes: Tensor = nn.Buffer(torch.zeros(num_rows, held // 8, dtype=torch.uint8))
        self.scales = frozen(torch.zeros(self.width, dtype=torch.float16))

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        byte, shift, book = self.constant(self.columns, torch.int32, self.codes)
        packed = torch.embedding(self.codes, rows.reshape(-1)).T.contiguous()  # columns first: whole rows are copied
        held = words_of(torch.cat([packed, packed[:1], packed[min(1, len(packed) - 1) :][:1]]), 0)
        windows = held.index_select(0, byte)  # (width, T)
        windows = windows.bitwise_right_shift_(shift.unsqueeze(1)).bitwise_and_(2**self.memory - 1)
        windows += book.unsqueeze(1)
        values = codebooks(self.memory, packed.device).index_select(0, windows.view(-1)).view(windows.shape).to(dtype)
        scales = self.scales.to(dtype).unsqueeze(1)
        values = values * scales if scales.requires_grad else values.mul_(scales)
        return values.T.reshape(*rows.shape, self.width)

    def columns(self) -> Tensor:
        """Of every column the byte where its window begins, how far to shift the word that begins there, and where its
        codebook begins, (3, width)."""
        found = [
            (step.first // 8, WORD - self.memory - step.first % 8, (step.book + column) << self.memory)
            for step in steps_of(self.runs)
            for column in range(step.columns)
        ]
        return torch.tensor(found, dtype=torch.int32, device=self.codes.device).T.contiguous()


def words_of(held: Tensor, dim: int) -> Tensor:
    """Bytes and the two after each as whole numbers, so two fewer along ``dim``."""
    held = held.int()
    count = held.shape[dim] - 2
    high, middle, low = (held.narrow(dim, start, count) for start in range(3))
    return torch.add(low, torch.add(middle, high, alpha=256), alpha=256)


def codebooks(memory: int, device: torch.device) -> Tensor:
    """The values of all windows, one codebook after another; no part of any module, so nobody changes its precision."""
    return _codebooks(memory, device)


codebooks._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""What ``torch.compiler.assume_constant_result`` does; it would import the compiler."""


@cache
def _codebooks(memory: int, device: torch.device) -> Tensor:
    with _disable_current_modes(), torch.inference_mode(False), torch.device("cpu"):
        return shipped(f"values {memory}").float().flatten().to(device)


@cache
def losses(memory: int) -> tuple[float, ...]:
    """What is left of a normal variable's variance, by ``BITS``."""
    with _disable_current_modes(), torch.inference_mode(False), torch.device("cpu"):
        return tuple(shipped(f"losses {memory}").tolist())


def shipped(name: str) -> Tensor:
    said = {"if_missing": "install torchdefine again", "if_damaged": "install torchdefine again"}
    with reading_safetensors(Path(__file__).with_name(CODEBOOKS), **said) as file:
        found: Tensor = file.read()[name]
    return found


def memory_for(numbers: int) -> int:
    """The longest memory that codes so many numbers in a few minutes."""
    return next(memory for memory, most in MEMORIES.items() if numbers <= most)
