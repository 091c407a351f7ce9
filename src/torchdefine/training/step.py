"""One training step: forward, backward, clip and optimiser, without waiting for the device; what it expects of data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from torchdefine.errors import UserError
from torchdefine.modes import prepare
from torchdefine.training.cuda_graphs import CudaGraphs, Hint, copy_state, flat_tensors, own_copy
from torchdefine.training.optimizers import clip_gradients
from torchdefine.training.precision import Precision


@dataclass(frozen=True)
class Part:
    """The data of one forward and backward pass; a step adds up the gradients of its parts."""

    inputs: tuple[Tensor, ...]
    """The first arguments of the model's forward; the carried state and the hint follow."""
    host_targets: np.ndarray
    """The targets as the host has them, for the model's ``host_hint``."""
    weight: float = 1.0
    """The part's weight in the step's loss."""


@dataclass(frozen=True)
class Batch:
    """The data of one step, for one process."""

    parts: list[Part]
    tokens: int
    """How many tokens this process predicts."""
    rate: float = 1.0
    """Multiplies the learning rate."""
    begins_text: bool = False
    """Whether the carried state starts anew."""
    place: str = ""
    """Where in the data this is, for a message about it."""


class TrainingData(Protocol):
    """Batches by step, always the same for the same step, so that an interrupted run can go on."""

    total_steps: int
    rows_per_part: int
    """How many rows of carried state each part has."""
    steps_per_epoch: float
    """How many steps one epoch of a schedule is."""

    def batch(self, step: int) -> Batch:
        """The data of step ``step``, counted from 0."""
        ...

    def epoch_after(self, steps: int) -> float:
        """How many passes over the data that many steps are; a whole number exactly at the end of a pass."""
        ...


class TrainingStep:
    """Updates the weights by one batch at a time and keeps, on the device, what the log will ask for."""

    def __init__(
        self,
        model: Any,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        rows: Sequence[int],
        clip: float | None,
        recorded: bool,
    ) -> None:
        """``module`` is the model, or what wraps it: called with a part's inputs, the carried state and the hint.

        ``rows`` is the batch size of each part's carried state; ``recorded`` allows CUDA graphs on a GPU.
        """
        self.model, self.module, self.optimizer, self.precision = model, module, optimizer, precision
        self.device = self.precision.device
        self.clip = math.inf if clip is None else clip
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.rows = list(rows)
        self.module.train()  # the carried state may have another length in evaluation
        prepare(self.model)
        with self.precision.autocast():  # a memory may be kept in the dtype that products read it in
            initial = [self.model.initial_state(size) for size in rows]
        if any(tensor.requires_grad for tensor in flat_tensors(initial)):
            problem = "The context model's initial state requires a gradient, but carried states have none"
            raise UserError(f"{problem}: return zeros from initial_state, and add learned values in forward.")
        self.carried = [own_copy(state) for state in initial]
        self.summed_loss = torch.zeros((), device=self.device)
        """The sum over the steps since it was last set to zero."""
        self.gradient_norm = torch.zeros((), device=self.device)
        self.first_bad_step = torch.full((), -1, dtype=torch.long, device=self.device)
        self.steps_done = torch.zeros((), dtype=torch.long, device=self.device)
        self._weights = [torch.ones((), device=self.device) for _ in rows]
        on_gpu = self.device.type == "cuda"
        self._graphs = CudaGraphs(self.compute, self.device, self._forget_recorded) if recorded and on_gpu else None

    def __call__(self, batch: Batch, rate: float) -> None:
        if batch.begins_text:  # the carried states start empty again
            for state, size in zip(self.carried, self.rows, strict=True):
                copy_state(state, self.model.initial_state(size))
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a CUDA graph reads it from there
            else:
                group["lr"] = rate * group.get("ratio", 1.0)
        for weight, part in zip(self._weights, batch.parts, strict=True):
            weight.fill_(part.weight)
        hints = [self.model.host_hint(part.host_targets) for part in batch.parts]
        (self._graphs or self.compute)([part.inputs for part in batch.parts], hints)

    @property
    def recorded_kinds(self) -> int:
        """How many kinds of steps are replayed from a CUDA graph by now."""
        return 0 if self._graphs is None else self._graphs.recorded_kinds

    def compute(self, inputs: Sequence[tuple[Tensor, ...]], hints: Sequence[Hint]) -> None:
        """All of the step that runs on the device; every result goes into tensors that existed before."""
        self.optimizer.zero_grad(set_to_none=True)
        scaler = self.precision.scaler
        step_loss = torch.zeros_like(self.summed_loss)
        for part, hint, weight, state in zip(inputs, hints, self._weights, self.carried, strict=True):
            with self.precision.autocast():
                losses, after = self.module(*part, state, hint=hint)
            scaler.scale(losses.objective * weight).backward()
            step_loss += losses.cross_entropy.detach() * weight
            copy_state(state, after)
        scaler.unscale_(self.optimizer)
        norm = clip_gradients(self.parameters, self.clip)
        scaler.step(self.optimizer)
        scaler.update()
        self._note(step_loss, norm.detach())

    def _forget_recorded(self) -> None:
        """Forget gradients that belong to a graph, and the rest of a recording that failed half-way."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.precision.scaler.is_enabled():  # it would refuse to unscale the gradients a second time
            self.precision.scaler._per_optimizer_states.clear()

    def _note(self, step_loss: Tensor, norm: Tensor) -> None:
        """Record, without waiting for the device, the loss and whether anything is not finite."""
        self.steps_done += 1
        fine = step_loss.isfinite()
        if not self.precision.scaler.is_enabled():  # loss scaling meets infinite gradients by design, and skips them
            fine = fine & norm.isfinite()
        first = (self.first_bad_step < 0) & ~fine
        self.first_bad_step.copy_(torch.where(first, self.steps_done, self.first_bad_step))
        self.summed_loss += step_loss
        self.gradient_norm.copy_(norm)
