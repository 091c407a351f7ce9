"""For existing models: replace, fit and distil their tables."""

from torchdefine.adapt.behaviour import Behaviour
from torchdefine.adapt.distill import Distillation, distill
from torchdefine.adapt.fit import FitOptions, fit
from torchdefine.adapt.fitted import Fitted, Measured
from torchdefine.adapt.replace import ReplacementReport, replace_embeddings, restore
from torchdefine.adapt.shrink import ShrinkOptions, Shrunk, shrink_model
from torchdefine.adapt.stand_in import cache_tables

__all__ = [
    "Behaviour",
    "Distillation",
    "FitOptions",
    "Fitted",
    "Measured",
    "ReplacementReport",
    "ShrinkOptions",
    "Shrunk",
    "cache_tables",
    "distill",
    "fit",
    "replace_embeddings",
    "restore",
    "shrink_model",
]
