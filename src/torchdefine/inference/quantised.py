"""Rows rounded to a few bits, in groups that share a float16 step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.files import Progress
from torchdefine.inference.packing import pack, packed_width, unpack
from torchdefine.inference.rows import FLOATS, DenseRows, Rows, frozen, stored_as

STORAGES = (*FLOATS, *(f"int{bits}" for bits in range(8, 0, -1)))
"""How rows can be held, by name."""
ROWS_AT_ONCE = 8_192
_CLIPS = {1: (0.6, 1.1), 2: (0.5, 1.0), 3: (0.6, 1.0), 4: (0.7, 1.0)}  # where the best step lies, by bits
_STEPS_TRIED = 12


class QuantisedRows(Rows):
    """Each number is one of 2^bits levels, evenly spaced around zero: (code - (2^bits - 1) / 2) × the group's step."""

    kind = "quantised"

    def __init__(self, num_rows: int, width: int, bits: int = 4, group_size: int = 32) -> None:
        super().__init__(num_rows, width)
        if not group_size >= 1:
            raise UserError(f"group_size is {group_size}, but must be at least 1: use 32, say.")
        self.bits, self.group_size = bits, min(group_size, width)
        self.num_groups = -(-width // self.group_size)
        self.register_buffer("codes", torch.zeros(num_rows, packed_width(width, bits), dtype=torch.uint8))
        self.steps = frozen(torch.zeros(num_rows, self.num_groups, dtype=torch.float16))
        self.codes: Tensor

    def forward(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        codes = unpack(self.codes[rows], self.bits, self.width).to(dtype)  # (…, width)
        steps = self.steps[rows].to(dtype)  # (…, groups)
        spread = steps.repeat_interleave(self.group_size, dim=-1)[..., : self.width]
        return (codes - (2**self.bits - 1) / 2) * spread

    @property
    def num_codes(self) -> int:
        return self.num_rows * self.width

    def config(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "width": self.width, "bits": self.bits, "group_size": self.group_size}


@torch.no_grad()
def quantise_rows(
    matrix: Tensor, bits: int = 4, group_size: int = 32, progress: Progress | None = None
) -> QuantisedRows:
    """Round a matrix, each group with the step that loses least: (V, m) → QuantisedRows."""
    made = QuantisedRows(len(matrix), matrix.shape[1], bits, group_size).to(matrix.device)
    for start in range(0, len(matrix), ROWS_AT_ONCE):
        chunk = matrix[start : start + ROWS_AT_ONCE].float()
        spare = made.num_groups * made.group_size - made.width
        grouped = torch.nn.functional.pad(chunk, (0, spare)).unflatten(-1, (made.num_groups, made.group_size))
        steps = stored_as(best_steps(grouped, bits), torch.float16)  # (rows, groups)
        codes = nearest_codes(grouped, steps.float().unsqueeze(-1), bits).flatten(-2)[:, : made.width]
        made.codes[start : start + len(chunk)] = pack(codes, bits)
        made.steps[start : start + len(chunk)] = steps
        if progress:
            progress(start + len(chunk), len(matrix))
    return made


def nearest_codes(values: Tensor, steps: Tensor, bits: int) -> Tensor:
    """The whole numbers whose levels are nearest; any if the step is zero."""
    half = (2**bits - 1) / 2
    return (values / steps.clamp(min=1e-12) + half).round().clamp(0, 2**bits - 1).to(torch.int32)


def best_steps(grouped: Tensor, bits: int) -> Tensor:
    """The step of each group, (…, group) → (…), by trying some and fitting the best by least squares."""
    half = (2**bits - 1) / 2
    largest = grouped.abs().amax(-1)
    low, high = _CLIPS.get(bits, (0.85, 1.0))
    best, least = largest / half, torch.full_like(largest, torch.inf)
    for clip in torch.linspace(low, high, _STEPS_TRIED).tolist():
        step = largest * clip / half
        for _ in range(2):  # a second time with the step that fits the codes of the first
            levels = nearest_codes(grouped, step.unsqueeze(-1), bits) - half
            step = (levels * grouped).sum(-1) / levels.square().sum(-1).clamp(min=1e-12)
        error = (grouped - levels * step.unsqueeze(-1)).square().sum(-1)
        best, least = torch.where(error < least, step, best), torch.minimum(error, least)
    return best


def stored_rows(matrix: Tensor, how: str, group_size: int = 32) -> Rows:
    """Rows as ``float32``, ``float16``, ``bfloat16``, or ``int8`` … ``int1`` in groups."""
    if how in FLOATS:
        return DenseRows.of(matrix, how)
    if how in STORAGES:
        return quantise_rows(matrix, int(how.removeprefix("int")), group_size)
    raise UserError(f"Rows cannot be stored as {how!r}: use one of {', '.join(STORAGES)}.")
