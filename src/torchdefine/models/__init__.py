"""Whole models, each forward the path of the data."""

from torchdefine.models.language_model import LanguageModel, Losses, LossOptions

__all__ = ["LanguageModel", "LossOptions", "Losses"]
