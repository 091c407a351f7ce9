"""Text in the form that the training loop expects."""

from __future__ import annotations

from dataclasses import dataclass

from torchdefine.config import setting
from torchdefine.data import SegmentPlan, TokenStreams
from torchdefine.training.batches import Batch, Part
from torchdefine.training.loop import TrainConfig


@dataclass(frozen=True)
class LanguageTrainConfig(TrainConfig):
    """How a language model is trained."""

    batch_size: int = setting(32, "Streams of text read side by side, over all processes.", at_least=1)
    length: int = setting(70, "Tokens of each stream in a step (truncated back-propagation).", at_least=1)
    random_length: bool = setting(
        False,
        "Vary segment lengths around train.length, anew every epoch, and scale the learning rate with them.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.batch_size % self.accumulate == 0,
            f"batch_size {self.batch_size} cannot be cut into {self.accumulate} equal parts.",
        )


class TextBatches:
    """Streams of text read side by side, segment after segment, with the state carried over."""

    def __init__(self, streams: TokenStreams, config: LanguageTrainConfig) -> None:
        self.streams, self.parts = streams, config.accumulate
        self.length = config.length
        self.plan = SegmentPlan(streams.length, config.length, config.seed if config.random_length else None)
        self.total_steps = config.steps or self.plan.steps_in(config.epochs or 1)
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
