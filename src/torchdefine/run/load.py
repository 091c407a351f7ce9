"""From a run's folder back to its model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch

from torchdefine.errors import UserError
from torchdefine.run.folder import RunFolder
from torchdefine.run.kept_checkpoints import average_checkpoints
from torchdefine.spelling import option
from torchdefine.task import find_task
from torchdefine.training.checkpoint import load_weights
from torchdefine.training.distributed import Processes
from torchdefine.training.precision import flush_denormals


def load_run(
    path: str | Path,
    *,
    checkpoint: str = "best",
    device: str | None = None,
    cached: bool = False,
    compressed: bool = False,
) -> Any:
    """Open a run folder: ``load_run("runs/x").model``; ``checkpoint`` is "best", "last" or "average".

    With ``cached``, vectors are looked up that ``Run.cache`` wrote for these weights; with ``compressed``, those that
    ``Run.compress`` packed. From then on the process treats numbers below 1e-38 as zero, which is faster.
    """
    if cached and compressed:
        raise UserError("Vectors are looked up in the cache or in the compressed table: choose one of them.")
    if checkpoint not in ("best", "last", "average"):
        raise UserError(f"The checkpoint {checkpoint!r} is unknown: use best, last or average.")
    flush_denormals()
    folder = RunFolder(path)
    recipe = folder.recipe()
    task = find_task(recipe.task)
    tokens = task.load_tokens(folder.path)
    folder.fingerprint(tokens)
    file = {"best": folder.best, "last": folder.last, "average": folder.average}[checkpoint]
    _check_checkpoint(folder, checkpoint, file)
    weights = folder.read(file, only="model")
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are thrown away: the caller's random numbers stay
        model = task.build(recipe, tokens)
    load_weights(model, weights, file)
    run = task.run(folder, recipe, tokens, model.to(Processes().device(device)).eval(), file)
    if cached:
        run.use_cache()
    if compressed:
        run.use_compressed()
    return run


def _check_checkpoint(folder: RunFolder, checkpoint: str, file: Path) -> None:
    """Refuse a checkpoint that this run does not have yet, with what would make it."""
    if checkpoint == "average" and not file.exists():
        make = f"torchdefine average {shlex.quote(str(folder.path))}"
        raise UserError(f"The run in {folder.path} has no average: make it with `{make}`.")
    if checkpoint == "best" and not file.exists() and folder.last.exists():
        raise UserError(
            f"The run in {folder.path} has not been validated yet, so it has no best weights: use "
            f"{option('checkpoint')} last."
        )


def average_run(path: str | Path, last: int | None = None) -> tuple[RunFolder, list[int]]:
    """Average the ``last`` checkpoints that a run has kept, all by default; ``load_run`` then takes "average" too."""
    folder = RunFolder(path)
    folder.fingerprint(find_task(folder.recipe().task).load_tokens(folder.path))
    return folder, average_checkpoints(folder, last)
