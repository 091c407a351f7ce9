"""A checkpoint in memory: all that a run needs to go on, as named tensors and plain facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.errors import UserError


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by dotted name ("model.…", "optimizer.…", "carried.…") and plain facts."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with ``prefix`` and a dot, without it."""
        return {name.removeprefix(f"{prefix}."): t for name, t in self.tensors.items() if name.startswith(f"{prefix}.")}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def load_weights(model: nn.Module, checkpoint: Checkpoint, where: object) -> None:
    """Put a checkpoint's weights into a model of the same shape."""
    try:
        model.load_state_dict(checkpoint.under("model"))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"The weights in {where} do not fit this model: {reason}") from None


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state as named tensors and plain facts."""
    tensors, plain = {}, {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            elif value is not None:
                plain[f"{index}.{name}"] = value
    return tensors, plain


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
) -> None:
    state: dict[int, dict[str, Any]] = {}
    for dotted, value in [*tensors.items(), *plain.items()]:
        index, name = dotted.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
