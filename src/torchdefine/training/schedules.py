"""Learning rates as a function of the step, without state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchdefine.recipe import ScheduleSettings


@dataclass(frozen=True)
class Schedule:
    """The rate of every step, as a share of the recipe's learning rate.

    ``drop_unit`` is how many steps one unit in ``settings.drops`` is: those of an epoch, or 1.
    """

    settings: ScheduleSettings
    total_steps: int
    drop_unit: float = 1.0

    def ratio(self, step: int, plateau_drops: int = 0) -> float:
        """The share for step ``step``, counted from 0; ``plateau_drops`` is how often validation stalled so far."""
        s = self.settings
        if s.kind == "noam":
            return float(s.noam_width**-0.5 * min((step + 1) ** -0.5, (step + 1) * s.warmup**-1.5))
        warm = min(1.0, (step + 1) / s.warmup) if s.warmup else 1.0
        if s.kind == "drops":
            passed = sum(step >= drop * self.drop_unit for drop in s.drops)
            return float(warm * s.factor**-passed)
        if s.kind == "plateau":
            return float(warm * s.factor**-plateau_drops)
        if s.kind in ("cosine", "linear"):
            start = max(s.decay_from * self.total_steps, s.warmup)
            done = min(max((step - start) / max(self.total_steps - start, 1), 0.0), 1.0)
            left = 1 - done if s.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
            return float(warm * (s.final_ratio + (1 - s.final_ratio) * left))
        return float(warm)


def unfinished_warmup(settings: ScheduleSettings, total_steps: int) -> str:
    """A sentence on a training that ends before its warm-up does; empty for all others."""
    if settings.warmup <= total_steps:
        return ""
    return (
        f"The warm-up takes {settings.warmup:,} steps, but training ends after {total_steps:,}, so the learning rate "
        "never gets to its full height: use a smaller schedule.warmup, or more steps."
    )
