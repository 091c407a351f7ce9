"""Whether a program in its file gives what the model gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdefine.export.formats import Runner
from torchdefine.export.program import DTYPES, Port, Program, sampled

TOLERANCE = 1e-5
"""The largest difference allowed between two numbers, relative for numbers above 1."""

CHECKED_AT = (
    {"batch": 1, "length": 1, "source_length": 1, "target_length": 0},
    {"batch": 2, "length": 7, "source_length": 9, "target_length": 1},
    {"batch": 5, "length": 33, "source_length": 4, "target_length": 20},
)
"""None of these sizes is one that programs are traced at."""


@dataclass(frozen=True)
class WrittenProgram:
    """A program in its file, and how far it is from the model."""

    program: Program
    file: str
    largest_difference: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "summary": self.program.summary,
            "inputs": [port.to_dict() for port in self.program.inputs],
            "outputs": [port.to_dict() for port in self.program.outputs],
            "largest_difference": self.largest_difference,
        }


@torch.no_grad()
def difference_to_model(program: Program, runner: Runner) -> float:
    """The largest one, of an opened program beside the model on numbers that it was not traced with."""
    differences = []
    for seed, sizes in enumerate(CHECKED_AT, start=1):
        inputs = sampled(program.inputs, sizes, seed)
        differences.append(_difference(runner(inputs), (program.eager or program.call)(*inputs)))
    return max(differences)


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


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Infinite where shapes, types, or whole numbers differ."""
    if len(found) != len(expected):
        return math.inf
    return max(_apart(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def _apart(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if not ours.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else math.inf
    if not ours.numel():
        return 0.0
    apart = ((ours - theirs).abs() / theirs.abs().clamp(min=1)).max().item()
    return math.inf if math.isnan(apart) else apart
