"""The whole state of a run at one of its steps, which checkpoints keep and a resumed run restores."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from torchdefine.errors import MachineError
from torchdefine.training.averaging import WeightAverage
from torchdefine.training.carried_state import flat_tensors
from torchdefine.training.checkpoint import (
    Checkpoint,
    load_weights,
    model_tensors,
    optimizer_tensors,
    restore_optimizer,
)
from torchdefine.training.distributed import Processes
from torchdefine.training.precision import Precision
from torchdefine.training.step import TrainingStep


class Keeper(Protocol):
    """Where a run is kept: its log and its checkpoints."""

    def log(self, kind: str, record: dict[str, Any]) -> None: ...

    def forget_after(self, step: int) -> None:
        """Drop what was logged after a step that the run goes back to."""

    def write(self, which: Literal["last", "best"], tensors: dict[str, Tensor], facts: dict[str, Any]) -> None: ...

    def read_last(self) -> Checkpoint | None:
        """The checkpoint to go on from; None where none has been written."""


@dataclass
class Position:
    """Where a run stands: all that a checkpoint keeps beside tensors."""

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
    averaged_steps: int = 0
    finished: bool = False
    """Whether the run has ended before its last step."""


@dataclass
class RunState:
    """The parts of a run that change as it goes on, and where they are kept."""

    keeper: Keeper
    processes: Processes
    model: Any
    optimizer: torch.optim.Optimizer
    average: WeightAverage
    precision: Precision
    step: TrainingStep
    position: Position = field(default_factory=Position)
    unlogged_steps: int = 0
    """How many steps the sum of losses covers."""

    def write_best(self) -> None:
        if self.processes.is_first:
            self.keeper.write("best", model_tensors(self.model), {"position": asdict(self.position)})

    def write_last(self) -> None:
        """Write everything that training needs to go on. All processes call it, and the first one writes."""
        tensors = model_tensors(self.model)
        optimizer, plain = optimizer_tensors(self.optimizer)
        tensors.update({f"optimizer.{name}": tensor for name, tensor in optimizer.items()})
        tensors.update({f"average.{name}": tensor for name, tensor in self.average.tensors().items()})
        for name, tensor in self._own_tensors().items():
            for rank, everyones in enumerate(self.processes.gather(tensor)):
                tensors[f"process.{rank}.{name}"] = everyones
        self.position.averaged_steps = self.average.steps
        facts = {
            "position": asdict(self.position),
            "optimizer": plain,
            "loss_scale": self.precision.scaler.state_dict(),
            "processes": self.processes.count,
        }
        if self.processes.is_first:
            self.keeper.write("last", tensors, facts)

    def restore(self) -> None:
        """Restore the last checkpoint; if none has been written, stay at the beginning."""
        checkpoint = self.keeper.read_last()
        if checkpoint is None:
            if self.processes.is_first:
                self.keeper.forget_after(-1)
            return
        load_weights(self.model, checkpoint, "the last checkpoint")
        restore_optimizer(self.optimizer, checkpoint.under("optimizer"), checkpoint.facts["optimizer"])
        if checkpoint.facts["loss_scale"]:
            self.precision.scaler.load_state_dict(checkpoint.facts["loss_scale"])
        self.position = Position(**checkpoint.facts["position"])
        self.average.restore(checkpoint.under("average"), self.position.averaged_steps)
        self._restore_own(checkpoint)
        if self.processes.is_first:
            self.keeper.forget_after(self.position.step)

    def _own_tensors(self) -> dict[str, Tensor]:
        """What each process has of its own: carried state, random state, losses not yet logged."""
        losses = self.step.summed_loss
        tensors = {f"carried.{index}": tensor for index, tensor in enumerate(flat_tensors(self.step.carried))}
        tensors["random.cpu"] = torch.get_rng_state().to(losses.device)
        if losses.is_cuda:
            tensors["random.cuda"] = torch.cuda.get_rng_state(losses.device).to(losses.device)
        tensors["losses"] = torch.stack((losses, losses.new_tensor(float(self.unlogged_steps))))
        return tensors

    def _restore_own(self, checkpoint: Checkpoint) -> None:
        if checkpoint.facts["processes"] != self.processes.count:
            raise MachineError(
                f"The run was trained by {checkpoint.facts['processes']} processes and can go on with as many only, "
                f"not with {self.processes.count}."
            )
        own = checkpoint.under(f"process.{self.processes.rank}")
        for index, tensor in enumerate(flat_tensors(self.step.carried)):
            tensor.copy_(own[f"carried.{index}"])
        torch.set_rng_state(own["random.cpu"].cpu())
        losses = self.step.summed_loss
        if losses.is_cuda and "random.cuda" in own:
            torch.cuda.set_rng_state(own["random.cuda"].cpu(), losses.device)
        losses.copy_(own["losses"][0])
        self.step.steps_done.fill_(self.position.step)
        self.unlogged_steps = int(own["losses"][1])
