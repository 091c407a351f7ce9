"""Whole models, each forward the path of the data."""

from torchdefine.models.language_model import LanguageModel, Losses, LossOptions
from torchdefine.models.translator import Translator

__all__ = ["LanguageModel", "LossOptions", "Losses", "Translator"]
