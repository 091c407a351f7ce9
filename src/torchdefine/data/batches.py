"""Language-model batches: a token stream cut into rows that are read side by side, from left to right.

Shapes: B rows (the batch), L tokens in each row, T tokens in a segment.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from torchdefine.errors import UserError

IGNORE = -100
"""The target of padding; PyTorch's losses leave it out by default."""


class TokenStreams:
    """The first B · L of N tokens as B contiguous rows, L = N // B; each of them is a target exactly once.

    A row's first input is the token before its first target; for row 0 it is ``start_token``, normally ``<eos>``.
    ``rows`` keeps only some of the B rows, for one of several processes (see ``shard``). With ``pad`` no token is
    left over: L is rounded up, and the last rows are padded (see ``evaluation_streams``).
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        device: torch.device | str,
        start_token: int,
        rows: slice | None = None,
        *,
        pad: bool = False,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"The batch size is {batch_size}, but must be at least 1.")
        length = math.ceil(len(tokens) / batch_size) if pad else len(tokens) // batch_size
        if length < 1:
            raise UserError(
                f"The text has {len(tokens)} tokens, too few for a batch of {batch_size}: "
                "use a smaller batch size (train.batch_size) or a longer text."
            )
        kept = range(batch_size) if rows is None else range(batch_size)[rows]
        if not kept:
            raise UserError(f"The rows {rows} leave nothing of a batch of {batch_size}: use a larger batch size.")
        held = _lay_out(tokens, length, start_token, kept)
        self.length = length
        self.batch_size = len(kept)
        self._start_token = start_token
        self._padded = bool((held[:, -1] == IGNORE).any())
        self._host = held
        self._streams = torch.from_numpy(held).to(device)  # (B, L + 1)

    def segment(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (int64) for ``length`` tokens of each row from ``start`` on, fewer at the rows' end."""
        if not 0 <= start < self.length:
            raise IndexError(f"The segment starts at {start}, but the rows have {self.length} tokens.")
        end = min(start + length, self.length)
        inputs = self._streams[:, start:end].long()  # (B, T)
        targets = self._streams[:, start + 1 : end + 1].long()  # (B, T)
        if self._padded:
            inputs = inputs.masked_fill(inputs == IGNORE, self._start_token)
        return inputs, targets

    def host_targets(self, start: int, length: int) -> np.ndarray:
        """The targets of the same segment on the host, for callers that must not wait for the device."""
        return self._host[:, start + 1 : min(start + length, self.length) + 1]


def evaluation_streams(
    tokens: np.ndarray, batch_size: int, start_token: int, device: torch.device | str
) -> TokenStreams:
    """All N tokens as B rows, L = ⌈N / B⌉: every token is a target exactly once.

    The rest of the last rows is padding, with ``start_token`` as its inputs and ``IGNORE`` as its targets.
    """
    return TokenStreams(tokens, batch_size, device, start_token, pad=True)


def shard(batch_size: int, rank: int, world_size: int) -> slice:
    """The rows of a global batch for process ``rank`` of ``world_size``; together they see all of it."""
    if batch_size % world_size:
        lower = batch_size // world_size * world_size
        options = f"{lower} or {lower + world_size}" if lower else f"{world_size}"
        raise UserError(f"The batch size {batch_size} is not divisible by the {world_size} processes: use {options}.")
    if not 0 <= rank < world_size:
        raise UserError(f"The rank {rank} is not one of the {world_size} processes: use 0 to {world_size - 1}.")
    share = batch_size // world_size
    return slice(rank * share, (rank + 1) * share)


def _lay_out(tokens: np.ndarray, length: int, start_token: int, rows: range) -> np.ndarray:
    """Rows of one input and ``length`` targets; places beyond the last token are ``IGNORE``."""
    held = np.full((len(rows), length + 1), IGNORE, dtype=np.int32)  # half the memory of int64, and ids fit
    for row, index in zip(held, rows, strict=True):
        start = index * length
        targets = tokens[start : start + length]
        row[1 : 1 + len(targets)] = targets
        if len(targets):
            row[0] = tokens[start - 1] if start else start_token
    return held
