"""Rows as codes into small codebooks: sums of entries (compositional codes), chunks of them (product codes), both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.inference.packing import pack, packed_width, unpack
from torchdefine.inference.rows import Rows, float_type, frozen, stored_as


class CodedRows(Rows):
    """A row is cut into ``parts`` chunks, and each chunk is a sum of one entry from each of ``stages`` codebooks.

    One part with M stages is the compositional code of Shu and Nakayama; M parts with one stage are product
    quantisation. Codes are packed: 4 bits each for 16 entries.
    """

    kind = "codes"

    def __init__(
        self, num_rows: int, width: int, parts: int, stages: int, entries: int, dtype: str = "float16"
    ) -> None:
        super().__init__(num_rows, width)
        if not (2 <= entries <= 256 and entries & (entries - 1) == 0):
            raise UserError(f"A codebook of {entries} entries cannot be packed: use a power of two from 2 to 256.")
        if width % parts:
            raise UserError(f"Rows {width} wide cannot be cut into {parts} equal parts: use a divisor of {width}.")
        if stages < 1:
            raise UserError(f"stages is {stages}, but must be at least 1.")
        self.parts, self.stages, self.entries, self.dtype = parts, stages, entries, dtype
        self.bits = entries.bit_length() - 1
        self.register_buffer("codes", torch.zeros(num_rows, packed_width(parts * stages, self.bits), dtype=torch.uint8))
        self.codes: Tensor
        books = torch.zeros(parts, stages, entries, width // parts, dtype=float_type(dtype))
        self.codebooks = frozen(books)

    @classmethod
    def of(cls, codes: Tensor, codebooks: Tensor, dtype: str = "float16") -> CodedRows:
        """From codes (V, parts, stages) and codebooks (parts, stages, entries, width / parts)."""
        parts, stages, entries, chunk = codebooks.shape
        made = cls(len(codes), parts * chunk, parts, stages, entries, dtype)
        made.codes = pack(codes.flatten(1), made.bits)
        made.codebooks = frozen(stored_as(codebooks, float_type(dtype)).clone())
        return made

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        books = self.parts * self.stages
        codes = unpack(self.codes[rows], self.bits, books).long()  # (…, books)
        entries = codes + torch.arange(0, books * self.entries, self.entries, device=codes.device)
        chunks = torch.nn.functional.embedding(entries, self.codebooks.flatten(0, 2).to(dtype))  # (…, books, chunk)
        return chunks.unflatten(-2, (self.parts, self.stages)).sum(-2).flatten(-2)  # (…, width)

    def unpacked(self) -> Tensor:
        """All codes, (V, parts, stages)."""
        codes = unpack(self.codes, self.bits, self.parts * self.stages).long()
        return codes.unflatten(-1, (self.parts, self.stages))

    @property
    def num_codes(self) -> int:
        return self.num_rows * self.parts * self.stages

    def config(self) -> dict[str, Any]:
        names = ("num_rows", "width", "parts", "stages", "entries", "dtype")
        return {name: getattr(self, name) for name in names}
