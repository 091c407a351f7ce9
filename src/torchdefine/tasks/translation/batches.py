"""Pairs of sentences in the form that the loop expects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from torchdefine.config import setting
from torchdefine.data import BitextBatches
from torchdefine.training.batches import Batch, Part
from torchdefine.training.distributed import Processes
from torchdefine.training.loop import TrainConfig


@dataclass(frozen=True)
class TranslationTrainConfig(TrainConfig):
    """How a translator is trained."""

    batch_tokens: int = setting(4096, "Tokens of a batch on its longer side, padding included.", at_least=1)


class PairData:
    """Every step takes ``accumulate`` batches in every process; each target token weighs the same in the loss."""

    rows_per_part = 0  # a translator carries nothing from batch to batch

    def __init__(self, batches: BitextBatches, config: TranslationTrainConfig, processes: Processes) -> None:
        self.batches, self.parts, self.processes = batches, config.accumulate, processes
        self.batches_per_step = self.parts * processes.count
        self.steps_per_epoch = batches.per_epoch / self.batches_per_step
        epochs = Fraction(str(config.epochs or 1))  # as it is written, so that nothing is rounded up
        self.total_steps = config.steps or math.ceil(epochs * batches.per_epoch / self.batches_per_step)

    def batch(self, step: int) -> Batch:
        first = step * self.batches_per_step
        tokens = [self.batches.tokens(first + index) for index in range(self.batches_per_step)]
        own = range(self.processes.rank * self.parts, (self.processes.rank + 1) * self.parts)
        taken = [self.batches.batch(first + index) for index in own]
        return Batch(
            # Gradients are averaged over the processes, so a part is weighed against the mean tokens of a process.
            [
                Part((b.source, b.inputs, b.targets), b.host_targets, b.tokens * self.processes.count / sum(tokens))
                for b in taken
            ],
            tokens=sum(b.tokens for b in taken),
            place=f"batch {first % self.batches.per_epoch} of the {self.batches.per_epoch} of a pass over the pairs",
        )

    def epoch_after(self, steps: int) -> float:
        """Passes over the pairs; a whole number after each step in which a pass ended, even midway."""
        taken, per_epoch = steps * self.batches_per_step, self.batches.per_epoch
        ended, rest = divmod(taken, per_epoch)
        return float(ended) if ended and rest < self.batches_per_step else taken / per_epoch
