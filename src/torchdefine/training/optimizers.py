"""Optimisers by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchdefine.config import Config, Kinds, setting


@dataclass(frozen=True)
class OptimizerConfig(Config):
    """What every optimiser has.

    All are fused: one pass over memory on a CPU; on a GPU one launch, without a host synchronisation.
    """

    kind: str = ""
    lr: float = setting(20.0, "Learning rate.", above=0)
    weight_decay: float = setting(0.0, "Weight decay.", at_least=0)
    clip: float | None = setting(0.25, "Largest norm of the gradient; none for no clipping.", above=0)

    @abstractmethod
    def build(self, parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
        raise NotImplementedError

    def _shared(self, device: torch.device) -> dict[str, Any]:
        """On a GPU the learning rate is a tensor, so that a CUDA graph of a step uses the current one."""
        rate = torch.tensor(self.lr, device=device) if device.type == "cuda" else self.lr
        return {"lr": rate, "weight_decay": self.weight_decay, "fused": True}


@dataclass(frozen=True)
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent."""

    kind: str = "sgd"
    momentum: float = setting(0.0, "Momentum.", at_least=0, below=1)

    def build(self, parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, momentum=self.momentum, **self._shared(device))


@dataclass(frozen=True)
class AdamConfig(OptimizerConfig):
    """Adam; as adamw with decoupled weight decay."""

    kind: str = "adam"
    lr: float = setting(1e-3, "Learning rate.", above=0)
    beta1: float = setting(0.9, "β₁.", at_least=0, below=1)
    beta2: float = setting(0.999, "β₂.", at_least=0, below=1)

    def build(self, parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.kind == "adamw" else torch.optim.Adam
        on_gpu = device.type == "cuda"
        return kind(parameters, betas=(self.beta1, self.beta2), capturable=on_gpu, **self._shared(device))


OPTIMIZERS = Kinds("optimiser", SGDConfig, AdamConfig)
OPTIMIZERS.register(AdamConfig, "adamw")
