"""Whole models, each forward the path of the data."""

from torchdefine.models.language_model import LanguageModel
from torchdefine.models.translator import Translator

__all__ = ["LanguageModel", "Translator"]
