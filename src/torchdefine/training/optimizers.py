"""Optimisers by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from torchdefine.recipe import OptimSettings


def make_optimizer(
    parameters: Iterable[nn.Parameter], settings: OptimSettings, device: torch.device
) -> torch.optim.Optimizer:
    """A fused optimiser: one pass over memory on a CPU; on a GPU one launch, without a host synchronisation.

    On a GPU the rate is a tensor too, so that a step recorded as a CUDA graph uses the current one.
    """
    on_gpu = device.type == "cuda"
    rate = torch.tensor(settings.lr, device=device) if on_gpu else settings.lr
    shared = {"lr": rate, "weight_decay": settings.weight_decay, "fused": True}
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=settings.momentum, **shared)  # type: ignore[arg-type]
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, betas=(settings.beta1, settings.beta2), capturable=on_gpu, **shared)  # type: ignore[arg-type]
