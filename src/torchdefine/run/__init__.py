"""Runs: from a recipe to a trained model in a folder, and from the folder back to the model."""

from torchdefine.run.folder import RunFolder
from torchdefine.run.run import Run, average_run, load_run
from torchdefine.run.train import train

__all__ = [
    "Run",
    "RunFolder",
    "average_run",
    "load_run",
    "train",
]
