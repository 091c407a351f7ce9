"""Runs: from a recipe to a trained model in a folder, and from the folder back to the model."""

from torchdefine.run.entry import average_run, load_run, train
from torchdefine.run.loaded import Run

__all__ = ["Run", "average_run", "load_run", "train"]
