"""One training step: forward, backward, clip and optimiser, without a question to the device.

On a GPU a step of a language model is some hundred small kernels, and starting them takes longer than running them. So
each kind of step, with the same shapes, is recorded as a CUDA graph when it comes a second time and replayed from then
on: a single start, the same kernels, the same numbers, the same random ones too.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from torchdefine.training.batches import Batch, Part
from torchdefine.training.checkpoint import flat_tensors
from torchdefine.training.precision import Precision

MOST_GRAPHS = 256  # beyond that many kinds of steps, the rest run kernel by kernel

log = logging.getLogger(__name__)


class StepParts(NamedTuple):
    """What a step works on."""

    model: Any
    """Makes carried states and hints."""
    module: nn.Module
    """The model, or what wraps it: called with a part's inputs, the state and the hint."""
    optimizer: torch.optim.Optimizer
    precision: Precision


class TrainingStep:
    """Updates the weights by one batch at a time and keeps, on the device, what the log will ask for."""

    def __init__(self, parts: StepParts, rows: Sequence[int], clip: float | None, recorded: bool) -> None:
        """``rows`` is the batch size of each part's carried state; ``recorded`` allows CUDA graphs."""
        self.model, self.module, self.optimizer, self.precision = parts
        self.device = self.precision.device
        self.clip = math.inf if clip is None else clip
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.rows = list(rows)
        with self.precision.autocast():  # a memory may be kept in the dtype that products read it in
            self.carried = [self.model.initial_state(size) for size in rows]
        self.summed_loss = torch.zeros((), device=self.device)
        """Of the steps since somebody set it to zero."""
        self.gradient_norm = torch.zeros((), device=self.device)
        self.first_bad_step = torch.full((), -1, dtype=torch.long, device=self.device)
        self.steps_done = torch.zeros((), dtype=torch.long, device=self.device)
        self._weights = [torch.ones((), device=self.device) for _ in rows]
        self._recorder = _Recorder(self) if recorded and self.device.type == "cuda" else None

    def __call__(self, batch: Batch, rate: float) -> None:
        if batch.begins_text:
            self.forget_context()
        self._set_rate(rate)
        for weight, part in zip(self._weights, batch.parts, strict=True):
            weight.fill_(part.weight)
        hints = [self.model.host_hint(part.host_targets) for part in batch.parts]
        if self._recorder is None:
            self.compute([part.inputs for part in batch.parts], hints)
        else:
            self._recorder(batch.parts, hints)

    @property
    def recorded_kinds(self) -> int:
        """How many kinds of steps are replayed from a CUDA graph by now."""
        return 0 if self._recorder is None else self._recorder.recorded_kinds

    def forget_context(self) -> None:
        """Begin with an empty state, as at the start of a text."""
        for state, size in zip(self.carried, self.rows, strict=True):
            _copy_state(state, self.model.initial_state(size))

    def compute(self, inputs: Sequence[tuple[Tensor, ...]], hints: Sequence[tuple[int, ...] | None]) -> None:
        """All of the step that runs on the device; every result goes into tensors that were there before."""
        self.optimizer.zero_grad(set_to_none=True)
        scaler = self.precision.scaler
        step_loss = torch.zeros_like(self.summed_loss)
        for part, hint, weight, state in zip(inputs, hints, self._weights, self.carried, strict=True):
            with self.precision.autocast():
                losses, after = self.module(*part, state, hint=hint)
            scaler.scale(losses.objective * weight).backward()
            step_loss += losses.cross_entropy.detach() * weight
            _copy_state(state, after)
        scaler.unscale_(self.optimizer)
        norm = clip_grad_norm_(self.parameters, self.clip)
        scaler.step(self.optimizer)
        scaler.update()
        self._note(step_loss, norm.detach())

    def _note(self, step_loss: Tensor, norm: Tensor) -> None:
        """Remember, without asking, what the loss was and whether anything is not finite."""
        self.steps_done += 1
        fine = step_loss.isfinite()
        if not self.precision.scaler.is_enabled():  # loss scaling meets infinite gradients by design, and skips them
            fine = fine & norm.isfinite()
        first = (self.first_bad_step < 0) & ~fine
        self.first_bad_step.copy_(torch.where(first, self.steps_done, self.first_bad_step))
        self.summed_loss += step_loss
        self.gradient_norm.copy_(norm)

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a recorded step reads it from there
            else:
                group["lr"] = rate


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: list[tuple[Tensor, ...]]

    def replay(self, parts: Sequence[Part]) -> None:
        for held, part in zip(self.inputs, parts, strict=True):
            for mine, given in zip(held, part.inputs, strict=True):
                mine.copy_(given)
        self.graph.replay()


class _Recorder:
    """Runs a kind of step once as it is, so that everything is warm, and as a graph from the second time on."""

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        self._pool = torch.cuda.graph_pool_handle()  # graphs run one at a time, so they share their memory
        self._recordings: dict[tuple[Any, ...], _Recording | None] = {}
        self._works = True

    def __call__(self, parts: Sequence[Part], hints: Sequence[tuple[int, ...] | None]) -> None:
        roomy = [None if hint is None else tuple(map(room_for, hint)) for hint in hints]
        kind = (*(tuple(t.shape for t in part.inputs) for part in parts), *roomy)
        if kind not in self._recordings or not self._works:
            if self._works and len(self._recordings) < MOST_GRAPHS:
                self._recordings[kind] = None
            self.step.compute([part.inputs for part in parts], roomy)
            return
        recording = self._recordings[kind]
        if recording is None:
            recording = self._recordings[kind] = self._record(parts, roomy)
        if recording is None:
            self.step.compute([part.inputs for part in parts], roomy)
        else:
            recording.replay(parts)

    @property
    def recorded_kinds(self) -> int:
        return sum(recording is not None for recording in self._recordings.values())

    def _record(self, parts: Sequence[Part], hints: Sequence[tuple[int, ...] | None]) -> _Recording | None:
        inputs = [tuple(tensor.clone() for tensor in part.inputs) for part in parts]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.stream(torch.cuda.current_stream())  # a failed recording would leave its own in place
        try:
            with stream, _without_garbage_collection(), torch.cuda.graph(graph, pool=self._pool):
                self.step.compute(inputs, hints)
        except RuntimeError as error:
            self._works = False
            _end_failed_recording(self.step.device, self._pool)
            reason = str(error).splitlines()[0]
            log.warning("Steps are not recorded as CUDA graphs, which makes them slower: %s", reason)
            return None
        finally:
            self.step.optimizer.zero_grad(set_to_none=True)  # the gradients' memory belongs to the graphs
        return _Recording(graph, inputs)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Nothing may be freed on the device in a recording, and the graphs of an earlier run die when Python collects."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _end_failed_recording(device: torch.device, pool: tuple[int, int]) -> None:
    """Let memory and random numbers come from where they came before; torch leaves both as if still recording."""
    index = torch.cuda.current_device() if device.index is None else device.index
    torch._C._cuda_endAllocateToPool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


def room_for(count: int) -> int:
    """A round number that is at least ``count`` and at most half as much again, so that few kinds of steps differ.

    Large counts vary less from step to step, and what is too much costs more: an eighth as much again, at most.
    """
    if count <= 16:
        return 16
    grain = 1 << (count.bit_length() - (2 if count <= 1024 else 4))
    return -(-count // grain) * grain


def _copy_state(held: Any, new: Any) -> None:
    for mine, given in zip(flat_tensors(held), flat_tensors(new), strict=True):
        mine.copy_(given.detach())
