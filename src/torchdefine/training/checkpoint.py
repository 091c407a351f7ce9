"""The whole state of a run at one of its steps: what checkpoints keep and a resumed run restores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.errors import MachineError, UserError
from torchdefine.training.averaging import WeightAverage
from torchdefine.training.cuda_graphs import flat_tensors
from torchdefine.training.distributed import Processes
from torchdefine.training.step import TrainingStep


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by dotted name ("model.…", "optimizer.…", "process.0.…") and plain facts."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with ``prefix`` and a dot, without it."""
        return {name.removeprefix(f"{prefix}."): t for name, t in self.tensors.items() if name.startswith(f"{prefix}.")}


@dataclass
class Position:
    """Where a run stands: what a checkpoint keeps beside tensors."""

    step: int = 0
    tokens: int = 0
    train_seconds: float = 0.0
    total_seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int = 0
    plateau_drops: int = 0
    stale_validations: int = 0
    validation_losses: list[float] = field(default_factory=list)
    """All of them, or those since a stall started averaging; they decide whether the run has stalled."""
    unlogged_steps: int = 0
    """How many steps the sum of losses covers."""
    finished: bool = False
    """Whether the run has ended before its last step."""


def weights_of(model: nn.Module, position: Position) -> Checkpoint:
    """The weights alone, for whoever uses the model."""
    return Checkpoint(_named("model", model.state_dict()), {"position": asdict(position)})


def checkpoint_of(step: TrainingStep, average: WeightAverage, processes: Processes, position: Position) -> Checkpoint:
    """Everything that training needs to go on; all processes call it together."""
    weights = weights_of(step.model, position)
    tensors = {**weights.tensors, **_named("average", average.tensors())}
    for index, values in step.optimizer.state_dict()["state"].items():
        # SGD without momentum has None; SparseAdam counts its steps by a plain number.
        own_state = {
            name: t if isinstance(t, Tensor) else torch.tensor(t) for name, t in values.items() if t is not None
        }
        tensors |= _named(f"optimizer.{index}", own_state)
    own = {f"carried.{index}": tensor for index, tensor in enumerate(flat_tensors(step.carried))}
    own |= {"summed_loss": step.summed_loss, "random.cpu": torch.get_rng_state().to(step.device)}
    if step.device.type == "cuda":
        own["random.cuda"] = torch.cuda.get_rng_state(step.device).to(step.device)
    for name, tensor in own.items():
        for rank, everyones in enumerate(processes.gather(tensor)):
            tensors[f"process.{rank}.{name}"] = everyones
    loss_scale = step.precision.scaler.state_dict()
    facts = {"averaged_steps": average.steps, "loss_scale": loss_scale, "processes": processes.count}
    return Checkpoint(tensors, {**weights.facts, **facts})


def restore(checkpoint: Checkpoint, step: TrainingStep, average: WeightAverage, processes: Processes) -> Position:
    """Put everything back as it was; returns where the run stands."""
    facts = checkpoint.facts
    if facts["processes"] != processes.count:
        raise MachineError(
            f"The run was trained by {facts['processes']} processes, so resume it with as many, not with "
            f"{processes.count}."
        )
    load_weights(step.model, checkpoint, "the last checkpoint")
    state: dict[int, dict[str, Any]] = {}
    for dotted, tensor in checkpoint.under("optimizer").items():
        index, name = dotted.split(".", 1)
        state.setdefault(int(index), {})[name] = tensor if tensor.is_floating_point() else int(tensor)
    groups = step.optimizer.state_dict()["param_groups"]
    step.optimizer.load_state_dict({"state": state, "param_groups": groups})
    if facts["loss_scale"]:
        step.precision.scaler.load_state_dict(facts["loss_scale"])
    average.restore(checkpoint.under("average"), facts["averaged_steps"])
    own = checkpoint.under(f"process.{processes.rank}")
    for place, tensor in enumerate(flat_tensors(step.carried)):
        tensor.copy_(own[f"carried.{place}"])
    torch.set_rng_state(own["random.cpu"].cpu())
    if step.device.type == "cuda" and "random.cuda" in own:
        torch.cuda.set_rng_state(own["random.cuda"].cpu(), step.device)
    position = Position(**facts["position"])
    step.summed_loss.copy_(own["summed_loss"])
    step.steps_done.fill_(position.step)
    return position


def load_weights(model: nn.Module, checkpoint: Checkpoint, where: object) -> None:
    """Put a checkpoint's weights into a model of the same shape."""
    try:
        model.load_state_dict(checkpoint.under("model"))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"The weights in {where} do not fit this model: {reason}") from None


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
