"""Whole models, whose forward passes follow the path of the data."""

from torchdefine.models.language_model import HostHint, LanguageModel, Losses, LossOptions
from torchdefine.models.translator import Translator

__all__ = ["HostHint", "LanguageModel", "LossOptions", "Losses", "Translator"]
