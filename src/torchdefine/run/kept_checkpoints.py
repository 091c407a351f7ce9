"""Checkpoints of the last validations, and the mean of several: often a better model than any of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchdefine.errors import UserError
from torchdefine.run.checkpoint_file import write_checkpoint
from torchdefine.run.folder import RunFolder
from torchdefine.training.checkpoint import Checkpoint, model_tensors


def keep_checkpoint(folder: RunFolder, model: nn.Module, step: int, count: int) -> None:
    """Write the weights of ``step`` beside those of earlier steps, and leave the ``count`` latest of them."""
    write_checkpoint(
        folder.kept / f"step-{step}.safetensors", model_tensors(model), {"step": step, **folder.fingerprints}
    )
    for _, path in kept_checkpoints(folder)[:-count]:
        path.unlink(missing_ok=True)


def kept_checkpoints(folder: RunFolder) -> list[tuple[int, Path]]:
    """The steps whose weights were kept, and where, from the first to the last."""
    paths = folder.kept.glob("step-*.safetensors") if folder.kept.is_dir() else ()
    found = [(path.stem.removeprefix("step-"), path) for path in paths]
    return sorted((int(step), path) for step, path in found if step.isdecimal())


def average_checkpoints(folder: RunFolder, last: int | None = None) -> list[int]:
    """Write the mean of the ``last`` kept checkpoints, all by default, as the run's average; returns their steps."""
    kept = kept_checkpoints(folder)
    if len(kept) < 2:
        raise UserError(
            f"The run in {folder.path} has kept {len(kept)} checkpoints, but an average needs two: train with "
            "train.keep 5, say."
        )
    if last is not None and not 2 <= last <= len(kept):
        raise UserError(f"The run in {folder.path} has kept {len(kept)} checkpoints: average 2 to {len(kept)} of them.")
    chosen = kept[-last:] if last is not None else kept
    checkpoints = [folder.read(path, only="model") for _, path in chosen]
    facts: dict[str, Any] = {"averaged_steps": [step for step, _ in chosen], **folder.fingerprints}
    write_checkpoint(folder.average, mean_weights(checkpoints), facts)
    return [step for step, _ in chosen]


def mean_weights(checkpoints: Sequence[Checkpoint]) -> dict[str, Tensor]:
    """The mean of every weight, added up in float64; other tensors, such as ranks, must be the same in all."""
    first = checkpoints[0].tensors
    if any(checkpoint.tensors.keys() != first.keys() for checkpoint in checkpoints):
        raise UserError("The checkpoints are of different models, so they have no average.")
    mean = {}
    for name, tensor in first.items():
        if tensor.is_floating_point():
            total = torch.stack([checkpoint.tensors[name].double() for checkpoint in checkpoints]).mean(0)
            mean[name] = total.to(tensor.dtype)
        elif all(torch.equal(tensor, checkpoint.tensors[name]) for checkpoint in checkpoints):
            mean[name] = tensor
        else:
            raise UserError(f"The checkpoints differ in {name}, which has no average: they are of different models.")
    return mean
