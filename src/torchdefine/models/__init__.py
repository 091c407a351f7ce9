"""Whole models, each forward the path of the data."""

from torchdefine.models.language_model import LanguageModel

__all__ = ["LanguageModel"]
