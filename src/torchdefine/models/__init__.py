"""Whole models, whose forward passes follow the path of the data."""

from torchdefine.models.language_model import LanguageLossConfig, LanguageModel
from torchdefine.models.translator import Translator

__all__ = ["LanguageLossConfig", "LanguageModel", "Translator"]
