"""For existing models: replace, fit and distil their tables."""

from torchdefine.adapt.behaviour import Behaviour
from torchdefine.adapt.budget import Budget
from torchdefine.adapt.distill import Distillation, distill
from torchdefine.adapt.fit import FitOptions, Fitted, Measured, fit
from torchdefine.adapt.replace import ReplacementReport, replace_embeddings, restore
from torchdefine.adapt.shrink import ShrinkOptions, Shrunk, shrink_model
from torchdefine.adapt.stand_in import cache_tables
from torchdefine.adapt.unit_fitting import UnitFitting, unit_table

__all__ = [
    "Behaviour",
    "Budget",
    "Distillation",
    "FitOptions",
    "Fitted",
    "Measured",
    "ReplacementReport",
    "ShrinkOptions",
    "Shrunk",
    "UnitFitting",
    "cache_tables",
    "distill",
    "fit",
    "replace_embeddings",
    "restore",
    "shrink_model",
    "unit_table",
]
