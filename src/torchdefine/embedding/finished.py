"""The finished vectors of all tokens at once, for an output layer that is tied to them: to be trained, or kept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdefine.embedding.table import TOKENS_AT_ONCE
from torchdefine.embedding.unit import DefineUnit, DenseMLP, DenseProjection

RECOMPUTED = (DefineUnit, DenseMLP, DenseProjection)
"""Units that give the same vectors a second time: what they draw is drawn before."""


def through_unit(unit: nn.Module, mapped: Tensor) -> Tensor:
    """(V, n) → (V, m), ``TOKENS_AT_ONCE`` rows at a time.

    Backward computes a part of the rows again, so that only one part's layers are in memory at a time. What dropout
    keeps is drawn once, a byte for each feature. Somebody else's unit keeps all of its layers' outputs.
    """
    parts = mapped.split(TOKENS_AT_ONCE)
    again = len(parts) > 1 and torch.is_grad_enabled() and type(unit) in RECOMPUTED
    finished: list[Tensor] = []
    for part in parts:
        if not again:
            finished.append(unit(part))
        else:
            kept = unit.drawn(len(part), part.device) if isinstance(unit, DefineUnit) else None
            settings: Any = {"use_reentrant": False, "preserve_rng_state": False}
            finished.append(checkpoint(unit, part, *([] if kept is None else [None, kept]), **settings))
    return finished[0] if len(finished) == 1 else torch.cat(finished)


class Kept:
    """A table and the tensors that it was made from. It holds until one of them is written to or replaced."""

    def __init__(self) -> None:
        self._kept: tuple[list[tuple[Tensor, int]], Tensor] | None = None

    def __reduce__(self) -> Any:
        return Kept, ()  # a copy has other weights

    def table(self, *parts: object) -> Tensor | None:
        """The table, if it was made from these parts as they are now."""
        if self._kept is None:
            return None
        (before, table), now = self._kept, list(_versions(*parts))
        same = len(before) == len(now) and all(a is b and v == w for (a, v), (b, w) in zip(before, now, strict=True))
        return table if same else None

    def keep(self, table: Tensor, *parts: object) -> Tensor:
        self._kept = list(_versions(*parts)), table
        return table


def _versions(*parts: object) -> Iterator[tuple[Tensor, int]]:
    """The tensors of modules, and how often each has been written to."""
    modules = (part for part in parts if isinstance(part, nn.Module))
    for tensor in chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules):
        yield tensor, 0 if tensor.is_inference() else tensor._version
