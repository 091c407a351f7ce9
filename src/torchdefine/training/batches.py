"""What the loop expects of its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """The data of one forward and backward pass; a step adds up the gradients of its parts."""

    inputs: tuple[Tensor, ...]
    """The first arguments of the model's forward; the carried state and the hint follow."""
    host_targets: np.ndarray
    """The targets as the host has them, for the model's ``host_hint``."""
    weight: float = 1.0
    """The part's weight in the step's loss."""


@dataclass(frozen=True)
class Batch:
    """The data of one step, for one process."""

    parts: list[Part]
    tokens: int
    """How many tokens this process predicts."""
    rate: float = 1.0
    """Multiplies the learning rate."""
    begins_text: bool = False
    """Whether the carried state starts anew."""
    place: str = ""
    """Where in the data this is, for a message about it."""


class TrainingData(Protocol):
    """Batches by step, always the same for the same step, so that an interrupted run can go on."""

    total_steps: int
    rows_per_part: int
    """How many rows of carried state each part has."""
    steps_per_epoch: float
    """How many steps one epoch of a schedule is."""

    def batch(self, step: int) -> Batch:
        """The data of step ``step``, counted from 0."""
        ...

    def epoch_after(self, steps: int) -> float:
        """How many passes over the data that many steps are; a whole number exactly at the end of a pass."""
        ...
