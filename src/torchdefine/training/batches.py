"""What the loop expects of its data, and language-model text in that form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from torchdefine.data import SegmentPlan, TokenStreams
from torchdefine.recipe import TrainSettings


@dataclass(frozen=True)
class Part:
    """The data of one forward and backward pass; a step adds up the gradients of its parts."""

    inputs: tuple[Tensor, ...]
    """The first arguments of the model's forward; the carried state and the hint follow."""
    host_targets: np.ndarray
    """The targets as the host has them, for the model's ``host_hint``."""
    weight: float = 1.0
    """The part's share of the step's loss."""


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


class TextBatches:
    """Streams of text read side by side, segment after segment, with the state carried over."""

    def __init__(self, streams: TokenStreams, settings: TrainSettings) -> None:
        self.streams, self.parts = streams, settings.accumulate
        self.length = settings.length
        self.plan = SegmentPlan(streams.length, settings.length, settings.seed if settings.random_length else None)
        self.total_steps = settings.steps or self.plan.steps_in(settings.epochs or 0)
        self.steps_per_epoch = float(self.plan.steps_in(1))
        self.rows_per_part = streams.batch_size // self.parts

    def batch(self, step: int) -> Batch:
        segment = self.plan.segment(step)
        inputs, targets = self.streams.segment(segment.start, segment.length)  # (B, T)
        host_targets = self.streams.host_targets(segment.start, segment.length)
        share = self.rows_per_part
        rows = [slice(part * share, (part + 1) * share) for part in range(self.parts)]
        return Batch(
            [Part((inputs[r], targets[r]), host_targets[r], 1 / self.parts) for r in rows],
            tokens=host_targets.size,
            # A varied length must not change how much each token moves the weights.
            rate=segment.length / self.length if self.plan.seed is not None else 1.0,
            begins_text=segment.begins_epoch,
            place=f"{segment.length} tokens from token {segment.start} of every stream",
        )

    def epoch_after(self, steps: int) -> float:
        return self.plan.epoch_after(steps)
