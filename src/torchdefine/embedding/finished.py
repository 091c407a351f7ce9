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


def tensors_of(*parts: object) -> Iterator[Tensor]:
    """The parameters and buffers of those that are modules."""
    for part in parts:
        if isinstance(part, nn.Module):
            yield from chain(part.parameters(), part.buffers())
