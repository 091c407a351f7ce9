"""What a task gives to be exported: programs with named inputs and outputs; whether one gives what its model gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[..., Sequence[Tensor]]
"""Tensors in, tensors out."""
Runner = Callable[[Sequence[Tensor]], list[Tensor]]
"""An opened program: its inputs in order → its outputs in order."""

DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
TOLERANCE = 1e-5
"""The largest difference allowed between two numbers, relative for numbers above 1."""
CHECKED_AT = (
    {"batch": 1, "length": 1, "source_length": 1, "target_length": 0},
    {"batch": 2, "length": 7, "source_length": 9, "target_length": 1},
    {"batch": 5, "length": 33, "source_length": 4, "target_length": 20},
)
"""None of these sizes is one that programs are traced at."""


@dataclass(frozen=True)
class Port:
    """A tensor that goes into a program or comes out of it."""

    name: str
    shape: tuple[int | str, ...]
    """A name stands for a size that each call may choose; equal names mean equal sizes."""
    dtype: str = "float32"
    below: int = 1
    """Whole numbers must be smaller than this."""
    padding: int | None = None
    """The id that fills the ends of short rows."""

    def sample(self, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
        """Numbers that the program must accept, of these sizes; at least one place of every row is not padding."""
        shape = self.sized(sizes)
        if self.dtype == "float32":
            return torch.randn(shape, generator=generator)
        if self.dtype == "bool":
            chosen = torch.rand(shape, generator=generator) < 0.7
            chosen[..., 0] = True
            return chosen
        ids = torch.randint(self.below, shape, generator=generator)
        if self.padding is not None:
            ids[ids == self.padding] = (self.padding + 1) % self.below
            ids[0, shape[-1] // 2 + 1 :] = self.padding
        return ids

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else sizes[size] for size in self.shape)

    def after(self, **longer: str) -> Port:
        """What a carried tensor comes out as; ``longer`` names the sizes that have grown."""
        shape = tuple(longer.get(str(size), size) for size in self.shape)
        return Port(f"{self.name}_after", shape, self.dtype, self.below)

    def to_dict(self) -> dict[str, Any]:
        padding = {} if self.padding is None else {"padding": self.padding}
        below = {"below": self.below} if self.dtype == "int64" else {}
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype, **below, **padding}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Port:
        return cls(**{**values, "shape": tuple(values["shape"])})


@dataclass(frozen=True)
class Program:
    """A part of a model that runs by itself; its first input is ids, the others are carried tensors."""

    name: str
    summary: str
    model: nn.Module
    """Whose weights the call uses; in evaluation mode."""
    call: Call
    """In operations of torch that can be traced."""
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    code: str
    """Python for the card that calls ``opened(name)``; ``$lib`` stands for torch or numpy."""
    eager: Call | None = None
    """What the model itself gives for the same inputs, if that is another call."""


@dataclass(frozen=True)
class Exportable:
    """A model in evaluation mode, float32 and on the CPU, as its task describes it."""

    model: Any
    """A module that knows its ``embeddings()`` and ``parameters_by_part()``."""
    programs: Sequence[Program]
    description: str
    """What the model is, in words."""
    limits: Sequence[str] = ()
    """What whoever calls the programs must know."""


def sampled(ports: Sequence[Port], sizes: Mapping[str, int], seed: int) -> list[Tensor]:
    """Numbers for all inputs of a program."""
    generator = torch.Generator().manual_seed(seed)
    return [port.sample(sizes, generator) for port in ports]


@torch.no_grad()
def difference_to_model(program: Program, runner: Runner) -> float:
    """The largest one, of an opened program beside the model on numbers that it was not traced with."""
    differences = []
    for seed, sizes in enumerate(CHECKED_AT, start=1):
        inputs = sampled(program.inputs, sizes, seed)
        differences.append(difference(runner(inputs), (program.eager or program.call)(*inputs)))
    return max(differences)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest one, relative for numbers above 1; infinite where shapes, types, or whole numbers differ."""
    if [(t.shape, t.dtype) for t in found] != [(t.shape, t.dtype) for t in expected]:
        return math.inf
    largest = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        if not ours.is_floating_point():
            largest = largest if torch.equal(ours, theirs) else math.inf
        elif ours.numel():
            apart = ((ours - theirs).abs() / theirs.abs().clamp(min=1)).max().item()
            largest = max(largest, math.inf if math.isnan(apart) else apart)
    return largest


def wrong_outputs(outputs: Sequence[Tensor], ports: Sequence[Port], sizes: Mapping[str, int]) -> str:
    """The first output that is not as declared, in words; empty if all are."""
    sizes = {**sizes, "target_length + 1": sizes["target_length"] + 1}
    if len(outputs) != len(ports):
        return f"{len(outputs)} outputs instead of {len(ports)}"
    for output, port in zip(outputs, ports, strict=True):
        expected = port.sized(sizes)
        if tuple(output.shape) != expected or output.dtype != DTYPES[port.dtype]:
            return f"{port.name} of {tuple(output.shape)} {output.dtype} instead of {expected} {port.dtype}"
        if output.is_floating_point() and not bool(torch.isfinite(output).all()):
            return f"numbers in {port.name} that are not finite"
    return ""
