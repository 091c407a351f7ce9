"""Checkpoints as files: one sealed safetensors file each, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.plain import read_json
from torchdefine.sealed_tensors import reading_safetensors, write_safetensors
from torchdefine.training.checkpoint import Checkpoint

FORMAT_VERSION = "1"


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    write_safetensors(path, tensors, {"format_version": FORMAT_VERSION, "facts": json.dumps(facts)})


def read_checkpoint(path: Path, *, only: str | None = None) -> Checkpoint:
    """Read a checkpoint on the CPU; with ``only``, the tensors under one prefix."""
    with reading_safetensors(
        path,
        if_missing="the run has written no checkpoint yet",
        if_damaged="use the run's other checkpoint, or train again",
    ) as file:
        version = file.metadata.get("format_version")
        if version != FORMAT_VERSION:
            raise UserError(f"{path} has format version {version}; this torchdefine reads version {FORMAT_VERSION}.")
        tensors = file.read("" if only is None else f"{only}.")
        return Checkpoint(tensors, read_json(file.metadata["facts"], f"The header of {path}"))
