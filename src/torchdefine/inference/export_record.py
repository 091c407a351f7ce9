"""What is known of an export: the run that it was made from, and the programs that were written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchdefine.inference.export_check import Check
from torchdefine.inference.export_programs import Program


@dataclass(frozen=True)
class ExportedFrom:
    """What an export says about the run that it was made from."""

    name: str
    description: str
    config: str
    """The run's settings as YAML."""
    checkpoint: str
    """Which weights these are: best, last or average."""
    result: Mapping[str, Any] | None
    """What result.json says, if the run has finished."""
    corpus: str
    data_licence: str | None
    """A sentence on the licence of the text, where it is known."""
    licence: str | None = None
    """The licence that the exporting user names."""


@dataclass(frozen=True)
class WrittenProgram:
    """A program in its file, and how far it is from the model."""

    program: Program
    file: str
    checks: list[Check]

    @property
    def largest_difference(self) -> float:
        return max(check.difference for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "summary": self.program.summary,
            "inputs": [port.to_dict() for port in self.program.inputs],
            "outputs": [port.to_dict() for port in self.program.outputs],
            "checks": [asdict(check) for check in self.checks],
            "largest_difference": self.largest_difference,
        }
