"""Averages of the weights over the steps of a run, and the rule that says when validation has stalled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdefine.config import Config, Kinds, setting


@dataclass(frozen=True)
class AveragingConfig(Config):
    """The weights of the last step (none), or their average since the first one (always)."""

    kind: str = "none"


@dataclass(frozen=True)
class StalledAveragingConfig(Config):
    """The average since validation stalled; from then on it is validated and kept."""

    kind: str = "stalled"
    patience: int = setting(
        5, "Averaging starts when a validation is worse than the best one before the last N.", at_least=0
    )


AVERAGING = Kinds("averaging", AveragingConfig, StalledAveragingConfig)
AVERAGING.register(AveragingConfig, "always")


def stalled(earlier: Sequence[float], latest: float, patience: int) -> bool:
    """Whether the latest validation loss is worse than the best of all earlier ones but the last ``patience``.

    This is the trigger of non-monotonic ASGD in its authors' code; their paper defines it differently.
    """
    return len(earlier) > patience and latest > min(earlier[:-patience] if patience else earlier)


class WeightAverage:
    """The mean of the parameters over all steps since it was started."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.steps = 0
        self.means: list[Tensor] = []

    @property
    def running(self) -> bool:
        return bool(self.means)

    @torch.no_grad()
    def start(self) -> None:
        self.steps = 0
        self.means = [parameter.clone() for parameter in self.parameters.values()]

    @torch.no_grad()
    def update(self) -> None:
        """Add the parameters of one more step."""
        self.steps += 1
        torch._foreach_lerp_(self.means, [p.detach() for p in self.parameters.values()], 1 / self.steps)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averaged weights, if there are any, into the model within this context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, mean in zip(self.parameters.values(), self.means, strict=False):  # none before the start
            held = parameter.clone()
            parameter.copy_(mean)
            mean.copy_(held)

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.parameters, self.means, strict=False))

    def restore(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Continue an average from what ``tensors()`` returned, if there was one."""
        if tensors:
            self.start()
            for name, mean in self.tensors().items():
                mean.copy_(tensors[name])
        self.steps = steps
