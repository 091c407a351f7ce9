"""Checkpoints: one safetensors file each, written whole or not at all, with all that a run needs to go on."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.errors import UserError
from torchdefine.files import reading_safetensors, write_safetensors

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by dotted name ("model.…", "optimizer.…", "carried.…") and plain facts."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with ``prefix`` and a dot, without it."""
        return {name.removeprefix(f"{prefix}."): t for name, t in self.tensors.items() if name.startswith(f"{prefix}.")}


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    here = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    checksums = {name: _checksum(tensor) for name, tensor in here.items()}
    metadata = {
        "format_version": str(FORMAT_VERSION),
        "facts": json.dumps(facts),
        "checksums": json.dumps(checksums),
    }
    write_safetensors(path, here, metadata)


def read_checkpoint(path: Path, *, only: str | None = None) -> Checkpoint:
    """Read a checkpoint on the CPU; with ``only``, the tensors under one prefix."""
    with reading_safetensors(
        path,
        if_missing="the run has written no checkpoint yet",
        if_damaged="use the run's other checkpoint, or train again",
    ) as file:
        metadata = file.metadata() or {}
        version = metadata.get("format_version")
        if version != str(FORMAT_VERSION):
            raise UserError(f"{path} has format version {version}; this torchdefine reads version {FORMAT_VERSION}.")
        names = [name for name in file.keys() if only is None or name.startswith(f"{only}.")]  # noqa: SIM118
        checkpoint = Checkpoint({name: file.get_tensor(name) for name in names}, json.loads(metadata["facts"]))
        checksums = json.loads(metadata.get("checksums", "{}"))  # early checkpoints have none
        for name, tensor in checkpoint.tensors.items():
            if name in checksums and checksums[name] != _checksum(tensor):
                raise ValueError(f"the tensor {name} is not what was written")
    return checkpoint


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data)


def load_weights(model: nn.Module, checkpoint: Checkpoint, path: Path) -> None:
    """Put a checkpoint's weights into a model of the same shape."""
    try:
        model.load_state_dict(checkpoint.under("model"))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"The weights in {path} do not fit this model: {reason}") from None


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
