"""Learning rate schedules as functions of the step, without state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchdefine.config import MOST_WIDE, Config, Kinds, setting


@dataclass(frozen=True)
class ConstantConfig(Config):
    """A learning rate that stays, after the warm-up."""

    kind: str = "constant"
    warmup: int = setting(0, "Steps over which the learning rate rises from 0.", at_least=0)

    def ratio(self, step: int, total_steps: int, drop_unit: float = 1.0, plateau_drops: int = 0) -> float:
        """The learning rate of a step, counted from 0, as a fraction of the full one.

        ``drop_unit`` is how many steps one unit of ``drops`` is: those of an epoch, or 1. ``plateau_drops`` is how
        often validation has stalled so far.
        """
        return self._warm(step)

    def drops_after(self, stale_validations: int) -> bool:
        """Whether the learning rate drops after so many validations without a better loss."""
        return False

    def _warm(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0


@dataclass(frozen=True)
class DropsConfig(ConstantConfig):
    """A learning rate that is divided at certain epochs or steps."""

    kind: str = "drops"
    drops: tuple[float, ...] = setting((), "When the learning rate drops: epochs, or steps if train.steps is set.")
    factor: float = setting(10.0, "Each drop divides the learning rate by this.", above=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(bool(self.drops), "drops is empty, but this kind needs at least one: try 15 or another kind.")
        ordered = list(self.drops) == sorted(set(self.drops)) and all(drop > 0 for drop in self.drops)
        self.require(ordered, f"drops {self.drops} are not positive and increasing.")

    def ratio(self, step: int, total_steps: int, drop_unit: float = 1.0, plateau_drops: int = 0) -> float:
        passed = sum(step >= drop * drop_unit for drop in self.drops)
        return float(self._warm(step) * self.factor**-passed)


@dataclass(frozen=True)
class PlateauConfig(ConstantConfig):
    """A learning rate that is divided when validation gets no better."""

    kind: str = "plateau"
    factor: float = setting(10.0, "Each drop divides the learning rate by this.", above=1)
    patience: int = setting(0, "Validations without a better loss before the learning rate drops.", at_least=0)

    def ratio(self, step: int, total_steps: int, drop_unit: float = 1.0, plateau_drops: int = 0) -> float:
        return float(self._warm(step) * self.factor**-plateau_drops)

    def drops_after(self, stale_validations: int) -> bool:
        return stale_validations > self.patience


@dataclass(frozen=True)
class DecayConfig(ConstantConfig):
    """A learning rate that falls to the end of the run, along a cosine or a line."""

    kind: str = "cosine"
    decay_from: float = setting(
        0.0, "Fraction of the run after which the learning rate starts to fall.", at_least=0, below=1
    )
    final_ratio: float = setting(0.0, "The learning rate at the end, as a fraction of lr.", at_least=0)

    def ratio(self, step: int, total_steps: int, drop_unit: float = 1.0, plateau_drops: int = 0) -> float:
        start = max(self.decay_from * total_steps, self.warmup)
        done = min(max((step - start) / max(total_steps - start, 1), 0.0), 1.0)
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return float(self._warm(step) * (self.final_ratio + (1 - self.final_ratio) * left))


@dataclass(frozen=True)
class NoamConfig(ConstantConfig):
    """The schedule of the first Transformer: a warm-up, then the inverse root of the step."""

    kind: str = "noam"
    warmup: int = setting(8000, "Steps over which the learning rate rises from 0.", at_least=1)
    noam_width: int = setting(
        512,
        "The learning rate is divided by the square roots of this width and of the step.",
        at_least=1,
        at_most=MOST_WIDE,
    )

    def ratio(self, step: int, total_steps: int, drop_unit: float = 1.0, plateau_drops: int = 0) -> float:
        return float(self.noam_width**-0.5 * min((step + 1) ** -0.5, (step + 1) * self.warmup**-1.5))


@dataclass(frozen=True)
class CyclicConfig(ConstantConfig):
    """A learning rate that rises and falls in cycles, each lower than the one before (Acharya et al., 2019)."""

    kind: str = "cyclic"
    cycles: int = setting(5, "Number of cycles in a run.", at_least=1)
    decay: float = setting(
        0.5, "The highest rate of a cycle is multiplied by this for the next cycle.", above=0, at_most=1
    )
    final_ratio: float = setting(0.05, "The lowest rate of all cycles, as a fraction of lr.", at_least=0, at_most=1)

    def ratio(self, step: int, total_steps: int, drop_unit: float = 1.0, plateau_drops: int = 0) -> float:
        cycle, done = divmod(self.cycles * step / max(total_steps, 1), 1.0)
        top = max(self.decay**cycle, self.final_ratio)
        return float(self._warm(step) * (self.final_ratio + (top - self.final_ratio) * (1 - abs(2 * done - 1))))


SCHEDULES = Kinds("schedule", ConstantConfig, DropsConfig, PlateauConfig, DecayConfig, NoamConfig, CyclicConfig)
SCHEDULES.register(DecayConfig, "linear")
