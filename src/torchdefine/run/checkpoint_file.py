"""Checkpoints as files: one safetensors file each, written whole or not at all."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchdefine.errors import UserError
from torchdefine.files import reading_safetensors, write_safetensors
from torchdefine.training.checkpoint import Checkpoint

FORMAT_VERSION = "1"


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    here = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    checksums = {name: _checksum(tensor) for name, tensor in here.items()}
    write_safetensors(
        path,
        here,
        {"format_version": FORMAT_VERSION, "facts": json.dumps(facts), "checksums": json.dumps(checksums)},
    )


def read_checkpoint(path: Path, *, only: str | None = None) -> Checkpoint:
    """Read a checkpoint on the CPU; with ``only``, the tensors under one prefix."""
    with reading_safetensors(
        path,
        if_missing="the run has written no checkpoint yet",
        if_damaged="use the run's other checkpoint, or train again",
    ) as file:
        metadata = file.metadata() or {}
        version = metadata.get("format_version")
        if version != FORMAT_VERSION:
            raise UserError(f"{path} has format version {version}; this torchdefine reads version {FORMAT_VERSION}.")
        names = [name for name in file.keys() if only is None or name.startswith(f"{only}.")]  # noqa: SIM118
        checkpoint = Checkpoint({name: file.get_tensor(name) for name in names}, json.loads(metadata["facts"]))
        checksums = json.loads(metadata["checksums"])
        for name, tensor in checkpoint.tensors.items():
            if checksums.get(name) != _checksum(tensor):
                raise ValueError(f"the tensor {name} is not what was written")
    return checkpoint


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data)
